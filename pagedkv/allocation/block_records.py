"""The pool's only per-block state: one int32 record a block, in one array.

    records[b] = (next, previous, reference count, pins)          int32 [num_blocks, 4]

`next` and `previous` link the free blocks into a circular list, in the order in which they will be
handed out. Block 0 is the null block, which is never handed out, so its record is the list's
sentinel: `records[0, NEXT]` is the head and `records[0, PREVIOUS]` the tail. UNLINKED marks a block
in use.

One array instead of four, because a compiled call pays for each array that it is given, and because
the four numbers of a block then share a cache line, which is what counts once the list is shuffled.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "NEXT",
    "NUM_COUNTERS",
    "NUM_FREE",
    "PINS",
    "PREVIOUS",
    "REFS",
    "UNLINKED",
    "Counters",
    "Records",
    "new_counters",
    "new_records",
]

Records = npt.NDArray[np.int32]
Counters = npt.NDArray[np.int64]

NEXT: Final = 0
PREVIOUS: Final = 1
REFS: Final = 2
"""How many table cells hold the block, plus its pins."""
PINS: Final = 3
"""How many pending copies hold the block; a pin keeps a block from being reused but owns nothing."""

UNLINKED: Final = -1

NUM_FREE: Final = 0
"""Index of the free count in the pool's counters."""
NUM_COUNTERS: Final = 1


def new_records(num_blocks: int) -> Records:
    """Return the records of a pool whose blocks 1, 2, ... are free in ascending order."""
    records = np.zeros((num_blocks, 4), np.int32)
    ids = np.arange(num_blocks, dtype=np.int32)
    records[:, NEXT] = ids + 1
    records[:, PREVIOUS] = ids - 1
    records[-1, NEXT] = 0
    records[0, PREVIOUS] = num_blocks - 1
    return records


def new_counters(num_blocks: int) -> Counters:
    """Return the counters of a pool that holds nothing."""
    counters = np.zeros(NUM_COUNTERS, np.int64)
    counters[NUM_FREE] = num_blocks - 1
    return counters
