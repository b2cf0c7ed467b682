"""Arrivals: the simulated clock, and which requests wait."""

from collections import deque

import numpy as np

from pagedkv.replay.requests import Int64Array, Requests

__all__ = ["Arrivals"]


class Arrivals:
    """Requests that wait for admission, in order of arrival; preempted ones come first.

    Parameters
    ----------
    requests : Requests
    accepted : ndarray of int64, shape [n]
        Requests that can run at all, in order.
    immediate : bool
        All wait from the start; otherwise each waits from its own time on.
    """

    def __init__(self, requests: Requests, accepted: Int64Array, *, immediate: bool) -> None:
        self.now = 0.0
        self._accepted = accepted
        self._times = np.zeros(len(accepted)) if immediate else requests.arrivals[accepted]
        self._num_arrived = 0
        self.waiting: deque[int] = deque()

    @property
    def is_exhausted(self) -> bool:
        """Nobody waits and nobody is to come."""
        return not self.waiting and self._num_arrived == len(self._accepted)

    def update(self) -> None:
        """Let the requests whose time has come wait."""
        arrived = int(np.searchsorted(self._times, self.now, side="right"))
        if arrived > self._num_arrived:
            self.waiting.extend(self._accepted[self._num_arrived : arrived].tolist())
            self._num_arrived = arrived

    def advance(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.now += seconds
        self.update()

    def skip_idle(self) -> None:
        """Jump to the next arrival."""
        self.now = max(self.now, float(self._times[self._num_arrived]))
        self.update()
