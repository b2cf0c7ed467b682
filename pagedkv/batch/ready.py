"""A scheduler step as the arrays that compiled code takes; shapes and types are checked here."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.rows import Blocks
from pagedkv.batch.scheduler_output import AdmittedRequests, RunningRequests
from pagedkv.batch.states import Int64Array
from pagedkv.checks import IntArray, as_int32, as_ready, check_shape

__all__ = ["Admitted", "Running", "ready_admitted", "ready_running"]

_NO_BLOCKS = np.empty((0, 0), np.int32)
_NOTHING = np.empty(0, np.int32)


class Admitted(NamedTuple):
    """`AdmittedRequests` as ready arrays."""

    req_ids: list[Hashable]
    num_prefill: IntArray
    scheduled: IntArray
    computed: IntArray
    blocks: Blocks
    handles: Int64Array | None


class Running(NamedTuple):
    """`RunningRequests` as ready arrays; computed [0] and blocks of shape [0, 0] where none are given."""

    handles: Int64Array
    scheduled: IntArray
    computed: IntArray
    blocks: Blocks

    @property
    def slots(self) -> list[int]:
        """Slots of the requests."""
        slots: list[int] = (self.handles & a.SLOT_MASK).tolist()
        return slots


def ready_running(running: RunningRequests) -> Running:
    """Convert running requests to the arrays that compiled code takes."""
    handles = np.asarray(running.handles, np.int64 if len(running.handles) == 0 else None)
    if handles.dtype.kind not in "iu" or handles.ndim != 1:
        raise TypeError(f"handles must be int64 [n], got {handles.dtype} {list(handles.shape)}")
    scheduled = _int32("num_scheduled_tokens", running.num_scheduled_tokens, handles.size)
    computed = _NOTHING
    if running.num_computed_tokens is not None:
        computed = _int32("num_computed_tokens", running.num_computed_tokens, handles.size)
    counts, ids = running.num_new_blocks, running.block_ids
    blocks = Blocks(_NO_BLOCKS, _NOTHING)
    if counts is not None or ids is not None:
        blocks = _ready_blocks("num_new_blocks", counts, ids, handles.size, None)
    return Running(as_ready(handles.astype(np.int64, copy=False)), scheduled, computed, blocks)


def ready_admitted(name: str, admitted: AdmittedRequests, num_groups: int, *, has_blocks: bool) -> Admitted:
    """Convert requests that start; `has_blocks` is False where a manager writes the tables."""
    req_ids = list(admitted.req_ids)
    n = len(req_ids)
    if len(set(req_ids)) < n:
        raise ValueError(f"{name} must name each request once, got {_repeated(req_ids)!r} twice")
    computed = admitted.num_computed_tokens
    blocks = Blocks(np.zeros((num_groups, n), np.int32), _NOTHING)
    if has_blocks and (admitted.num_blocks is not None or admitted.block_ids is not None):
        blocks = _ready_blocks("num_blocks", admitted.num_blocks, admitted.block_ids, n, num_groups)
    elif admitted.num_blocks is not None or admitted.block_ids is not None:
        raise ValueError("num_blocks must be None with a manager, which writes the tables itself")
    handles = admitted.handles
    if handles is not None:
        handles = np.asarray(handles, np.int64)
        check_shape("handles", handles, (n,), "[n]")
    return Admitted(
        req_ids,
        _int32("num_prefill_tokens", admitted.num_prefill_tokens, n),
        _int32("num_scheduled_tokens", admitted.num_scheduled_tokens, n),
        np.zeros(n, np.int32) if computed is None else _int32("num_computed_tokens", computed, n),
        blocks,
        handles,
    )


def _ready_blocks(name: str, counts: Any, ids: Any, n: int, num_groups: int | None) -> Blocks:
    table = np.asarray(counts if counts is not None else _NO_BLOCKS)
    if table.size == 0:
        table = table.astype(np.int32)
    if table.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {table.dtype}")
    if table.ndim == 1 and num_groups in (None, 1):
        table = table.reshape(1, -1)
    if table.ndim != 2:
        raise ValueError(f"{name} must have shape [G, n], got {list(table.shape)}")
    if num_groups is not None:
        check_shape(name, table, (num_groups, n), "[G, n]")
    flat = as_int32(name, table.ravel()).reshape(table.shape)
    return Blocks(as_ready(flat), as_ready(as_int32("block_ids", () if ids is None else ids)))


def _int32(name: str, values: Any, n: int) -> IntArray:
    numbers = as_int32(name, values)
    check_shape(name, numbers, (n,), "[n]")
    return as_ready(numbers)


def _repeated(values: Sequence[Hashable]) -> Hashable:
    seen: set[Hashable] = set()
    return next(value for value in values if value in seen or seen.add(value))  # type: ignore[func-returns-value]
