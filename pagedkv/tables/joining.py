"""Joining a mirror: what a table must share with it, and whose its rows are."""

from collections.abc import Sequence
from typing import Any, NoReturn

from pagedkv.errors import PagedKVError
from pagedkv.mirror import HostMirror
from pagedkv.specs import KVCacheGroupSpec

__all__ = ["check_mirror", "rows_of"]


def check_mirror(
    mirror: Any, specs: Sequence[KVCacheGroupSpec], widths: Sequence[int], max_num_reqs: int, *, stable: bool
) -> HostMirror:
    """Return a mirror that a table of these groups can commit, or raise with nothing changed."""
    if not isinstance(mirror, HostMirror):
        raise TypeError(f"mirror must be a HostMirror, got {type(mirror).__name__} (pass its .mirror)")
    if mirror.widths != tuple(widths) or mirror.max_num_reqs != max_num_reqs:
        raise ValueError(
            f"mirror must have {max_num_reqs} rows of widths {list(widths)}, "
            f"got {mirror.max_num_reqs} rows of widths {list(mirror.widths)} "
            f"({_same_sizes(mirror)})"
        )
    sizes = tuple(spec.block_size for spec in specs)
    if mirror.block_sizes not in (None, sizes):
        raise ValueError(f"mirror must hold blocks of {list(sizes)} tokens, got {list(mirror.block_sizes)}")
    if mirror.owner is not None and not stable:
        raise ValueError(f"mirror is written by {mirror.owner}, whose rows are stable: pass stable_rows=True")
    return mirror


def _same_sizes(mirror: HostMirror) -> str:
    if mirror.owner is None:
        return "pass the sizes of the table that it comes from"
    return "pass the manager's max_num_seqs and max_model_len, and its table_groups"


def rows_of(mirror: HostMirror) -> Any:
    """Return what a table's row operations go to: the mirror, or a refusal where somebody else writes it."""
    return mirror if mirror.owner is None else _OthersRows(mirror.owner)


class _OthersRows:
    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __getattr__(self, operation: str) -> NoReturn:
        raise PagedKVError(
            f"{operation} must not be called on this table: {self._owner} writes its mirror "
            "(call its methods instead)"
        )
