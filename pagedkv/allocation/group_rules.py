"""What each kind of KV-cache group holds and reads, compiled: one row of numbers describes a group.

Three rules are all that the manager asks for:

    num_skipped(n)    leading tokens that nothing reads any more once n tokens are computed
    num_required(n)   logical blocks for n tokens
    a hit of n tokens needs the cached blocks from num_skipped(n) // block_size to n / block_size

The last one is the same for all kinds: full attention skips nothing and needs every block, a window the
blocks that it still sees, a recurrent state the one block that holds the state after n tokens.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.allocation.inlined import inlined

__all__ = [
    "BLOCK_SIZE",
    "CHUNKED",
    "CROSS",
    "ENCODER_ONLY",
    "FULL",
    "HASHES",
    "INTERLEAVE",
    "KIND",
    "NUM_COLUMNS",
    "RANK",
    "SPAN",
    "SPARE",
    "STATE",
    "STATE_ALIGNED",
    "WINDOW",
    "WORLD_SIZE",
    "GroupRows",
    "first_needed_block",
    "num_required",
    "num_skipped",
]

Int = Any  # a number as wide as the compiler makes it
GroupRows = npt.NDArray[np.int64]
"""One row per group, int64 [G, NUM_COLUMNS]."""

KIND: Final = 0
BLOCK_SIZE: Final = 1
"""Tokens a block, over all context-parallel ranks that share it."""
SPAN: Final = 2
"""Tokens before the next one that a window keeps, or tokens in a chunk."""
SPARE: Final = 3
"""Extra state blocks for speculative decoding."""
HASHES: Final = 4
"""Hash blocks in a block."""
WORLD_SIZE: Final = 5
"""Context-parallel ranks that share a block of tokens, 1 where each holds all."""
RANK: Final = 6
INTERLEAVE: Final = 7
NUM_COLUMNS: Final = 8

FULL: Final = 0
WINDOW: Final = 1
CHUNKED: Final = 2
STATE: Final = 3
STATE_ALIGNED: Final = 4
CROSS: Final = 5
ENCODER_ONLY: Final = 6


@inlined
def num_skipped(rows: GroupRows, g: int, num_computed: int) -> Int:
    """Leading tokens of a sequence that group g never reads again."""
    kind = rows[g, KIND]
    if kind == WINDOW:
        return max(0, num_computed - rows[g, SPAN])
    if kind == CHUNKED:
        return num_computed - num_computed % rows[g, SPAN]
    if kind == STATE_ALIGNED:
        return max(0, num_computed - 1)
    return 0


@inlined
def first_needed_block(rows: GroupRows, g: int, num_computed: int) -> Int:
    """First logical block that group g still reads; those before it are NULL."""
    if rows[g, KIND] == FULL:
        return 0
    return num_skipped(rows, g, num_computed) // rows[g, BLOCK_SIZE]


@inlined
def num_required(rows: GroupRows, g: int, num_slots: int, num_tokens: int, num_encoder_tokens: int) -> Int:
    """Logical blocks for `num_slots` tokens, of which the first `num_tokens` are the step's and before.

    A state stands where the step's last token is: slots for later tokens are nothing to it.
    """
    kind, size = rows[g, KIND], rows[g, BLOCK_SIZE]
    if kind == STATE:
        return 1 + rows[g, SPARE]
    if kind == STATE_ALIGNED:
        return (num_tokens + size - 1) // size + rows[g, SPARE]
    if kind == CROSS:
        return (num_encoder_tokens + size - 1) // size
    if kind == ENCODER_ONLY:
        return 0
    return (num_slots + size - 1) // size
