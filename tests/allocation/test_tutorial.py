"""The examples by which block tables are usually taught, one test each."""

import numpy as np
import pytest

from pagedkv.allocation import BlockPool, SequenceBlockTable


def pool_that_hands_out(*block_ids, num_blocks):
    """A pool whose free queue starts with the given blocks."""
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks - 1)
    pool.free(block_ids)
    return pool


def test_32_tokens_take_blocks_5_and_8_and_then_block_2():
    pool = pool_that_hands_out(5, 8, 2, num_blocks=9)
    table = SequenceBlockTable(pool, block_size=16)

    assert table.allocate(2).tolist() == [5, 8]
    assert [table.translate(0), table.translate(1)] == [5, 8]
    assert table.append(32).tolist() == []  # the two blocks hold all of them
    assert table.append(1).tolist() == [2]
    assert table.block_ids.tolist() == [5, 8, 2]
    assert table.translate_batch([0, 1, 2]).tolist() == [5, 8, 2]
    assert table.slots([0, 15, 16, 31, 32]).tolist() == [80, 95, 128, 143, 32]


def figure():
    """Sequences [1, 2, 6], [3, 2] and [5, 6, 8] over blocks 1 to 8; blocks 4 and 7 stay free."""
    pool = pool_that_hands_out(1, 2, 6, 3, 5, 8, 4, 7, num_blocks=9)
    first, second, third = (SequenceBlockTable(pool, block_size=16) for _ in range(3))
    first.append(48)
    second.append(16)
    second.adopt([2], 16)
    third.append(16)
    third.adopt([6], 16)
    third.append(16)
    return pool, first, second, third


def test_three_sequences_that_share_two_blocks():
    pool, first, second, third = figure()

    assert first.block_ids.tolist() == [1, 2, 6]
    assert second.block_ids.tolist() == [3, 2]
    assert third.block_ids.tolist() == [5, 6, 8]
    #                                   0  1  2  3  4  5  6  7  8
    assert pool.ref_counts.tolist() == [0, 1, 2, 1, 0, 1, 2, 0, 1]
    assert pool.free_block_ids().tolist() == [4, 7]


def test_freeing_one_sharer_leaves_the_others_data_alone():
    pool, first, second, third = figure()
    cache = np.full(9 * 16, -1)
    for sequence, table in enumerate((first, second, third)):
        own = np.setdiff1d(table.slots(np.arange(table.num_tokens)), np.flatnonzero(cache >= 0))
        cache[own] = 1000 * sequence + own
    kept = {table: cache[table.slots(np.arange(table.num_tokens))] for table in (second, third)}

    first.free()
    reused = SequenceBlockTable(pool, block_size=16)
    reused.append(16 * pool.num_free_blocks)
    cache[reused.slots(np.arange(reused.num_tokens))] = -2

    assert pool.ref_counts.tolist()[1:9] == [1, 1, 1, 1, 1, 1, 1, 1]
    for table, expected in kept.items():
        np.testing.assert_array_equal(expected, cache[table.slots(np.arange(table.num_tokens))])


def test_a_block_is_free_only_when_its_last_holder_is_gone():
    pool, first, second, third = figure()

    second.free()
    assert pool.ref_counts[2] == 1
    first.free()
    assert pool.ref_counts[2] == 0
    third.free()
    assert pool.num_free_blocks == 8


def test_beam_search_is_fork_reorder_and_drop():
    """Each step, the beams are replaced by forks of the best ones; what a beam wrote stays readable."""
    rng = np.random.default_rng(7)
    pool = BlockPool(num_blocks=64)
    cache = np.full(64 * 4, -1)
    prompt = SequenceBlockTable(pool, block_size=4)
    prompt.append(6)
    cache[prompt.slots(np.arange(6))] = np.arange(6)
    beams = [(prompt, list(range(6)))]
    for step in range(1, 10):
        parents = [beams[i] for i in rng.integers(len(beams), size=3)]
        forked = [(table.fork(), list(tokens)) for table, tokens in parents]
        for table, _ in beams:
            table.free()
        beams = forked
        for table, _ in beams:
            table.append(1)
        sources, targets = rng.permutation(pool.take_copies()).T
        blocks = cache.reshape(64, 4)
        blocks[targets] = blocks[sources]
        for beam, (table, tokens) in enumerate(beams):
            tokens.append(100 * step + beam)
            cache[table.slots([table.num_tokens - 1])] = tokens[-1]

        for table, tokens in beams:
            np.testing.assert_array_equal(tokens, cache[table.slots(np.arange(len(tokens)))])
    for table, _ in beams:
        table.free()
    assert pool.num_free_blocks == 63


@pytest.mark.parametrize("length", [1, 15, 16, 17, 333, 2048])
def test_blocks_follow_the_length_so_almost_nothing_is_wasted(length):
    """Held blocks are ceil(length / block_size) after every token: at most block_size - 1 slots idle."""
    table = SequenceBlockTable(BlockPool(num_blocks=130), block_size=16)

    for tokens in range(1, length + 1):
        table.append(1)
        assert table.num_blocks == -(-tokens // 16)

    assert length / (table.num_blocks * 16) >= length / (length + 15)


def test_batch_translation_equals_one_by_one():
    rng = np.random.default_rng(3)
    pool = BlockPool(num_blocks=300)
    others = [SequenceBlockTable(pool, block_size=16) for _ in range(3)]
    for _ in range(60):  # so that the ids are neither ordered nor adjacent
        others[rng.integers(3)].append(16)
    table = others[0]
    logical = rng.integers(table.num_blocks, size=200)

    expected = [table.translate(int(block)) for block in logical]

    assert table.translate_batch(logical).tolist() == expected
