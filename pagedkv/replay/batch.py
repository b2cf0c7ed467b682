"""RunningBatch: the running sequences as columns of one array, in the order of a step's requests."""

import numpy as np

from pagedkv.replay.requests import Int64Array

__all__ = ["RunningBatch"]

_REQUEST, _ORDER, _COMPUTED, _KNOWN, _FINAL, _SCHEDULED, _ROW, _MOVED, _COMMITTED = range(9)


class RunningBatch:
    """State per running sequence, by its place in the batch; places stay dense, table rows stay as they are.

    Parameters
    ----------
    max_num_seqs : int
        Places.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.num_reqs = 0
        self._fields = np.zeros((9, max_num_seqs), np.int64)
        self._num_admitted = 0

    @property
    def request(self) -> Int64Array:
        """Request in each place, int64 [num_reqs]."""
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
    def row(self) -> Int64Array:
        """Table row of each sequence, -1 before its first allocation, int64 [num_reqs]."""
        return self._fields[_ROW, : self.num_reqs]

    @property
    def moved(self) -> Int64Array:
        """1 where the row was moved since the last commit, int64 [num_reqs]."""
        return self._fields[_MOVED, : self.num_reqs]

    @property
    def committed_place(self) -> Int64Array:
        """Place in the batch that was committed last, int64 [num_reqs]."""
        return self._fields[_COMMITTED, : self.num_reqs]

    def newest(self) -> int:
        """Place of the sequence that was admitted last."""
        return int(self._fields[_ORDER, : self.num_reqs].argmax())

    def oldest_first(self) -> Int64Array:
        """Places in the order of admission, int64 [num_reqs]."""
        places: Int64Array = self._fields[_ORDER, : self.num_reqs].argsort()
        return places

    def add(self, request: int, computed: int, known: int, final: int, scheduled: int) -> int:
        """Give a sequence the next place and return it."""
        place, self.num_reqs = self.num_reqs, self.num_reqs + 1
        order = self._num_admitted
        self._fields[:, place] = (request, order, computed, known, final, scheduled, -1, 0, place)
        self._num_admitted += 1
        return place

    def remove(self, places: Int64Array) -> None:
        """Take sequences out and close the holes: the last place moves into the lowest hole, and so on."""
        is_left = np.ones(self.num_reqs, np.bool_)
        is_left[places] = False
        self.num_reqs -= len(places)
        targets = np.flatnonzero(~is_left[: self.num_reqs])
        sources = self.num_reqs + np.flatnonzero(is_left[self.num_reqs :])[::-1]
        self._fields[:, targets] = self._fields[:, sources]

    def mark_committed(self) -> None:
        """Note that the tables were committed with the batch as it is."""
        self.moved[:] = 0
        self.committed_place[:] = np.arange(self.num_reqs)
