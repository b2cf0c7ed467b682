"""The free queue: compiled operations on the list that runs through the block records.

The head is handed out first. No operation here checks its arguments: the pool validates before it
changes anything.
"""

import numpy as np

from pagedkv.allocation.block_records import NEXT, NUM_FREE, PREVIOUS, UNLINKED, Counters
from pagedkv.checks import IntArray
from pagedkv.compiled import compiled

__all__ = ["list_free", "pop_front", "push_back", "push_front", "unlink"]


@compiled
def pop_front(records: IntArray, counters: Counters, out: IntArray) -> None:
    """Take `len(out)` blocks from the head, in order; the caller knows that there are that many."""
    block = records[0, NEXT]
    for i in range(out.size):
        out[i] = block
        following = records[block, NEXT]
        records[block, NEXT] = UNLINKED
        records[block, PREVIOUS] = UNLINKED
        block = following
    records[0, NEXT] = block
    records[block, PREVIOUS] = 0
    counters[NUM_FREE] -= out.size


@compiled
def push_front(records: IntArray, counters: Counters, blocks: IntArray, count: int) -> None:
    """Put `blocks[:count]` before the head as one run: `blocks[0]` becomes the head."""
    following = records[0, NEXT]
    for i in range(count - 1, -1, -1):
        block = blocks[i]
        records[block, NEXT] = following
        records[following, PREVIOUS] = block
        following = block
    records[0, NEXT] = following
    records[following, PREVIOUS] = 0
    counters[NUM_FREE] += count


@compiled
def push_back(records: IntArray, counters: Counters, blocks: IntArray, first: int) -> None:
    """Put `blocks[first:]` behind the tail, backwards: `blocks[first]` becomes the tail."""
    before = records[0, PREVIOUS]
    for i in range(blocks.size - 1, first - 1, -1):
        block = blocks[i]
        records[block, PREVIOUS] = before
        records[before, NEXT] = block
        before = block
    records[0, PREVIOUS] = before
    records[before, NEXT] = 0
    counters[NUM_FREE] += blocks.size - first


@compiled
def unlink(records: IntArray, counters: Counters, block: int) -> None:
    """Take one block out of the middle of the list."""
    before, following = records[block, PREVIOUS], records[block, NEXT]
    records[before, NEXT] = following
    records[following, PREVIOUS] = before
    records[block, NEXT] = UNLINKED
    records[block, PREVIOUS] = UNLINKED
    counters[NUM_FREE] -= 1


@compiled
def list_free(records: IntArray, counters: Counters) -> IntArray:
    """Return the free blocks from head to tail, int32 [num_free]."""
    out = np.empty(counters[NUM_FREE], np.int32)
    block = records[0, NEXT]
    for i in range(out.size):
        out[i] = block
        block = records[block, NEXT]
    return out
