"""A step of the batch: what the scheduler decided, then the commit of it."""

from typing import Any

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.admission import plan_update
from pagedkv.batch.batch_reads import BatchReads
from pagedkv.batch.metadata import StepMetadata
from pagedkv.batch.ready import ready_running
from pagedkv.batch.reordering import classes_of, order_by_class, swaps_of
from pagedkv.batch.rows import Rows
from pagedkv.batch.scheduler_output import RunningRequests, SchedulerOutput
from pagedkv.batch.states import Int64Array
from pagedkv.batch.update import rest, take
from pagedkv.checks import IntArray, check_int
from pagedkv.errors import PagedKVError
from pagedkv.mirror import HostMirror
from pagedkv.tables.captured import CapturedStep
from pagedkv.tables.multi_group import MultiGroupBlockTable

__all__ = ["BatchSteps"]

_NO_INT32, _NO_INT64 = np.empty(0, np.int32), np.empty(0, np.int64)
_NO_BLOCKS = np.empty((0, 0), np.int32)


class BatchSteps(BatchReads):
    """Base of `InputBatch`: update, commit, captured and dummy steps."""

    table: MultiGroupBlockTable
    manager: Any
    _mirror: HostMirror
    _rows: Rows

    def update(self, output: SchedulerOutput) -> Int64Array:
        """Take one scheduler step: who goes, who comes, which blocks are new, in the right order.

        Parameters
        ----------
        output : SchedulerOutput

        Returns
        -------
        ndarray of int64, shape [n]
            Handles of the new requests, in their order.

        Raises
        ------
        LookupError, StaleSequenceError
            An id or a handle is unknown.
        CapacityError
            More requests, tokens or blocks than there is room for.
        ValueError, TypeError
            A request is named twice, or a number, shape or dtype is wrong. Nothing has changed then.
        """
        running, new, resumed, finished, preempted = output
        if not (len(new.req_ids) or len(resumed.req_ids) or finished or preempted or self._states.holes):
            code = self._advance(running)
            if code == a.Code.DONE:
                return _NO_INT64
            if code == a.Code.UNORDERED:
                self._put_in_order()
                return _NO_INT64
        plan = plan_update(self._states, self._rows, self._mirror, output)
        handles = take(self._states, self._rows, plan)
        if self._states.setup[a.DECODE_THRESHOLD] >= 0:
            self._put_in_order()
        return handles

    def commit(
        self,
        *,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: Any = None,
        positions: Any = None,
        max_seq_len: int | None = None,
        out: int = 0,
        stream: Any = None,
    ) -> StepMetadata:
        """Bring the device up to date for the batch as it is, and return what attention reads.

        Parameters
        ----------
        num_reqs_padded, num_tokens_padded : int, optional
            Sizes that a CUDA graph reads; see `MultiGroupBlockTable.commit`.
        num_computed_tokens : int32 [num_reqs] on the device, optional
            The true values where the host's are upper bounds (drafts in flight), in batch order. Slots,
            positions and lengths come from these.
        positions : int64 [num_tokens], optional
            As `MultiGroupBlockTable.commit` takes them.
        max_seq_len : int, optional
            Longest sequence that the metadata promises, as for a capture; the longest of the step by default.
        out : int
            Output set.
        stream : CuPy stream, optional

        Raises
        ------
        PagedKVError
            There are holes (call `condense`), or a request of a manager's has no blocks.
        CapacityError, ValueError, TypeError
            As `MultiGroupBlockTable.commit`.
        """
        states = self._states
        if states.holes:
            raise PagedKVError(f"the batch must have no holes, got {states.holes} (call condense())")
        num_reqs = int(states.setup[a.NUM_REQS])
        padded = num_reqs if num_reqs_padded is None else num_reqs_padded
        host, is_prefilling, rows, longest_query, longest = self._fill(num_reqs, max(padded, num_reqs))
        step = self.table.commit(
            num_reqs,
            host[0, : num_reqs + 1],
            host[2, :num_reqs] if num_computed_tokens is None else num_computed_tokens,
            rows=rows,
            num_reqs_padded=padded,
            num_tokens_padded=num_tokens_padded,
            positions=positions,
            out=out,
            stream=stream,
        )
        return StepMetadata.of(step, host, is_prefilling, longest_query, max_seq_len or longest)

    def pack(self, captured: CapturedStep, *, max_seq_len: int | None = None) -> StepMetadata:
        """Write the batch as it is into a captured step, for the next replay of the graph that holds it.

        Parameters
        ----------
        captured : CapturedStep
            One of the table's; call its `mark_replayed` after the replay.
        max_seq_len : int, optional
            As for `commit`.

        Raises
        ------
        PagedKVError, CapacityError, ValueError
            As `CapturedStep.pack`; and there are holes.
        """
        if self._states.holes:
            raise PagedKVError(f"the batch must have no holes, got {self._states.holes} (call condense())")
        num_reqs = int(self._states.setup[a.NUM_REQS])
        padded = max(captured.num_reqs_padded, num_reqs)
        host, is_prefilling, rows, longest_query, longest = self._fill(num_reqs, padded)
        step = captured.pack(num_reqs, host[0, : num_reqs + 1], host[2, :num_reqs], rows=rows)
        return StepMetadata.of(step, host, is_prefilling, longest_query, max_seq_len or longest)

    def dummy(
        self,
        num_reqs: int,
        num_tokens: int,
        *,
        seq_len: int | None = None,
        max_seq_len: int | None = None,
        out: int = 0,
        stream: Any = None,
    ) -> StepMetadata:
        """Commit a step of requests that do not exist: to warm up, to capture, to keep other ranks company.

        It can hit nothing but the null block: every table row is NULL and every slot PAD. Tokens are spread
        evenly over the requests.

        Requests of the batch go on afterwards: with rows in batch order they rest for this step, and come
        back with `RunningRequests` as after any rest; with stable rows they are not touched.

        Parameters
        ----------
        num_reqs : int
            Requests, at most max_num_reqs, at least 1 where there are tokens.
        num_tokens : int
            Tokens, at most max_num_batched_tokens.
        seq_len : int, optional
            Length of each sequence, this step's tokens included; those tokens alone by default.
        max_seq_len : int, optional
            As for `commit`; a capture gives the model length.
        out, stream
            As for `commit`.

        Raises
        ------
        ValueError
            A size is out of range.
        """
        check_int("num_reqs", num_reqs, 0, self.table.max_num_reqs)
        check_int("num_tokens", num_tokens, 0, self.table.max_num_batched_tokens if num_reqs else 0)
        host = np.zeros((3, num_reqs + 1), np.int32)
        each, more = divmod(num_tokens, max(num_reqs, 1))
        lengths = np.full(num_reqs, each, np.int32)
        lengths[:more] += 1
        np.cumsum(lengths, out=host[0, 1:])
        longest_query = each + (more > 0)
        host[1, :num_reqs] = lengths if seq_len is None else check_int("seq_len", seq_len, longest_query)
        host[2] = host[1]
        host[2, :num_reqs] -= lengths
        rows = np.full(num_reqs, -1, np.int32) if self.table.stable_rows else None
        if rows is None:
            rest(self._states, self._rows)
        step = self.table.commit(num_reqs, host[0], host[2, :num_reqs], rows=rows, out=out, stream=stream)
        longest = int(host[1].max())
        return StepMetadata.of(
            step, host, np.zeros(num_reqs, np.bool_), longest_query, max_seq_len or longest
        )

    def _advance(self, running: RunningRequests) -> int:
        """Take a step of running requests alone; a fault is left for `plan_update` to name."""
        handles, scheduled, computed, counts, ids = running
        if counts is None:
            counts, ids = _NO_BLOCKS, _NO_INT32
        elif self.manager is not None:
            return a.Code.BLOCKS
        computed = _NO_INT32 if computed is None else computed
        state, tables = self._states.addresses, self._mirror.addresses
        try:
            code, _ = a.advance(state, tables, handles, scheduled, computed, counts, ids)
        except (TypeError, ValueError, AttributeError):  # arrays to convert, or to refuse
            ready = ready_running(running)
            code, _ = a.advance(state, tables, *ready[:3], *ready.blocks)
        return code  # type: ignore[no-any-return]

    def _fill(self, num_reqs: int, padded: int) -> tuple[Any, Any, IntArray | None, int, int]:
        host, is_prefilling = np.empty((3, padded + 1), np.int32), np.empty(padded, np.bool_)
        rows = np.empty(num_reqs, np.int32) if self._needs_rows else _NO_INT32
        handles = np.empty(num_reqs, np.int64) if self._needs_handles else _NO_INT64
        longest = a.fill(self._states.addresses, host, is_prefilling, rows, handles)
        return host, is_prefilling, self._rows.of_step(rows, handles), *longest

    def _put_in_order(self) -> None:
        numbers, setup = self._states.numbers[self._states.slots], self._states.setup
        thresholds = (int(setup[a.DECODE_THRESHOLD]), int(setup[a.SHORT_EXTEND_THRESHOLD]))
        classes = classes_of(numbers[:, a.COMPUTED].copy(), numbers[:, a.SCHEDULED].copy(), *thresholds)
        self._permute(order_by_class(classes))

    def _permute(self, order: Int64Array) -> None:
        first, second = swaps_of(order)
        if first.size:
            self._rows.swap(first, second)
            self._states.permute(order)
            self._rows.enter(self._states.order[first].tolist() + self._states.order[second].tolist())
