"""RunningBatch: the running sequences as columns of one array; row i is also row i of the block tables."""

import numpy as np

from pagedkv.replay.requests import Int64Array

__all__ = ["RunningBatch"]

_REQUEST, _ORDER, _COMPUTED, _KNOWN, _FINAL, _SCHEDULED, _MOVED, _COMMITTED_ROW = range(8)


class RunningBatch:
    """State per running sequence, in batch-order rows that stay dense.

    Parameters
    ----------
    max_num_seqs : int
        Rows.
    num_requests : int
        Requests of the whole trace.
    """

    def __init__(self, max_num_seqs: int, num_requests: int) -> None:
        self.num_reqs = 0
        self.row_of = np.full(num_requests, -1, np.int64)
        self._fields = np.zeros((8, max_num_seqs), np.int64)
        self._num_admitted = 0

    @property
    def request(self) -> Int64Array:
        """Request in each row, int64 [num_reqs]."""
        return self._fields[_REQUEST, : self.num_reqs]

    @property
    def computed(self) -> Int64Array:
        """Tokens whose KV is in the cache, int64 [num_reqs]."""
        return self._fields[_COMPUTED, : self.num_reqs]

    @property
    def known(self) -> Int64Array:
        """Prompt tokens and the outputs sampled so far, int64 [num_reqs]."""
        return self._fields[_KNOWN, : self.num_reqs]

    @property
    def final(self) -> Int64Array:
        """Tokens at which the sequence is complete, int64 [num_reqs]."""
        return self._fields[_FINAL, : self.num_reqs]

    @property
    def scheduled(self) -> Int64Array:
        """Tokens of this step, int64 [num_reqs]."""
        return self._fields[_SCHEDULED, : self.num_reqs]

    @property
    def moved(self) -> Int64Array:
        """1 where the row was moved since the last commit, int64 [num_reqs]."""
        return self._fields[_MOVED, : self.num_reqs]

    @property
    def committed_row(self) -> Int64Array:
        """Row at the last commit, int64 [num_reqs]."""
        return self._fields[_COMMITTED_ROW, : self.num_reqs]

    def newest(self) -> int:
        """Row of the sequence that was admitted last."""
        return int(self._fields[_ORDER, : self.num_reqs].argmax())

    def oldest_first(self) -> Int64Array:
        """Rows in the order of admission, int64 [num_reqs]."""
        rows: Int64Array = self._fields[_ORDER, : self.num_reqs].argsort()
        return rows

    def add(self, request: int, computed: int, known: int, final: int, scheduled: int) -> int:
        """Give a sequence the next row and return it."""
        row, self.num_reqs = self.num_reqs, self.num_reqs + 1
        self._fields[:, row] = (request, self._num_admitted, computed, known, final, scheduled, 0, row)
        self._num_admitted += 1
        self.row_of[request] = row
        return row

    def remove(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Take sequences out and close the holes: the last row moves into the lowest hole, and so on.

        Returns
        -------
        sources, targets : ndarray of int64, shape [num_moves]
            The moves made; no source is a target, and targets are rows that were removed.
        """
        self.row_of[self.request[rows]] = -1
        is_left = np.ones(self.num_reqs, np.bool_)
        is_left[rows] = False
        self.num_reqs -= len(rows)
        targets = np.flatnonzero(~is_left[: self.num_reqs])
        sources = self.num_reqs + np.flatnonzero(is_left[self.num_reqs :])[::-1]
        self._fields[:, targets] = self._fields[:, sources]
        self._fields[_MOVED, targets] = 1
        self.row_of[self.request[targets]] = targets
        return sources, targets

    def mark_committed(self) -> None:
        """Note that the tables were committed with the rows as they are."""
        self.moved[:] = 0
        self.committed_row[:] = np.arange(self.num_reqs)
