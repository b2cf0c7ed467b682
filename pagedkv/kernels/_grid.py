"""Launch shapes, one function per operation: blocks of BLOCK_THREADS threads, grid (x, num_groups).

Every kernel strides over its work, so any x is right; these fill the GPU and no more, which keeps a
captured launch right for whatever a later replay finds in the staging header.
"""

from collections.abc import Callable
from typing import Final

__all__ = [
    "BLOCK_THREADS",
    "GRIDS",
    "Grid",
    "apply_writes",
    "expand_blocks",
    "gather_rows",
    "slot_mapping",
    "split_batch",
    "state_indices",
]

Grid = tuple[int, int]

BLOCK_THREADS: Final = 256
MAX_BLOCKS: Final = 132 * 5
"""Five blocks on each of an H200's 132 multiprocessors: what the launch bounds of slot_mapping ask for."""

_WARPS: Final = BLOCK_THREADS // 32
_GATHER_TILE: Final = 4  # positions that a block of gather_rows takes at a time


def apply_writes(num_writes: int) -> Grid:
    """One warp per record, for at most `num_writes` records."""
    return _grid(num_writes, _WARPS)


def slot_mapping(num_tokens: int, num_reqs: int, num_groups: int) -> Grid:
    """One thread per token (and per entry of query_start_loc), for at most that many, padding included."""
    return _grid(max(num_tokens, num_reqs + 1), BLOCK_THREADS, num_groups)


def gather_rows(num_positions: int, num_groups: int) -> Grid:
    """One block per four batch positions and group."""
    return _grid(num_positions, _GATHER_TILE, num_groups)


def state_indices(num_reqs: int, num_states: int) -> Grid:
    """One thread per batch position and state group, for at most that many, padding included."""
    return _grid(num_reqs, BLOCK_THREADS, num_states)


def split_batch(num_tokens: int, num_reqs: int, num_groups: int) -> Grid:
    """One thread per token (and per entry of query_start_loc) of a micro-batch."""
    return slot_mapping(num_tokens, num_reqs, num_groups)


def expand_blocks(num_kernel_ids: int) -> Grid:
    """One thread per kernel block id."""
    return _grid(num_kernel_ids, BLOCK_THREADS)


def _grid(work: int, per_block: int, num_groups: int = 1) -> Grid:
    most = max(MAX_BLOCKS // max(num_groups, 1), 1)
    return min(max(-(-work // per_block), 1), most), max(num_groups, 1)


GRIDS: Final[dict[str, Callable[..., Grid]]] = {
    function.__name__: function
    for function in (apply_writes, slot_mapping, gather_rows, state_indices, split_batch, expand_blocks)
}
