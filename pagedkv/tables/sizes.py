"""Sizes: what a step's graph is captured for, rounded so that few graphs serve all steps."""

from typing import NamedTuple

from pagedkv.compiled import compiled
from pagedkv.kernels._layout import HEADER_WORDS, WRITE_WORDS

__all__ = ["Sizes", "bucket", "decode_words", "token_class"]


@compiled
def bucket(words: int) -> int:
    """Round words up to one of four sizes an octave: few graphs, at most 1.25 times the bytes."""
    size = 256
    while size < words:
        size *= 2
    step = size // 8
    return max(256, (words + step - 1) // step * step)


@compiled
def token_class(num: int) -> int:
    """Place of the smallest of 0, 1024, 8192, 65536, ... that holds `num`: the grids of graphs."""
    place, size = 0, 0
    while size < num:
        size = max(1024, size * 8)
        place += 1
    return place


class Sizes(NamedTuple):
    """What a graph is captured for; its kernels are right for any step within these bounds."""

    words: int  # of the copy, a bucket
    tokens: int  # slots to write, the padding included
    positions: int  # batch positions to gather; 0 = none, and no gather_rows
    writes: bool  # False: nothing changed in the tables, and no apply_writes

    @classmethod
    def of(cls, key: int) -> "Sizes":
        """Read the key that `pack_step` returns."""
        words, tokens, positions = key & 0xFFFFFFFF, key >> 32 & 15, key >> 36 & 15
        return cls(words, _class_size(tokens), _class_size(positions), bool(key >> 40 & 1))

    def key(self, out: int) -> int:
        """Return the key of a step of these sizes into output set `out`."""
        classes = token_class(self.tokens) << 32 | token_class(self.positions) << 36
        return int(bucket(self.words) | classes | self.writes << 40 | out << 41)


def _class_size(place: int) -> int:
    return 1024 * 8 ** (place - 1) if place else 0


def decode_words(num_reqs: int, num_groups: int, new_blocks: int | None = None) -> int:
    """Words of a decode step of `num_reqs` requests in which `new_blocks` blocks are appended.

    One block a request and group where None.
    """
    blocks = num_reqs * num_groups if new_blocks is None else new_blocks
    return HEADER_WORDS + 3 * (num_reqs + 4) + (WRITE_WORDS + 1) * blocks + 16
