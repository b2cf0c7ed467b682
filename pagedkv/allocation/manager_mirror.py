"""The mirror that a manager writes: a new one, or a user's that its rows and block ids fit into."""

from collections.abc import Sequence
from typing import Any

from pagedkv.checks import check_int
from pagedkv.mirror import HostMirror
from pagedkv.specs import ContextParallel, KVCacheGroupSpec, table_width

__all__ = ["mirror_for"]

_OWNER = "a KVCacheManager"


def mirror_for(
    mirror: Any,
    table_groups: Sequence[KVCacheGroupSpec],
    num_blocks: int,
    max_num_seqs: int,
    max_model_len: int,
    world: ContextParallel,
) -> HostMirror:
    """Return a mirror that is claimed for a manager of these groups: `mirror`, or a new one for None."""
    rows, sizes = check_int("max_num_seqs", max_num_seqs, low=1), [group.block_size for group in table_groups]
    if mirror is None:
        mirror = HostMirror(rows, [table_width(group, max_model_len, world) for group in table_groups])
    else:
        widths = [table_width(group, max_model_len, world, None) for group in table_groups]
        _check_shape(mirror, rows, widths)
        _check_use(mirror, sizes, num_blocks)
    mirror.claim(_OWNER, sizes, num_blocks - 1)
    return mirror  # type: ignore[no-any-return]


def _check_shape(mirror: Any, rows: int, widths: Sequence[int]) -> None:
    """A row that is too narrow would run into the next one."""
    if not isinstance(mirror, HostMirror):
        raise TypeError(f"mirror must be a HostMirror, got {type(mirror).__name__} (pass a table's .mirror)")
    if mirror.max_num_reqs != rows:
        raise ValueError(f"mirror must have max_num_seqs = {rows} rows, got {mirror.max_num_reqs}")
    if len(mirror.widths) != len(widths) or any(a < b for a, b in zip(mirror.widths, widths, strict=True)):
        raise ValueError(
            f"mirror must have {len(widths)} groups of at least {list(widths)} columns, "
            f"got {list(mirror.widths)} (pass the manager's max_model_len to its table, "
            "and manager.table_groups)"
        )


def _check_use(mirror: HostMirror, sizes: Sequence[int], num_blocks: int) -> None:
    """Nobody else may write it, and every id of the pool must fit."""
    if mirror.owner is not None:
        raise ValueError(f"mirror must have no writer yet, got one that {mirror.owner} writes (a new one)")
    if mirror.block_sizes not in (None, tuple(sizes)):
        raise ValueError(f"mirror must hold blocks of {list(sizes)} tokens, got {list(mirror.block_sizes)}")
    if mirror.counts.any():
        raise ValueError(
            f"mirror must have no live rows, got {int(mirror.counts.any(axis=0).sum())} (clear() it first)"
        )
    limit = int(mirror.layout[:, 2].min())
    if limit < num_blocks - 1:
        raise ValueError(
            f"num_blocks must be at most {limit + 1} for the tables of this mirror, got {num_blocks} "
            "(their kernel views cannot use larger block ids)"
        )
