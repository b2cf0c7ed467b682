"""Committing the batch as it is: steps, captured steps, and dummy steps."""

from typing import Any

import numpy as np

from pagedkv.batch.batch_reads import BatchReads
from pagedkv.batch.filling import fill
from pagedkv.batch.metadata import StepMetadata
from pagedkv.batch.ready import ready_computed
from pagedkv.batch.states import Int64Array
from pagedkv.batch.update import rest, wake
from pagedkv.checks import IntArray, check_int
from pagedkv.errors import PagedKVError
from pagedkv.tables.captured import CapturedStep
from pagedkv.tables.inputs import NO_INT32
from pagedkv.tables.multi_group import MultiGroupBlockTable
from pagedkv.tables.step import Step

__all__ = ["BatchCommits"]


class BatchCommits(BatchReads):
    """Base of `InputBatch`: what attention reads of the batch."""

    table: MultiGroupBlockTable
    manager: Any
    _needs_rows: bool

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
        num_computed_tokens : int32 [num_reqs], optional
            The true values where the batch's are upper bounds (drafts in flight), in batch order; on the
            device, or on the host. Slots, positions and lengths come from these. None may be larger than the
            batch's: on the host that is checked, on the device nobody looks.
        positions : int64 [num_tokens], optional
            As `MultiGroupBlockTable.commit` takes them.
        max_seq_len : int, optional
            Longest sequence that the metadata promises, as for a capture; at least the longest of the step,
            which is promised by default.
        out : int
            Output set.
        stream : CuPy stream, optional

        Raises
        ------
        PagedKVError
            There are holes (call `condense`), or a request of a manager's has no blocks.
        StaleSequenceError
            The manager has freed a sequence that is in the batch.
        ValueError
            A `num_computed_tokens` on the host above the batch's, or a `max_seq_len` below the longest
            sequence.
        CapacityError, ValueError, TypeError
            As `MultiGroupBlockTable.commit`. Nothing has changed then.
        """
        self._refuse_holes()
        num_reqs = padded = size = self._states.num_reqs
        if num_reqs_padded is not None:
            padded = check_int("num_reqs_padded", num_reqs_padded)
            size = min(max(padded, num_reqs), self.table.max_num_reqs)  # others are refused by the table
        host, is_prefilling, handles, rows, longest_query, longest = self._fill(num_reqs, size)
        if max_seq_len is not None:
            longest = check_int("max_seq_len", max_seq_len, longest)
        computed = host[2, :num_reqs]
        step = self.table.commit(
            num_reqs,
            host[0, : num_reqs + 1],
            computed if num_computed_tokens is None else ready_computed(num_computed_tokens, computed),
            rows=rows,
            num_reqs_padded=padded,
            num_tokens_padded=num_tokens_padded,
            positions=positions,
            out=out,
            stream=stream,
        )
        self._states.committed = handles
        return StepMetadata.of(step, host, is_prefilling, longest_query, longest)

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
        PagedKVError
            There are holes, or a request of a manager's has no blocks; or as `CapturedStep.pack`.
        StaleSequenceError
            The manager has freed a sequence that is in the batch.
        ValueError
            The captured step is another table's, or `max_seq_len` is below the longest sequence.
        CapacityError, ValueError, TypeError
            As `CapturedStep.pack`. Nothing has changed then.
        """
        if not captured.is_of(self.table):
            raise ValueError("captured must be a step of the batch's table, got another's")
        self._refuse_holes()
        num_reqs = self._states.num_reqs
        padded = max(captured.num_reqs_padded, num_reqs)
        host, is_prefilling, handles, rows, longest_query, longest = self._fill(num_reqs, padded)
        if max_seq_len is not None:
            longest = check_int("max_seq_len", max_seq_len, longest)
        step = captured.pack(num_reqs, host[0, : num_reqs + 1], host[2, :num_reqs], rows=rows)
        self._states.committed = handles
        return StepMetadata.of(step, host, is_prefilling, longest_query, longest)

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
        back with `RunningRequests` as after any rest; with stable rows they are not touched. So a dummy step
        costs nothing more with stable rows. With rows in batch order the host copies the ids of all requests
        aside and back, and all of their rows are sent again in the step in which they come back.
        `previous_positions` are those of the last real step either way.

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
        CapacityError, ValueError, TypeError
            A size is out of range, or as `MultiGroupBlockTable.commit`; the batch is as it was.
        """
        check_int("num_reqs", num_reqs, 0, self.table.max_num_reqs)
        check_int("num_tokens", num_tokens, 0, self.table.max_num_batched_tokens if num_reqs else 0)
        host = np.zeros((3, num_reqs + 1), np.int32)
        each, more = divmod(num_tokens, max(num_reqs, 1))
        lengths = np.full(num_reqs, each, np.int32)
        lengths[:more] += 1
        np.cumsum(lengths, out=host[0, 1:])
        longest_query = int(each + (more > 0))
        host[1, :num_reqs] = lengths if seq_len is None else check_int("seq_len", seq_len, longest_query)
        host[2] = host[1]
        host[2, :num_reqs] -= lengths
        longest = int(host[1].max())
        if max_seq_len is not None:
            longest = check_int("max_seq_len", max_seq_len, longest)
        step = self._commit_dummy(num_reqs, host[0], host[2, :num_reqs], out, stream)
        return StepMetadata.of(step, host, np.zeros(num_reqs, np.bool_), longest_query, longest)

    def _commit_dummy(
        self, num_reqs: int, starts: IntArray, computed: IntArray, out: int, stream: Any
    ) -> Step:
        if self.table.stable_rows:
            rows = np.full(num_reqs, -1, np.int32)
            return self.table.commit(num_reqs, starts, computed, rows=rows, out=out, stream=stream)
        before = rest(self._states, self._rows)
        try:
            return self.table.commit(num_reqs, starts, computed, out=out, stream=stream)
        except BaseException:
            wake(self._states, self._rows, before)
            raise

    def _refuse_holes(self) -> None:
        if self._states.holes:
            raise PagedKVError(f"the batch must have no holes, got {self._states.holes} (call condense())")

    def _fill(self, num_reqs: int, padded: int) -> tuple[Any, Any, Int64Array, IntArray | None, int, int]:
        host, is_prefilling = np.empty((3, padded + 1), np.int32), np.empty(padded, np.bool_)
        handles = np.empty(num_reqs, np.int64)
        rows = np.empty(num_reqs, np.int32) if self._needs_rows else NO_INT32
        longest = fill(self._states.addresses, host, is_prefilling, handles, rows)
        return host, is_prefilling, handles, self._rows.of_step(rows, handles), *longest
