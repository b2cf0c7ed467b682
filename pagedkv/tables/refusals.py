"""The words in which a step is refused; raised before anything was changed or enqueued."""

from typing import NoReturn

from pagedkv.errors import CapacityError
from pagedkv.tables.faults import PackFault
from pagedkv.tables.geometry import Geometry

__all__ = ["refuse"]


def refuse(code: int, value: int, place: int, geometry: Geometry, tokens_padded: int) -> NoReturn:
    """Raise the error of a packing fault."""
    match code:
        case PackFault.FIRST_START:
            message = f"query_start_loc must start with 0, got {value}"
        case PackFault.START_ORDER:
            message = f"query_start_loc must not decrease, got {value} at place {place} after a larger value"
        case PackFault.TOKENS:
            raise CapacityError(
                f"query_start_loc must end at or below max_num_batched_tokens = "
                f"{geometry.max_num_batched_tokens}, got {value} (schedule fewer tokens)"
            )
        case PackFault.TOKENS_PADDED:
            message = f"num_tokens_padded must be at least the {value} scheduled tokens, got {tokens_padded}"
        case PackFault.POSITIONS:
            message = f"positions must hold the {value} scheduled tokens, got {place}"
        case PackFault.NUM_REQS:
            raise CapacityError(
                f"num_reqs <= num_reqs_padded must lie in [0, max_num_reqs = {geometry.max_num_reqs}], "
                f"got {value} and {place}"
            )
        case PackFault.MAX_TOKENS_PADDED:
            raise CapacityError(
                f"num_tokens_padded must be at most max_num_batched_tokens = "
                f"{geometry.max_num_batched_tokens}, got {value}"
            )
        case PackFault.NUM_STARTS:
            message = f"query_start_loc must hold num_reqs + 1 = {place} values, got {value}"
        case PackFault.NUM_COMPUTED:
            message = f"num_computed_tokens must hold num_reqs = {place} values, got {value}"
        case PackFault.NUM_ROWS:
            message = f"rows must hold num_reqs = {place} values, got {value}"
        case PackFault.ROWS:
            message = f"rows must lie in [-1, {geometry.max_num_reqs - 1}], got {value} at place {place}"
        case _:
            message = (
                f"rows in the padding [num_reqs, num_reqs_padded) must be empty, got live row {value} "
                f"in group {place} (clear it, or move it into the batch)"
            )
    raise ValueError(message)
