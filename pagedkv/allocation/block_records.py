"""The pool's state: arrays only, indexed by block id, so that compiled code sees all of it.

    records   int32 [num_blocks, 4]   next and previous free block, reference count, pins
    counters  int64 [6]               what the properties and statistics read in O(1)

and, where prefix caching is on (otherwise they are empty),

    keys      uint64 [num_blocks, 2]  key of each cached block; the last byte is the group
    twins     int32 [num_blocks, 2]   next and previous block with the same key, a ring; UNCACHED = none
    entries   int32 [power of two]    open addressing: block id of the oldest block of a key, 0 = empty
    log       uint64 [capacity, 4]    events that were not fetched yet; no rows = events are off

The free blocks form a circular list in the order in which they will be handed out. Block 0 is the null
block, which is never handed out, so its record is the list's sentinel: `records[0, NEXT]` is the head
and `records[0, PREVIOUS]` the tail. UNLINKED marks a block in use. The four numbers of a record share a
cache line, which is what counts once the list is shuffled.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.checks import IntArray

__all__ = [
    "MARKED",
    "NEXT",
    "NUM_CACHED",
    "NUM_EVICTED",
    "NUM_FREE",
    "NUM_KEYS",
    "NUM_LOGGED",
    "PINS",
    "PREVIOUS",
    "REFS",
    "UNCACHED",
    "UNLINKED",
    "Counters",
    "Keys",
    "PoolArrays",
    "new_arrays",
]

Counters = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

NEXT: Final = 0
PREVIOUS: Final = 1
REFS: Final = 2
"""How many table cells hold the block, plus its pins."""
PINS: Final = 3
"""How many pending copies hold the block; a pin keeps a block from being reused but owns nothing."""

UNLINKED: Final = -1
UNCACHED: Final = -1
MARKED: Final = -2
"""In `twins` while a publish checks its arguments: this call gives the block its key."""

NUM_FREE: Final = 0
NUM_CACHED: Final = 1
"""Blocks that have a key, held or free."""
NUM_KEYS: Final = 2
"""Distinct keys: blocks that have one, less the duplicates."""
NUM_EVICTED: Final = 3
"""Cached blocks that lost their key because they were handed out."""
NUM_LOGGED: Final = 4
_NUM_COUNTERS: Final = 6


class PoolArrays(NamedTuple):
    """The arrays in the order in which every compiled function of the pool takes them."""

    records: IntArray
    counters: Counters
    keys: Keys
    twins: IntArray
    entries: IntArray
    log: Keys


def new_arrays(num_blocks: int, *, prefix_caching: bool, events: bool) -> PoolArrays:
    """Return the state of a pool that holds and caches nothing."""
    cached = num_blocks if prefix_caching else 0
    capacity = 1 << (2 * num_blocks - 1).bit_length() if prefix_caching else 0  # at most half full
    counters = np.zeros(_NUM_COUNTERS, np.int64)
    counters[NUM_FREE] = num_blocks - 1
    return PoolArrays(
        records=_linked(num_blocks),
        counters=counters,
        keys=np.zeros((cached, 2), np.uint64),
        twins=np.full((cached, 2), UNCACHED, np.int32),
        entries=np.zeros(capacity, np.int32),
        log=np.zeros((64 if events else 0, 4), np.uint64),
    )


def _linked(num_blocks: int) -> IntArray:
    """Records whose blocks 1, 2, ... are free in ascending order."""
    records = np.zeros((num_blocks, 4), np.int32)
    ids = np.arange(num_blocks, dtype=np.int32)
    records[:, NEXT] = ids + 1
    records[:, PREVIOUS] = ids - 1
    records[-1, NEXT] = 0
    records[0, PREVIOUS] = num_blocks - 1
    return records
