"""LivePrefixes: which live sequence already computed the front of a new prompt."""

from collections.abc import Callable, Iterator

import numpy as np

from pagedkv.replay.requests import HASH_BLOCK_SIZE, Int64Array, Requests

__all__ = ["LivePrefixes"]


class LivePrefixes:
    """Holders of each prefix key among the live sequences.

    Only sequences that hold their blocks now are found: what the last holder leaves is gone with it.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._holders: dict[int, dict[int, None]] = {}  # key -> requests, in the order of admission

    def add(self, request: int) -> None:
        """Note that a sequence is live."""
        for key in self._requests.keys_of(request):
            self._holders.setdefault(key, {})[request] = None

    def remove(self, request: int) -> None:
        """Note that a sequence is not live any more."""
        for key in self._requests.keys_of(request):
            holders = self._holders[key]
            del holders[request]
            if not holders:
                del self._holders[key]

    def longest(self, request: int, usable: Callable[[Int64Array, int], Int64Array]) -> tuple[int, int]:
        """Return (tokens, holder) of the longest usable prefix, (0, -1) where there is none.

        Parameters
        ----------
        request : int
        usable : callable
            ``usable(holders, common)``: how many of the `common` leading tokens each of the holders (int64
            [n]) can share, int64 [n].
        """
        best, best_holder = 0, -1
        for common, holders in self._levels(request):
            if common <= best:
                break
            requests = np.fromiter(holders, np.int64, len(holders))
            tokens = usable(requests, common)
            place = int(tokens.argmax())
            if tokens[place] > best:
                best, best_holder = int(tokens[place]), int(requests[place])
        return best, best_holder

    def _levels(self, request: int) -> Iterator[tuple[int, dict[int, None]]]:
        """Yield (tokens in common, holders), the longest first."""
        found = []
        for key in self._requests.keys_of(request):
            holders = self._holders.get(key)
            if holders is None:
                break
            found.append(holders)
        for blocks in range(len(found), 0, -1):
            yield blocks * HASH_BLOCK_SIZE, found[blocks - 1]
