"""The prefix cache of a pool: what is found, what is evicted first, what is told."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import errors
from pagedkv.allocation import BlockPool
from pagedkv.allocation.events import AllBlocksCleared, BlockRemoved, BlockStored
from pagedkv.allocation.hashing import BlockHasher

from .models import snapshot

HASHER = BlockHasher(4)


def keys_of(*tokens):
    """One key per block, of blocks that are full of one token each."""
    return HASHER.hash_blocks(np.repeat(tokens, 4))


def caching_pool(num_blocks=10, **options):
    return BlockPool(num_blocks, enable_prefix_caching=True, **options)


def test_a_published_block_is_found_by_its_key():
    pool = caching_pool()
    keys = keys_of(1, 2, 3)

    pool.publish(pool.allocate(3), keys)

    assert pool.longest_prefix(keys).tolist() == [1, 2, 3]
    assert pool.longest_prefix(keys_of(1, 2, 4)).tolist() == [1, 2]
    assert pool.longest_prefix(keys_of(2, 2, 3)).tolist() == []
    assert pool.longest_prefix([]).tolist() == []


def test_groups_do_not_see_each_others_blocks():
    pool = caching_pool()
    keys = keys_of(1)

    pool.publish(pool.allocate(1), keys, group=0)
    pool.publish(pool.allocate(1), keys, group=255)

    assert pool.longest_prefix(keys, group=0).tolist() == [1]
    assert pool.longest_prefix(keys, group=1).tolist() == []
    assert pool.longest_prefix(keys, group=255).tolist() == [2]


def test_uncached_blocks_lead_the_queue_and_cached_ones_end_it():
    """Ten tokens in blocks of four: the part-filled block is reused first, the chain from its tail."""
    pool = caching_pool()
    blocks = pool.allocate(3)
    pool.publish(blocks[:2], keys_of(1, 2))

    pool.free(blocks[::-1])

    assert pool.free_block_ids().tolist() == [3, 4, 5, 6, 7, 8, 9, 2, 1]


def test_a_chain_is_evicted_from_its_tail():
    """A full pool, one block taken: the chain [1, 2, 3] still hits with two blocks."""
    pool = caching_pool(4)
    keys = keys_of(1, 2, 3)
    blocks = pool.allocate(3)
    pool.publish(blocks, keys)
    pool.free(blocks[::-1])

    pool.allocate(1)

    assert pool.longest_prefix(keys).tolist() == [1, 2]
    assert pool.stats().num_evictions == 1


def test_a_reused_block_is_not_found_by_its_old_key():
    pool = caching_pool(2)
    old, new = keys_of(1), keys_of(2)
    pool.publish(pool.allocate(1), old)
    pool.free([1])

    pool.publish(pool.allocate(1), new)

    assert pool.longest_prefix(old).tolist() == []
    assert pool.longest_prefix(new).tolist() == [1]


def test_a_lookup_does_not_pin_and_a_touch_does():
    pool = caching_pool(4)
    keys = keys_of(1)
    pool.publish(pool.allocate(1), keys)
    pool.free([1])

    pool.longest_prefix(keys)
    assert pool.free_block_ids().tolist() == [2, 3, 1]
    pool.touch([1])

    assert pool.allocate(2).tolist() == [2, 3]
    assert pool.num_free_blocks == 0
    pool.free([1])
    assert pool.free_block_ids().tolist() == [1]


def test_the_oldest_surviving_duplicate_is_found():
    pool = caching_pool(5)
    keys = keys_of(1)
    for block in pool.allocate(4):
        pool.publish([block], keys)

    found = []
    for block in (2, 1, 3, 4):
        found += pool.longest_prefix(keys).tolist()
        pool.evict([block])

    assert found == [1, 1, 3, 4]
    assert pool.longest_prefix(keys).tolist() == []
    assert pool.num_cached_blocks == 0


def test_evict_takes_keys_only():
    pool = caching_pool()
    keys = keys_of(1, 2)
    pool.publish(pool.allocate(2), keys)
    pool.free([2])

    assert pool.evict([2, 1, 1, 5, 0]) == 2

    assert pool.free_block_ids().tolist() == [3, 4, 5, 6, 7, 8, 9, 2]  # where it was
    assert pool.ref_counts[1] == 1
    pool.free([1])
    assert pool.free_block_ids()[0] == 1  # no key any more


def test_reset_wants_every_block_back_and_keeps_the_order():
    pool = caching_pool(6)
    keys = keys_of(1, 2)
    pool.publish(pool.allocate(2), keys)
    pool.free([2])
    before = snapshot(pool)

    assert not pool.reset_prefix_cache()
    assert snapshot(pool) == before
    pool.free([1])
    order = pool.free_block_ids().tolist()
    assert pool.reset_prefix_cache()

    assert pool.longest_prefix(keys).tolist() == []
    assert pool.free_block_ids().tolist() == order == [3, 4, 5, 2, 1]
    assert pool.num_cached_blocks == 0


def test_free_last_spares_blocks_that_someone_still_looks_at():
    pool = caching_pool(5)
    blocks = pool.allocate(2)

    pool.free(blocks, last=True)

    assert pool.free_block_ids().tolist() == [3, 4, 1, 2]


def test_publishing_again_under_the_same_key_changes_nothing():
    pool = caching_pool()
    keys = keys_of(1)
    pool.publish(pool.allocate(1), keys)
    before = snapshot(pool)

    pool.publish([1, 1], np.concatenate([keys, keys]))

    assert snapshot(pool) == before


def test_null_and_masked_blocks_are_not_published():
    pool = caching_pool()
    keys = keys_of(1, 2, 3)

    pool.publish([0, *pool.allocate(2)], keys, mask=[True, False, True])

    assert [pool.longest_prefix(keys[i : i + 1]).tolist() for i in range(3)] == [[], [], [2]]


def test_is_writable_wants_one_holder_and_no_key():
    pool = caching_pool()
    pool.allocate(4)
    pool.touch([2])
    pool.publish([3], keys_of(1))

    assert pool.is_writable([0, 1, 2, 3, 4, 5]).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("block_ids", "keys", "error", "message"),
    [
        ([3, 10], keys_of(1, 2), errors.InvalidBlockError, r"block_ids\[1\] must lie in \[0, 9\], got 10"),
        ([2, -1], keys_of(1, 2), errors.InvalidBlockError, "got -1"),
        ([2, 7], keys_of(1, 2), errors.InvalidBlockError, r"block_ids\[1\] must be held: block 7 is free"),
        ([2, 1], keys_of(1, 8), errors.InvalidBlockError, "block 1 is cached under another"),
        ([2, 2], keys_of(1, 8), errors.InvalidBlockError, "block 2 is cached under another"),
        ([2], keys_of(1, 8), ValueError, "keys must have shape"),
        ([2], [[1]], ValueError, "keys must have shape"),
    ],
)
def test_a_refused_publish_changes_nothing(block_ids, keys, error, message):
    pool = caching_pool()
    pool.publish(pool.allocate(3)[:1], keys_of(9))
    before = snapshot(pool)

    with pytest.raises(error, match=message):
        pool.publish(block_ids, keys)

    state, expected = snapshot(pool), before
    expected[3] = state[3]  # keys of uncached blocks mean nothing
    assert state == expected


@pytest.mark.parametrize("group", [-1, 256, True])
def test_a_group_fits_one_byte(group):
    with pytest.raises((TypeError, ValueError), match="group"):
        caching_pool().longest_prefix(keys_of(1), group=group)


@pytest.mark.parametrize("call", ["evict", "is_writable"])
def test_ids_outside_the_pool_are_refused(call):
    pool = caching_pool()

    with pytest.raises(errors.InvalidBlockError, match=r"block_ids\[1\]"):
        getattr(pool, call)([1, 10])


def test_without_caching_there_is_nothing_to_publish_or_find():
    pool = BlockPool(4)
    pool.allocate(1)

    with pytest.raises(ValueError, match="enable_prefix_caching=True"):
        pool.publish([1], keys_of(1))
    with pytest.raises(ValueError, match="enable_prefix_caching=True"):
        pool.longest_prefix(keys_of(1))
    assert pool.is_writable([1]).tolist() == [True]
    assert pool.evict([1]) == 0
    with pytest.raises(ValueError, match="enable_events"):
        BlockPool(4, enable_events=True)


@pytest.mark.parametrize("num_blocks", [2, 1000, 1025, 10_000])
def test_memory_a_block(num_blocks):
    fixed = BlockPool(1).nbytes

    assert BlockPool(num_blocks).nbytes - fixed <= 16 * num_blocks
    assert caching_pool(num_blocks).nbytes - fixed <= 64 * num_blocks


def test_events_tell_the_first_copy_and_the_last():
    pool = caching_pool(5, enable_events=True)
    keys = keys_of(1, 2)
    first, second = (key.tobytes() for key in keys)

    pool.publish(pool.allocate(2), keys)
    pool.publish(pool.allocate(1), keys[:1])  # a duplicate: no event
    pool.evict([1])  # its key is still served
    pool.free([1, 2, 3])
    pool.allocate(3)  # hands out 1, 4 and 2, which was cached

    assert pool.take_events() == [
        BlockStored((first,), 0),
        BlockStored((second,), 0),
        BlockRemoved(second, 0),
    ]
    assert pool.take_events() == []
    pool.free([1, 2, 4])
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]


def test_without_events_nothing_is_kept():
    pool = caching_pool()
    pool.publish(pool.allocate(1), keys_of(1))

    assert pool.take_events() == []


def test_a_long_log_grows():
    pool = caching_pool(2000, enable_events=True)
    keys = HASHER.hash_blocks(np.arange(4 * 1500))

    pool.publish(pool.allocate(1500), keys)
    pool.free(np.arange(1, 1501))
    pool.allocate(1999)

    kinds = [type(event) for event in pool.take_events()]
    assert kinds == [BlockStored] * 1500 + [BlockRemoved] * 1500


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_blocks=st.integers(2, 40))
def test_keys_that_collide_in_the_index_are_kept_apart(data, num_blocks):
    """Many keys in a small index, some equal in one word, in and out in any order."""
    pool = caching_pool(num_blocks)
    cached = {}
    pool.allocate(num_blocks - 1)
    for _ in range(data.draw(st.integers(1, 60))):
        block = data.draw(st.integers(1, num_blocks - 1))
        if block in cached:
            pool.evict([block])
            del cached[block]
        else:
            key = data.draw(st.integers(0, 3)), 256 * data.draw(st.integers(0, 6))
            pool.publish([block], [key])
            cached[block] = key

        for key in {(a, 256 * b) for a in range(4) for b in range(7)}:
            blocks = [block for block, other in cached.items() if other == key]
            assert pool.longest_prefix([key]).tolist() == blocks[:1]
        assert pool.stats().num_cached_keys == len(set(cached.values()))
