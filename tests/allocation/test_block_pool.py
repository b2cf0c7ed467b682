"""BlockPool: order of reuse, reference counts, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import errors
from pagedkv.allocation import BlockPool

from .models import PoolModel, snapshot


def test_blocks_start_free_in_ascending_order_without_the_null_block():
    pool = BlockPool(6)

    assert pool.free_block_ids().tolist() == [1, 2, 3, 4, 5]
    assert pool.allocate(3).tolist() == [1, 2, 3]
    assert (pool.num_blocks, pool.num_free_blocks) == (6, 2)


def test_allocate_returns_int32_ids_of_the_callers_own():
    pool = BlockPool(6)
    first = pool.allocate(2)

    first[:] = 0  # the caller may write to what it got

    assert first.dtype == np.int32
    assert pool.allocate(0).shape == (0,)
    assert pool.ref_counts.tolist() == [0, 1, 1, 0, 0, 0]


def test_freed_blocks_lead_the_queue_in_the_order_given():
    pool = BlockPool(10)
    pool.allocate(5)

    pool.free([2, 5])
    pool.free([3, 1])

    assert pool.free_block_ids().tolist() == [3, 1, 2, 5, 6, 7, 8, 9]


def test_a_sequence_freed_last_block_first_is_reused_last_block_first():
    pool = BlockPool(10)
    blocks = pool.allocate(3)

    pool.free(blocks[::-1])

    assert pool.free_block_ids().tolist() == [3, 2, 1, 4, 5, 6, 7, 8, 9]
    assert set(pool.allocate(3).tolist()) == {1, 2, 3}  # the same three, not fresh ones


def test_a_repeated_id_counts_each_time_and_enters_the_queue_once():
    """Free list [1, 2, 4, 5] and block 3 held twice: free([3, 3]) leaves five distinct free blocks."""
    pool = BlockPool(6)
    pool.touch([3])
    pool.touch([3])

    pool.free([3, 3])

    assert sorted(pool.free_block_ids().tolist()) == [1, 2, 3, 4, 5]
    assert sorted(pool.allocate(5).tolist()) == [1, 2, 3, 4, 5]


def test_a_repeated_id_leaves_at_its_last_occurrence():
    pool = BlockPool(6)
    pool.touch(pool.allocate(2))

    pool.free([1, 2, 2, 1])

    assert pool.free_block_ids().tolist() == [2, 1, 3, 4, 5]


def test_a_touched_free_block_is_not_handed_out():
    pool = BlockPool(5)

    pool.touch([2])

    assert pool.num_free_blocks == 3
    assert pool.allocate(3).tolist() == [1, 3, 4]
    pool.free([2])
    assert pool.free_block_ids().tolist() == [2]


def test_freeing_one_of_two_holders_frees_nothing():
    pool = BlockPool(5)
    block = pool.allocate(1)
    pool.touch(block)

    pool.free(block)

    assert pool.num_free_blocks == 3
    assert pool.ref_counts[1] == 1


def test_null_ids_are_skipped_so_that_a_table_row_can_be_passed():
    pool = BlockPool(5)
    pool.allocate(2)

    pool.free([0, 2, 0, 1, 0])
    pool.touch([0, 0])

    assert pool.free_block_ids().tolist() == [2, 1, 3, 4]
    assert pool.ref_counts[0] == 0


def test_usage_leaves_the_null_block_out():
    pool = BlockPool(5)

    pool.allocate(2)

    assert pool.usage == 0.5
    assert BlockPool(1).usage == 0.0


def test_a_pool_of_only_the_null_block_hands_out_nothing():
    pool = BlockPool(1)

    with pytest.raises(errors.OutOfBlocksError):
        pool.allocate(1)

    assert pool.free_block_ids().tolist() == []


def test_ref_counts_cannot_be_written_and_follow_the_pool():
    pool = BlockPool(3)
    counts = pool.ref_counts

    pool.allocate(1)

    assert counts.tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="read-only"):
        counts[1] = 0


def test_sixteen_bytes_a_block():
    assert BlockPool(10_001).nbytes - BlockPool(1).nbytes == 16 * 10_000


def test_out_of_blocks_says_how_many_are_missing():
    pool = BlockPool(4)

    with pytest.raises(errors.OutOfBlocksError, match="needed 4, got 3 free") as raised:
        pool.allocate(4)

    assert (raised.value.needed, raised.value.free) == (4, 3)
    assert pool.allocate(3).tolist() == [1, 2, 3]


def test_an_absurd_count_is_refused_before_memory_is_taken():
    with pytest.raises(errors.OutOfBlocksError):
        BlockPool(4).allocate(10**15)


@pytest.mark.parametrize("call", ["free", "touch"])
@pytest.mark.parametrize(
    ("block_ids", "error", "message"),
    [
        ([1, 9], errors.InvalidBlockError, r"block_ids\[1\] must lie in \[0, 5\], got 9"),
        ([1, 6], errors.InvalidBlockError, "got 6"),
        ([2, -1], errors.InvalidBlockError, "got -1"),
        ([1, 2**31], errors.InvalidBlockError, "2147483648"),
        ([1, -(2**40)], errors.InvalidBlockError, "must lie in"),
        ([1.0], TypeError, "must hold integers"),
        ([[1, 2]], ValueError, "one dimension"),
    ],
)
def test_bad_ids_change_nothing(call, block_ids, error, message):
    pool = BlockPool(6)
    pool.allocate(3)
    before = snapshot(pool)

    with pytest.raises(error, match=message):
        getattr(pool, call)(block_ids)

    assert snapshot(pool) == before


@pytest.mark.parametrize("block_ids", [[4], [1, 1], [2, 3, 3, 3], [1, 2, 3, 1]])
def test_a_double_free_changes_nothing(block_ids):
    pool = BlockPool(6)
    pool.allocate(3)
    pool.touch([3])
    before = snapshot(pool)

    with pytest.raises(errors.DoubleFreeError, match=f"block {block_ids[-1]}"):
        pool.free(block_ids)

    assert snapshot(pool) == before


@pytest.mark.parametrize("num_blocks", [-1, True, 1.0, None])
def test_a_count_must_be_a_whole_number_from_0(num_blocks):
    with pytest.raises((TypeError, ValueError), match="num_blocks"):
        BlockPool(6).allocate(num_blocks)


@pytest.mark.parametrize("num_blocks", [0, -3, 2.0, 2**31])
def test_a_pool_has_at_least_the_null_block(num_blocks):
    with pytest.raises((TypeError, ValueError), match="num_blocks"):
        BlockPool(num_blocks)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_blocks=st.integers(1, 24))
def test_allocation_succeeds_exactly_when_enough_are_free(data, num_blocks):
    """No fragmentation: whatever was taken and given back before, any free block serves any request."""
    pool, model, held = BlockPool(num_blocks), PoolModel(num_blocks), []
    for _ in range(data.draw(st.integers(0, 12))):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, num_blocks + 1))
            expected = model.allocate(count)
            if expected is None:
                with pytest.raises(errors.OutOfBlocksError):
                    pool.allocate(count)
            else:
                assert pool.allocate(count).tolist() == expected
                held += expected
        else:
            given_back = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
            held = [block for block in held if block not in given_back]
            model.free(given_back)
            pool.free(given_back)

        assert pool.free_block_ids().tolist() == model.queue
        assert pool.num_free_blocks + np.count_nonzero(pool.ref_counts) == num_blocks - 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pool: pool.unpin([5]), errors.InvalidBlockError, "block 5 is pinned 0 times, got it 1 times"),
        (lambda pool: pool.unpin([10]), errors.InvalidBlockError, r"\[0, 9\], got 10"),
        (lambda pool: pool.unpin([-1]), errors.InvalidBlockError, r"\[0, 9\], got -1"),
        (lambda pool: pool.unpin([0]), errors.InvalidBlockError, "block 0 is pinned 0 times"),
        (lambda pool: pool.unpin([1]), errors.InvalidBlockError, "take_copies unpins it"),
        (lambda pool: pool.unpin([2]), errors.InvalidBlockError, "take_copies unpins it"),
        (lambda pool: pool.copy_on_write(7, 3), errors.InvalidBlockError, "source must be held, got block 7"),
        (lambda pool: pool.copy_on_write(0, 3), errors.InvalidBlockError, "source must be held, got block 0"),
        (lambda pool: pool.copy_on_write(1, 8), errors.InvalidBlockError, "got block 8, held 0 times"),
        (lambda pool: pool.copy_on_write(1, 2), errors.InvalidBlockError, "got block 2, held 2 times"),
        (lambda pool: pool.copy_on_write(3, 3), errors.InvalidBlockError, "target"),
        (lambda pool: pool.copy_on_write(1, 10), ValueError, r"\[1, 9\], got 10"),
        (lambda pool: pool.copy_on_write(-1, 3), ValueError, r"\[0, 9\], got -1"),
        (lambda pool: pool.num_owners(-1), ValueError, r"\[0, 9\], got -1"),
        (lambda pool: pool.num_owners(10), ValueError, r"\[0, 9\], got 10"),
    ],
)
def test_pins_are_checked_before_they_change(call, error, message):
    """Blocks 1 to 3 are held, 1 twice, and 2 is a pending copy of 1."""
    pool = BlockPool(10)
    pool.allocate(3)
    pool.touch([1, 1])
    pool.copy_on_write(1, 2)
    before = snapshot(pool)

    with pytest.raises(error, match=message):
        call(pool)

    assert snapshot(pool) == before
    assert pool.take_copies().tolist() == [[1, 2]]
