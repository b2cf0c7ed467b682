"""Reference counts: compiled take, release, share and pin, each of which validates first.

A function that can fail returns the place in its id array of the first id at fault, or OK. Which
rule that id breaks is told by its value: outside the pool, or not held.
"""

from typing import Final

import numpy as np

from pagedkv.allocation.block_records import NUM_FREE, PINS, REFS, Counters, Keys
from pagedkv.allocation.free_queue import pop_front, push_back, push_front, unlink
from pagedkv.allocation.prefix_index import evict, is_cached
from pagedkv.checks import IntArray
from pagedkv.compiled import compiled

__all__ = ["OK", "pin_copy", "release", "release_into", "share", "take", "unpin"]

OK: Final = -1


@compiled
def take(
    records: IntArray,
    counters: Counters,
    keys: Keys,
    twins: IntArray,
    index: IntArray,
    log: Keys,
    out: IntArray,
) -> bool:
    """Fill `out` with free blocks, each held once; False, and nothing changed, if there are too few.

    Evicting is nothing but this: a cached block that is handed out loses its key.
    """
    if out.size > counters[NUM_FREE]:
        return False
    pop_front(records, counters, out)
    if twins.shape[0] > 0:
        evict(counters, keys, twins, index, log, out)
    for i in range(out.size):
        records[out[i], REFS] = 1
    return True


@compiled
def release_into(
    records: IntArray, counters: Counters, twins: IntArray, blocks: IntArray, last: bool, free: IntArray
) -> int:
    """Drop one reference per id, repeats counted.

    Of the blocks nobody holds any more, uncached ones come before the head as one run and cached ones
    behind the tail as another, both in the given order; with `last` all of them come behind the tail.
    `free` is scratch space for as many ids.
    """
    front, back = 0, blocks.size  # in `free`: uncached ones from the front, cached ones from the back
    for i in range(blocks.size):
        block = blocks[i]
        if block == 0:
            continue
        outside = block < 0 or block >= records.shape[0]
        if outside or records[block, REFS] <= records[block, PINS]:
            for j in range(i):  # give back what the ids before it lost
                if blocks[j] != 0:
                    records[blocks[j], REFS] += 1
            return i
        records[block, REFS] -= 1
        if records[block, REFS] == 0:
            if last or is_cached(twins, block):
                back -= 1
                free[back] = block
            else:
                free[front] = block
                front += 1
    push_front(records, counters, free, front)
    push_back(records, counters, free[: blocks.size], back)
    return OK


@compiled
def release(records: IntArray, counters: Counters, twins: IntArray, blocks: IntArray, last: bool) -> int:
    """Drop references as `release_into`, with scratch space of its own."""
    return release_into(records, counters, twins, blocks, last, np.empty(blocks.size, np.int32))


@compiled
def share(records: IntArray, counters: Counters, blocks: IntArray) -> int:
    """Add one reference per id, repeats counted; a free block leaves the queue, null ids are skipped."""
    for i in range(blocks.size):
        if blocks[i] < 0 or blocks[i] >= records.shape[0]:
            return i
    for i in range(blocks.size):
        block = blocks[i]
        if block == 0:
            continue
        if records[block, REFS] == 0:
            unlink(records, counters, block)
        records[block, REFS] += 1
    return OK


@compiled
def pin_copy(records: IntArray, owned: int, source: int, target: int) -> None:
    """Pin both ends of a copy; the writer's reference to `owned` is gone with it, `target` is its own.

    `source` differs from `owned` where `owned` is itself the target of a pending copy.
    """
    records[owned, REFS] -= 1
    for block in (source, target):
        records[block, REFS] += 1
        records[block, PINS] += 1


@compiled
def unpin(records: IntArray, counters: Counters, twins: IntArray, blocks: IntArray) -> int:
    """Drop one pin per id, repeats counted; blocks that nobody holds any more become free."""
    for i in range(blocks.size):
        block = blocks[i]
        if block < 0 or block >= records.shape[0] or records[block, PINS] == 0:
            for j in range(i):  # give back what the ids before it lost
                records[blocks[j], PINS] += 1
            return i
        records[block, PINS] -= 1
    release(records, counters, twins, blocks, False)
    return OK
