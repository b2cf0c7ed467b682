"""Arrays of any kind are made ready before compiled code sees them: none makes it compile again."""

import importlib
import pkgutil

import numpy as np

import pagedkv.allocation
from pagedkv.allocation import (
    BlockHasher,
    BlockPool,
    FullAttentionSpec,
    KVCacheManager,
    SequenceBlockTable,
    alloc_decode,
)


def versions():
    """How many versions of each compiled function there are."""
    found = {}
    for module in pkgutil.iter_modules(pagedkv.allocation.__path__, "pagedkv.allocation."):
        for name, item in vars(importlib.import_module(module.name)).items():
            if hasattr(item, "nopython_signatures"):
                found[module.name, name] = len(item.nopython_signatures)
    return found


def live(kind):
    """Every call that takes an array, with arrays of one kind."""
    manager = KVCacheManager([FullAttentionSpec(2)], 40, max_num_seqs=4, max_model_len=32)
    seqs = kind(np.array([manager.add(kind(np.arange(4, dtype=np.int32)))]))
    manager.allocate_slots(seqs, kind(np.array([4], np.int32)))
    manager.append(seqs, kind(np.array([4], np.int32)))
    manager.append(seqs, kind(np.array([5, 6], np.int32)), kind(np.array([2], np.int32)))
    manager.num_blocks_needed(seqs, kind(np.array([4], np.int32)))
    manager.commit(seqs, kind(np.array([4], np.int32)))
    manager.allocate_slots(seqs, kind(np.array([1])))
    manager.translate(seqs, kind(np.array([3])))
    manager.num_common_prefix_blocks(seqs)
    manager.copies_done(kind(np.empty((0, 2), np.int32)))
    manager.preempt(seqs)
    manager.free(seqs)

    pool, hasher = BlockPool(10, enable_prefix_caching=True), BlockHasher(2)
    keys = kind(hasher.hash_blocks(kind(np.arange(4, dtype=np.int32))))
    hasher.hash_blocks(kind(np.arange(4, dtype=np.int32)), parent=kind(keys[0].copy()))
    ids = kind(pool.allocate(2))
    pool.publish(ids, keys, mask=kind(np.ones(2, np.bool_)))
    pool.longest_prefix(keys)
    pool.is_writable(ids)
    pool.touch(ids)
    pool.evict(ids)
    pool.free(ids)
    table = SequenceBlockTable(pool, 2)
    table.append(4)
    table.slots(kind(np.arange(4)))
    table.translate_batch(kind(np.arange(2)))
    alloc_decode(kind(np.array([5])), kind(np.array([15])), kind(np.array([3])), 4)


def read_only(array):
    array.flags.writeable = False
    return array


def strided(array):
    return np.repeat(array, 2, axis=0)[::2]


def test_no_kind_of_array_compiles_again():
    live(lambda array: array)
    before = versions()

    live(read_only)
    live(strided)

    assert len(before) > 30
    assert versions() == before
