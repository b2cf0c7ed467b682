"""The prefix index: from a key to the oldest surviving block that has it, compiled.

Open addressing with linear probing over block ids: an entry is an id, and the key that it stands for is
that block's own, so the index takes 4 bytes an entry. Blocks with equal keys form a ring, oldest first;
the index holds the oldest. Deleting moves later entries back, so there are no tombstones to clean up.
"""

import numpy as np

from pagedkv.allocation.block_records import (
    NUM_CACHED,
    NUM_EVICTED,
    NUM_KEYS,
    NUM_LOGGED,
    UNCACHED,
    Counters,
    Keys,
)
from pagedkv.checks import IntArray
from pagedkv.compiled import compiled

__all__ = ["REMOVED", "STORED", "drop", "evict", "find", "is_cached", "store"]

STORED = 1
REMOVED = 2


@compiled
def _home(index: IntArray, k0: np.uint64, k1: np.uint64) -> np.int64:
    mixed = (k0 ^ (k1 * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(index.size - 1))


@compiled
def _place(keys: Keys, index: IntArray, k0: np.uint64, k1: np.uint64) -> np.int64:
    """Where the key is, or the empty place where it would be."""
    at = _home(index, k0, k1)
    while index[at] != 0:
        block = index[at]
        if keys[block, 0] == k0 and keys[block, 1] == k1:
            break
        at = (at + 1) & (index.size - 1)
    return at


@compiled
def find(keys: Keys, index: IntArray, k0: np.uint64, k1: np.uint64) -> np.int32:
    """Return the oldest block that has the key, 0 if none has."""
    block: np.int32 = index[_place(keys, index, k0, k1)]
    return block


@compiled
def is_cached(twins: IntArray, block: int) -> bool:
    """Whether the block has a key; never where caching is off."""
    return twins.shape[0] > 0 and bool(twins[block, 0] >= 0)


@compiled
def store(
    counters: Counters, keys: Keys, twins: IntArray, index: IntArray, log: Keys, block: int, tag: int
) -> None:
    """Make an uncached block reachable under `keys[block]`; only a key's first block is an event."""
    k0, k1 = keys[block, 0], keys[block, 1]
    at = _place(keys, index, k0, k1)
    oldest = index[at]
    counters[NUM_CACHED] += 1
    if oldest == 0:
        index[at] = block
        twins[block, 0] = twins[block, 1] = block
        counters[NUM_KEYS] += 1
        _note(counters, log, STORED, k0, k1, tag)
        return
    newest = twins[oldest, 1]
    twins[newest, 0], twins[block, 1] = block, newest
    twins[block, 0], twins[oldest, 1] = oldest, block


@compiled
def drop(counters: Counters, keys: Keys, twins: IntArray, index: IntArray, log: Keys, block: int) -> None:
    """Take a cached block's key away; only a key's last block is an event."""
    k0, k1 = keys[block, 0], keys[block, 1]
    at = _place(keys, index, k0, k1)
    older, younger = twins[block, 1], twins[block, 0]
    twins[block, 0] = twins[block, 1] = UNCACHED
    counters[NUM_CACHED] -= 1
    if younger == block:
        _close_gap(keys, index, at)
        counters[NUM_KEYS] -= 1
        _note(counters, log, REMOVED, k0, k1, 0)
        return
    twins[older, 0], twins[younger, 1] = younger, older
    if index[at] == block:
        index[at] = younger


@compiled
def evict(
    counters: Counters, keys: Keys, twins: IntArray, index: IntArray, log: Keys, blocks: IntArray
) -> None:
    """Take the keys of those of the blocks that have one, because they are handed out."""
    for i in range(blocks.size):
        if is_cached(twins, blocks[i]):
            drop(counters, keys, twins, index, log, blocks[i])
            counters[NUM_EVICTED] += 1


@compiled
def _close_gap(keys: Keys, index: IntArray, gap: np.int64) -> None:
    """Empty a place; entries behind it that would no longer be found move forward."""
    mask = index.size - 1
    at = gap
    while True:
        at = (at + 1) & mask
        block = index[at]
        if block == 0:
            break
        home = _home(index, keys[block, 0], keys[block, 1])
        if ((at - home) & mask) >= ((at - gap) & mask):
            index[gap] = block
            gap = at
    index[gap] = 0


@compiled
def _note(counters: Counters, log: Keys, kind: int, k0: np.uint64, k1: np.uint64, tag: int) -> None:
    if log.shape[0] == 0:
        return
    at = counters[NUM_LOGGED]
    log[at, 0], log[at, 1], log[at, 2], log[at, 3] = kind, k0, k1, tag
    counters[NUM_LOGGED] += 1
