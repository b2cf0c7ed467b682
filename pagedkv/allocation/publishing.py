"""Compiled calls over many keys or cached blocks: publish, match, evict by id."""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.allocation.block_records import MARKED, REFS, UNCACHED, Counters, Keys
from pagedkv.allocation.prefix_index import drop, find, is_cached, store
from pagedkv.allocation.references import OK
from pagedkv.checks import IntArray
from pagedkv.compiled import compiled

__all__ = ["evict_ids", "longest_prefix", "publish", "with_group"]

_LAST_BYTE: Final = 0xFF


@compiled
def with_group(k1: np.uint64, group: int) -> np.uint64:
    """Return the second word of a key with the group in its last byte."""
    return (k1 & ~np.uint64(_LAST_BYTE)) | np.uint64(group)


@compiled
def longest_prefix(keys: Keys, index: IntArray, wanted: Keys, group: int) -> IntArray:
    """Return the blocks of the leading keys that are all cached."""
    out = np.empty(wanted.shape[0], np.int32)
    for i in range(wanted.shape[0]):
        block = find(keys, index, wanted[i, 0], with_group(wanted[i, 1], group))
        if block == 0:
            return out[:i]
        out[i] = block
    return out


@compiled
def publish(
    records: IntArray,
    counters: Counters,
    keys: Keys,
    twins: IntArray,
    index: IntArray,
    log: Keys,
    blocks: IntArray,
    wanted: Keys,
    group: int,
    mask: npt.NDArray[np.bool_],
) -> int:
    """Make held blocks reachable under their keys; null and unmasked ones are skipped."""
    fault = OK
    for i in range(blocks.size):
        block = blocks[i]
        if block == 0 or not mask[i]:
            continue
        if block < 0 or block >= records.shape[0] or records[block, REFS] == 0:
            fault = i
            break
        k0, k1 = wanted[i, 0], with_group(wanted[i, 1], group)
        if twins[block, 0] == UNCACHED:
            keys[block, 0], keys[block, 1] = k0, k1
            twins[block, 0] = MARKED
        elif keys[block, 0] != k0 or keys[block, 1] != k1:
            fault = i  # a cached block keeps its key
            break
    for i in range(blocks.size if fault == OK else fault):
        block = blocks[i]
        if block != 0 and mask[i] and twins[block, 0] == MARKED:
            twins[block, 0] = UNCACHED
            if fault == OK:
                store(counters, keys, twins, index, log, block, i)
    return fault


@compiled
def evict_ids(
    records: IntArray,
    counters: Counters,
    keys: Keys,
    twins: IntArray,
    index: IntArray,
    log: Keys,
    blocks: IntArray,
) -> tuple[int, int]:
    """Take the keys of blocks and leave counts and queue as they are; (place at fault, how many)."""
    num_evicted = 0
    for i in range(blocks.size):
        if blocks[i] < 0 or blocks[i] >= records.shape[0]:
            return i, 0
    for i in range(blocks.size):
        if is_cached(twins, blocks[i]):
            drop(counters, keys, twins, index, log, blocks[i])
            num_evicted += 1
    return OK, num_evicted
