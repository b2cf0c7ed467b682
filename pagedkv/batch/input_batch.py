"""InputBatch: which request stands where in the batch, step by step."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.admission import plan_update
from pagedkv.batch.batch_steps import BatchSteps
from pagedkv.batch.rows import NO_BLOCKS
from pagedkv.batch.scheduler_output import AdmittedRequests, SchedulerOutput
from pagedkv.batch.states import RequestStates
from pagedkv.batch.update import add, close_holes, forget
from pagedkv.batch.whose_rows import join, rows_of
from pagedkv.checks import as_int32, check_int, check_shape
from pagedkv.compiled import seal
from pagedkv.tables.flat_ids import flat_ids
from pagedkv.tables.inputs import NO_INT32, NO_INT64
from pagedkv.tables.multi_group import MultiGroupBlockTable

__all__ = ["InputBatch"]


class InputBatch(BatchSteps):
    """The batch of a step: requests by name, by handle and by position, and their rows in the tables.

    A step is `update`, with what the scheduler decided, then `commit`. Requests stand at positions
    [0, num_reqs), which do not change without need: who comes takes the lowest free one, and holes are
    closed from the top.

    With rows in batch order, the rows of the tables follow the positions. With stable rows nothing is moved
    in the tables; each commit says which row stands where. With a manager, which writes the tables, rows
    are stable, and a request's handle is its sequence's. Not thread-safe.

    Parameters
    ----------
    table : MultiGroupBlockTable
        Without a manager the batch is the one that writes its rows. All tables that commit one mirror have
        one batch together.
    manager : KVCacheManager, optional
        The one whose mirror the table commits.
    decode_threshold : int, optional
        `update` puts the batch in the order decodes, short extends, long extends, prefills; only misplaced
        requests move. `add_request`, `condense` and the like leave the order as it comes. A decode has at
        most so many tokens in the step (1, and the drafts), and some in the cache; a prefill has none in the
        cache. The batch is not ordered where None.
    short_extend_threshold : int, optional
        Most tokens of a short extend; `decode_threshold` where None, and then there are none.

    Raises
    ------
    ValueError
        The table is not that of the manager, or a manager writes it that was not given; another batch over
        the same mirror still lives; a threshold is below 0, or the second below the first.
    TypeError
        A threshold is no int.

    Examples
    --------
    >>> from pagedkv.batch import AdmittedRequests, RunningRequests, SchedulerOutput
    >>> batch = InputBatch(MultiGroupBlockTable([16], 4, 512, 64, backend="numpy"))
    >>> new = AdmittedRequests(["a", "b"], [20, 5], [20, 5], num_blocks=[[2, 1]], block_ids=[1, 2, 3])
    >>> handles = batch.update(SchedulerOutput(new=new))
    >>> batch.commit().groups[0].slot_mapping[:3]
    array([16, 17, 18])
    >>> _ = batch.update(SchedulerOutput(RunningRequests(handles, [1, 1])))
    >>> batch.commit().batch.seq_lens_cpu_upper_bound
    array([21,  6], dtype=int32)
    """

    def __init__(
        self,
        table: MultiGroupBlockTable,
        manager: Any = None,
        *,
        decode_threshold: int | None = None,
        short_extend_threshold: int | None = None,
    ) -> None:
        self.table, self.manager = table, manager
        self._mirror = table.mirror
        self._states = RequestStates(table.max_num_reqs, makes_handles=manager is None)
        self._rows = rows_of(table, manager, self._states)
        self._set_thresholds(decode_threshold, short_extend_threshold)
        self._states.setup[a.MAX_TOKENS] = table.max_num_batched_tokens
        self._needs_rows = table.stable_rows and manager is None  # whether `fill` writes them
        nothing = (NO_INT64, NO_INT32, NO_INT32, *NO_BLOCKS)
        seal(a.advance, self._states.addresses, self._mirror.addresses, *nothing)
        join(self._mirror, self)

    def add_request(
        self,
        req_id: Hashable,
        num_prefill_tokens: int,
        num_scheduled_tokens: int = 0,
        num_computed_tokens: int = 0,
        block_ids: Sequence[Any] | None = None,
        handle: int | None = None,
    ) -> int:
        """Add one request, at the lowest hole or behind all others; the others stay as they are.

        Parameters
        ----------
        req_id : hashable
        num_prefill_tokens, num_scheduled_tokens, num_computed_tokens : int
            As in `AdmittedRequests`.
        block_ids : sequence of array_like of int, optional
            Its blocks, one list a group.
        handle : int, optional
            With a manager: its sequence.

        Returns
        -------
        int
            Its handle.

        Raises
        ------
        ValueError
            The id is known already, of a request in the batch or of one that rests or was preempted.
        StaleSequenceError, CapacityError, ValueError, TypeError
            As `update`. Nothing has changed then.
        """
        if req_id in self:
            raise ValueError(f"request {req_id!r} must be unknown, got one that is (remove_request it first)")
        counts, ids = None, None
        if block_ids is not None:
            counts, ids = flat_ids(block_ids, self._mirror.num_groups)
            counts = np.maximum(counts, 0)
        numbers = ([num_prefill_tokens], [num_scheduled_tokens], [num_computed_tokens])
        handles = None if handle is None else [handle]
        output = SchedulerOutput(new=AdmittedRequests([req_id], *numbers, counts, ids, handles))
        plan = plan_update(self._states, self._rows, self._mirror, output, beside_others=True)
        return int(add(self._states, self._rows, plan)[0])

    def remove_request(self, req_id: Hashable) -> int | None:
        """Forget one request and clear its row; its position stays a hole until `condense` or an addition.

        Returns
        -------
        int or None
            Its position; None where it rested or was unknown.
        """
        slot = self._states.slot_of(req_id)
        if slot is None:
            return None
        position = int(self._states.numbers[slot, a.POSITION])
        forget(self._states, self._rows, [slot])
        return position if position >= 0 else None

    def condense(self) -> None:
        """Close the holes: the highest request moves into the lowest hole, until there are none."""
        close_holes(self._states, self._rows)

    def swap(self, first: int, second: int) -> None:
        """Let the requests at two positions change places.

        Raises
        ------
        ValueError
            A position is out of range.
        PagedKVError
            There are holes (call `condense`).
        """
        order = np.arange(self._states.num_reqs)
        for name, position in (("first", first), ("second", second)):
            check_int(f"{name} position", position, 0, order.size - 1)
        order[[first, second]] = second, first
        self.reorder(order)

    def reorder(self, order: Any) -> None:
        """Let the request that stands at ``order[i]`` stand at i; who stands there already is not touched.

        Parameters
        ----------
        order : array_like of int, shape [num_reqs]
            A permutation of the positions.

        Raises
        ------
        ValueError
            It is none.
        PagedKVError
            There are holes (call `condense`).
        """
        num_reqs = self._states.num_reqs
        wanted = as_int32("order", order).astype(np.int64)
        check_shape("order", wanted, (num_reqs,), "[num_reqs]")
        self._refuse_holes()
        if not np.array_equal(np.sort(wanted), np.arange(num_reqs)):
            raise ValueError(f"order must name each of {num_reqs} positions once, got {wanted.tolist()}")
        self._permute(wanted)

    def _set_thresholds(self, decode: int | None, short_extend: int | None) -> None:
        if decode is None and short_extend is not None:
            raise ValueError("short_extend_threshold must be None without a decode_threshold, got both")
        low = -1 if decode is None else check_int("decode_threshold", decode)
        high = low if short_extend is None else check_int("short_extend_threshold", short_extend, max(low, 0))
        self._states.setup[[a.DECODE_THRESHOLD, a.SHORT_EXTEND_THRESHOLD]] = low, high
