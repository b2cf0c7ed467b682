"""A scheduler step as the arrays that compiled code takes; shapes and types are checked here."""

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.rows import NO_BLOCKS, Blocks
from pagedkv.batch.scheduler_output import NOBODY, AdmittedRequests, RunningRequests
from pagedkv.batch.states import Int64Array
from pagedkv.checks import IntArray, as_int32, as_ready, check_shape
from pagedkv.constants import MAX_INT32
from pagedkv.tables.inputs import NO_INT32, NO_INT64

__all__ = ["Admitted", "Running", "raise_length", "ready_admitted", "ready_computed", "ready_running"]


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
    def slots(self) -> Int64Array:
        """Slots of the requests, int64 [n]."""
        slots: Int64Array = self.handles & a.SLOT_MASK
        return slots


def ready_running(running: RunningRequests, num_groups: int | None) -> Running:
    """Convert running requests; `num_groups` is None where a manager writes the tables."""
    handles = _handles(running.handles)
    computed = running.num_computed_tokens
    blocks = _blocks("num_new_blocks", running.num_new_blocks, running.block_ids, handles.size, num_groups)
    return Running(
        handles,
        _int32("num_scheduled_tokens", running.num_scheduled_tokens, handles.size),
        NO_INT32 if computed is None else _int32("num_computed_tokens", computed, handles.size),
        NO_BLOCKS if blocks is None else blocks,
    )


def ready_admitted(name: str, admitted: AdmittedRequests, num_groups: int | None) -> Admitted:
    """Convert requests that start; `num_groups` as for `ready_running`."""
    if admitted is NOBODY:
        return _nobody(num_groups)
    if not isinstance(admitted, AdmittedRequests):
        raise TypeError(f"{name} must be AdmittedRequests, got {type(admitted).__name__}")
    if isinstance(admitted.req_ids, str | bytes) or not hasattr(admitted.req_ids, "__iter__"):
        raise TypeError(f"req_ids must be a sequence of ids, got {admitted.req_ids!r} (write [id])")
    req_ids = list(admitted.req_ids)
    n = len(req_ids)
    if len(set(req_ids)) < n:
        raise ValueError(f"{name} must name each request once, got {_repeated(req_ids)!r} twice")
    computed, handles = admitted.num_computed_tokens, admitted.handles
    blocks = _blocks("num_blocks", admitted.num_blocks, admitted.block_ids, n, num_groups)
    if handles is not None:
        handles = _handles(handles)
        check_shape("handles", handles, (n,), "[n]")
    made = Admitted(
        req_ids,
        _int32("num_prefill_tokens", admitted.num_prefill_tokens, n),
        _int32("num_scheduled_tokens", admitted.num_scheduled_tokens, n),
        np.zeros(n, np.int32) if computed is None else _int32("num_computed_tokens", computed, n),
        Blocks(np.zeros((num_groups or 0, n), np.int32), NO_INT32) if blocks is None else blocks,
        handles,
    )
    lengths = made.computed.astype(np.int64) + made.scheduled
    if lengths.max(initial=0) > MAX_INT32:
        raise_length(int(lengths.max()), req_ids[int(lengths.argmax())])
    return made


def ready_computed(given: Any, believed: IntArray) -> Any:
    """Return true counts as a table takes them; those on the host are checked against what is believed."""
    if hasattr(given, "__cuda_array_interface__"):
        return given  # the host would have to wait
    computed = as_int32("num_computed_tokens", given)
    check_shape("num_computed_tokens", computed, believed.shape, "[num_reqs]")
    is_above = computed > believed
    if is_above.any():
        at = int(is_above.argmax())
        raise ValueError(
            f"num_computed_tokens must be at most the batch's, which are upper bounds: {believed[at]} "
            f"at position {at}, got {computed[at]} (give it to update)"
        )
    return computed


def raise_length(length: int, request: Hashable) -> NoReturn:
    """Raise ValueError for a sequence that is longer than int32 holds."""
    raise ValueError(
        f"computed and scheduled tokens must be at most {MAX_INT32}, got {length} for request {request!r}"
    )


@cache
def _nobody(num_groups: int | None) -> Admitted:
    blocks = Blocks(np.empty((num_groups or 0, 0), np.int32), NO_INT32)
    return Admitted([], NO_INT32, NO_INT32, NO_INT32, blocks, None)


def _handles(handles: Any) -> Int64Array:
    if not hasattr(handles, "__len__"):
        raise TypeError(f"handles must be int64 [n], got {type(handles).__name__}")
    numbers = np.asarray(handles)
    if numbers.size == 0 and not isinstance(handles, np.ndarray):
        return NO_INT64
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise TypeError(f"handles must be int64 [n], got {numbers.dtype} {list(numbers.shape)}")
    return as_ready(numbers.astype(np.int64, copy=False))


def _blocks(name: str, counts: Any, ids: Any, n: int, num_groups: int | None) -> Blocks | None:
    if counts is None and ids is None:
        return None
    if num_groups is None:
        raise ValueError(f"{name} must be None with a manager, which writes the tables itself")
    if counts is None:
        raise ValueError(f"{name} must be given beside block_ids, got None")
    table = np.asarray(counts)
    if table.size == 0 and not isinstance(counts, np.ndarray):
        table = np.empty((num_groups, 0), np.int32)  # an empty list has no dtype and shape of its own
    if table.ndim == 1 and num_groups == 1:
        table = table.reshape(1, -1)
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
