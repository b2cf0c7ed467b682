"""The tokens of all sequences, in pages of one hash block; a sequence has an extent of 2**k pages.

A sequence that outgrows its extent moves to one of twice the size. Extents that are given back wait, by
size, for the next that needs one; the store grows by half when nothing fits. Nothing is kept where
prefix caching is off: lengths alone do then.
"""

import numpy as np

from pagedkv.allocation.sequence_state import EXTENT, NUM_PAGES, Keys
from pagedkv.checks import IntArray

__all__ = ["TokenStore"]


class TokenStore:
    """Pages of tokens and their keys.

    Parameters
    ----------
    page_size : int
        Tokens a page: the hash block. 0 where nothing is kept.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        num_pages = 64 if page_size else 0
        self.tokens: IntArray = np.empty(num_pages * page_size, np.int32)
        """Tokens of all pages, one after the other."""
        self.keys: Keys = np.empty((num_pages, 2), np.uint64)
        self._end = 0
        self._waiting: dict[int, list[int]] = {}

    def give(self, line: IntArray, num_tokens: int) -> None:
        """Give a sequence (its line of numbers) an extent for so many tokens, with room to grow.

        It has the power of two of pages above those that hold a token, so up to twice as many and one more.
        """
        num_pages = 1 << (num_tokens // self.page_size + 1).bit_length() if self.page_size else 0
        line[EXTENT], line[NUM_PAGES] = self._take(num_pages), num_pages

    def take_back(self, line: IntArray) -> None:
        """Take a sequence's extent back."""
        if line[NUM_PAGES]:
            self._waiting.setdefault(int(line[NUM_PAGES]), []).append(int(line[EXTENT]))
        line[NUM_PAGES] = 0

    def grow(self, line: IntArray, num_tokens: int) -> None:
        """Move a sequence to an extent that holds `num_tokens`, if its own does not."""
        if num_tokens <= int(line[NUM_PAGES]) * self.page_size:
            return
        old, num_pages = int(line[EXTENT]), int(line[NUM_PAGES])
        old_line = line.copy()
        self.give(line, num_tokens)
        self.copy(old, int(line[EXTENT]), num_pages)
        self.take_back(old_line)

    def copy(self, source: int, target: int, num_pages: int) -> None:
        """Copy pages, tokens and keys."""
        size = self.page_size
        moved = self.tokens[source * size : (source + num_pages) * size]
        self.tokens[target * size : (target + num_pages) * size] = moved
        self.keys[target : target + num_pages] = self.keys[source : source + num_pages]

    def _take(self, num_pages: int) -> int:
        if not num_pages:
            return 0
        waiting = self._waiting.get(num_pages)
        if waiting:
            return waiting.pop()
        start, self._end = self._end, self._end + num_pages
        if self._end > len(self.keys):
            self._resize(max(self._end, len(self.keys) * 3 // 2))
        return start

    def _resize(self, num_pages: int) -> None:
        tokens, keys = np.empty(num_pages * self.page_size, np.int32), np.empty((num_pages, 2), np.uint64)
        tokens[: len(self.tokens)], keys[: len(self.keys)] = self.tokens, self.keys
        self.tokens, self.keys = tokens, keys
