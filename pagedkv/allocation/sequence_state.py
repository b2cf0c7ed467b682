"""The manager's state as arrays, and how compiled code finds a sequence by its handle.

    sequences  int32 [capacity, 16]       one line of numbers a sequence, 64 bytes
    cursors    int32 [capacity, G, 2]     per group: first live block, published blocks
    tokens     int32 [pages * hash block] tokens, in extents of consecutive pages (see `token_store`)
    keys       uint64 [pages, 2]          key of each page's block
    extras     uint64 [capacity, 4]       extras of the first block not hashed at `add`, and of later ones
    rows       int32 [1 + max_num_rows]   how many table rows are free, then which, the next one last
    copies     int32 [capacity, 2]        copies that were not taken yet: source, target
    limits     int64 [5]                  what was fixed at construction
    recent     int64 [1000, 2]            prompt tokens and hits of the last sequences admitted
    batch_*    [capacity]                 the last batch's handles, int64, and places, int32
    totals     int64 [13]                 counters

A handle is `generation << 32 | place`; freeing a sequence raises the generation of its place.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.allocation.inlined import inlined
from pagedkv.checks import IntArray

Keys = npt.NDArray[np.uint64]
Handles = npt.NDArray[np.int64]
Array = Any  # the compiler sees the arrays' own types
Int = Any  # and makes numbers as wide as they must be

GENERATION: Final = 0
LIVE: Final = 1
ROW: Final = 2
"""Table row, -1 where the sequence has none: not yet allocated, or preempted."""
NUM_TOKENS: Final = 3
NUM_COMPUTED: Final = 4
"""Tokens whose KV is settled in the cache."""
CAPACITY: Final = 5
"""Tokens for which every group has blocks; 0 where the sequence has no row."""
MATCHED: Final = 6
"""Tokens that `match_prefix` found, until the first allocation takes them."""
ALLOCATED: Final = MATCHED
"""The same number from then on: up to which token the sequence was allocated for.

Lookahead included, but where there are `STATES`: these name just the tokens of a step."""
EXTENT: Final = 7
"""First page of the sequence's tokens."""
NUM_PAGES: Final = 8
NUM_HASHED: Final = 9
"""Blocks that have a key."""
HASHED_AT_ADD: Final = 10
SHARES: Final = 11
"""Whether a block that will be written may have other holders or a key: look before writing."""
NUM_PREEMPTIONS: Final = 12
NUM_ENCODER: Final = 13
STAMP: Final = 14
"""Number of the last batch that named the sequence, to find repeats."""
NEXT_EVENT: Final = 15
"""Computed tokens from which on a commit has a block to publish or to free."""
NUM_COLUMNS: Final = 16

FIRST_LIVE: Final = 0
PUBLISHED: Final = 1

MAX_MODEL_LEN: Final = 0
ALIGNMENT: Final = 1
"""Least common multiple of the groups' block sizes; hits are multiples of it."""
PAGE_SIZE: Final = 2
"""Tokens a hash block; 0 where prefix caching is off."""
WATERMARK: Final = 3
"""Blocks that stay free when a sequence is admitted beside others."""
STATES: Final = 4
"""1 where a group of states is among the groups that stand where the step's last token is ("align")."""
NUM_LIMITS: Final = 5

NUM_SEQUENCES: Final = 0
NUM_RUNNING: Final = 1
NUM_COPIES: Final = 2
BATCH: Final = 3
QUERIED: Final = 4
HIT: Final = 5
QUERIED_AGAIN: Final = 6
HIT_AGAIN: Final = 7
ADMITTED: Final = 8
PREEMPTED: Final = 9
NUM_ENDED: Final = 10
BATCH_SIZE: Final = 11
BATCH_ENDED: Final = 12
"""How many sequences had ended when the last batch was looked up."""
NUM_TOTALS: Final = 13

GOOD: Final = 0
BAD_HANDLE: Final = 1
REPEATED: Final = 2
NOT_RUNNING: Final = 3
BAD_COUNT: Final = 4
OUT_OF_BLOCKS: Final = 5
OUT_OF_ROWS: Final = 6
TOO_LONG: Final = 7
NO_WAY_BACK: Final = 8
RUNS: Final = 9


class ManagerArrays(NamedTuple):
    """The arrays in the order in which compiled code unpacks them."""

    groups: Array
    sequences: IntArray
    cursors: IntArray
    tokens: IntArray
    keys: Keys
    extras: Keys
    rows: IntArray
    copies: IntArray
    limits: npt.NDArray[np.int64]
    recent: npt.NDArray[np.int64]
    batch_handles: Handles
    batch_places: IntArray
    totals: npt.NDArray[np.int64]


@inlined
def place_of(sequences: Array, handle: int) -> Int:
    """Return the place of a live handle, -1 for a stale one or none of ours."""
    at = handle & 0xFFFFFFFF
    if handle < 0 or at >= sequences.shape[0]:
        return -1
    if sequences[at, LIVE] == 0 or sequences[at, GENERATION] != handle >> 32:
        return -1
    return at


@inlined
def places_of(m: Array, handles: Array) -> tuple[Int, Int]:
    """Find the places of a batch, in `batch_places`; (fault, index). Each sequence may occur once.

    The calls of a step name the same batch: as long as no sequence ends, its places are still there.
    """
    totals, num = m.totals, handles.size
    if num == totals[BATCH_SIZE] and totals[BATCH_ENDED] == totals[NUM_ENDED]:
        differs = np.int64(0)
        for i in range(num):
            differs |= handles[i] ^ m.batch_handles[i]
        if differs == 0:
            return GOOD, 0
    totals[BATCH_SIZE] = -1
    totals[BATCH] = totals[BATCH] % 0x7FFFFFFF + 1
    for i in range(num):
        at = place_of(m.sequences, handles[i])
        if at < 0:
            return BAD_HANDLE, i
        if m.sequences[at, STAMP] == totals[BATCH]:
            return REPEATED, i
        m.sequences[at, STAMP] = totals[BATCH]
        m.batch_handles[i], m.batch_places[i] = handles[i], at
    totals[BATCH_SIZE], totals[BATCH_ENDED] = num, totals[NUM_ENDED]
    return GOOD, 0
