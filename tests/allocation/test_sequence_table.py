"""SequenceBlockTable: growth, sharing, copy-on-write, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import errors
from pagedkv.allocation import BlockHasher, BlockPool, SequenceBlockTable
from pagedkv.constants import PAD_SLOT_ID

from .models import snapshot


def table_of(num_tokens, block_size=4, num_blocks=10):
    pool = BlockPool(num_blocks)
    table = SequenceBlockTable(pool, block_size)
    table.append(num_tokens)
    return pool, table


def state(pool, table):
    return snapshot(pool), table.block_ids.tolist(), table.num_tokens


@settings(max_examples=50, deadline=None)
@given(
    block_size=st.sampled_from([1, 2, 3, 5, 16]),
    appended=st.lists(st.integers(0, 20), max_size=8),
    reserved=st.integers(0, 5),
)
def test_growth_holds_what_the_tokens_need(block_size, appended, reserved):
    table = SequenceBlockTable(BlockPool(200), block_size)
    table.allocate(reserved)

    for num_tokens in appended:
        table.append(num_tokens)

    total = sum(appended)
    needed = -(-total // block_size)
    assert (table.num_tokens, table.num_blocks) == (total, max(reserved, needed))
    expected = [table.block_ids[p // block_size] * block_size + p % block_size for p in range(total)]
    assert table.slots(np.arange(total)).tolist() == expected


def test_append_returns_only_the_blocks_that_it_added():
    _, table = table_of(3)

    assert table.append(1).tolist() == []
    assert table.append(9).tolist() == [2, 3, 4]
    assert table.append(0).tolist() == []


def test_a_failed_append_changes_nothing():
    pool, table = table_of(12, num_blocks=6)
    before = state(pool, table)

    with pytest.raises(errors.OutOfBlocksError, match="needed 3, got 2 free"):
        table.append(9)

    assert state(pool, table) == before
    assert table.append(8).tolist() == [4, 5]


@pytest.mark.parametrize("logical_block", [-1, 3, 100])
def test_a_logical_block_that_is_not_held_is_an_index_error(logical_block):
    _, table = table_of(12)

    with pytest.raises(IndexError, match=r"logical_block must lie in \[0, 3\)"):
        table.translate(logical_block)
    with pytest.raises(IndexError, match=r"logical_blocks\[1\]"):
        table.translate_batch([0, logical_block])
    with pytest.raises(IndexError, match="logical_block"):
        table.free_logical(logical_block)


@pytest.mark.parametrize("position", [-1, 12, 2**40])
def test_a_position_outside_the_blocks_is_an_index_error(position):
    _, table = table_of(9)

    assert table.slots([11]).tolist() == [15]
    with pytest.raises(IndexError, match=r"positions\[2\] must lie in \[0, 12\)"):
        table.slots([0, 8, position])


def test_slots_past_int32_stay_exact():
    """Block 3 of 2**30 tokens ends at slot 2**32 - 1."""
    _, table = table_of(2**30 * 3, block_size=2**30)

    assert table.slots([2**30 * 3 - 1]).tolist() == [2**32 - 1]


def test_translation_of_nothing_is_empty():
    _, table = table_of(0)

    assert table.slots([]).dtype == np.int64
    assert table.translate_batch([]).dtype == np.int32
    assert table.slots(np.empty(0, np.int32)).size == 0


@pytest.mark.parametrize(("values", "error"), [([0.0], TypeError), ([[0]], ValueError)])
def test_translation_wants_whole_numbers_in_one_dimension(values, error):
    _, table = table_of(4)

    with pytest.raises(error, match="positions"):
        table.slots(values)
    with pytest.raises(error, match="logical_blocks"):
        table.translate_batch(values)


def test_block_ids_cannot_be_written():
    _, table = table_of(4)

    with pytest.raises(ValueError, match="read-only"):
        table.block_ids[0] = 7


def test_a_freed_logical_block_keeps_its_place_as_null():
    pool, table = table_of(12)

    table.free_logical(1)

    assert table.block_ids.tolist() == [1, 0, 3]
    assert table.translate(1) == 0
    assert table.slots([3, 4, 7, 8]).tolist() == [7, PAD_SLOT_ID, PAD_SLOT_ID, 12]
    assert pool.free_block_ids()[0] == 2


def test_a_logical_block_is_freed_once():
    pool, table = table_of(12)
    table.free_logical(1)
    before = state(pool, table)

    with pytest.raises(errors.DoubleFreeError, match="logical_block 1"):
        table.free_logical(1)

    assert state(pool, table) == before


def test_tokens_cannot_be_appended_into_a_freed_block():
    pool, table = table_of(10)
    table.free_logical(2)
    before = state(pool, table)

    with pytest.raises(errors.InvalidBlockError, match="logical_block 2"):
        table.append(1)

    assert state(pool, table) == before


def test_free_gives_back_every_block_and_ends_the_table():
    pool, table = table_of(12)
    table.free_logical(0)

    table.free()

    assert pool.free_block_ids()[:3].tolist() == [3, 2, 1]
    for call in (table.free, table.fork, lambda: table.append(1), lambda: table.append(0)):
        with pytest.raises(errors.StaleSequenceError, match="freed"):
            call()
    for call in (lambda: table.allocate(1), lambda: table.adopt([4], 4), lambda: table.free_logical(0)):
        with pytest.raises(errors.StaleSequenceError, match="freed"):
            call()
    assert pool.num_free_blocks == 9


def test_a_fork_shares_the_blocks_with_tokens_only():
    pool, table = table_of(6)
    table.allocate(2)

    child = table.fork()

    assert child.block_ids.tolist() == [1, 2]
    assert child.num_tokens == 6
    assert pool.ref_counts.tolist()[:6] == [0, 2, 2, 1, 1, 0]


@pytest.mark.parametrize("num_sharers", [2, 3, 5])
def test_sharers_of_a_part_filled_block_make_one_copy_fewer_than_there_are(num_sharers):
    """The last one to append writes in place, in one step or in several."""
    for together in (True, False):
        pool, table = table_of(6, num_blocks=40)
        sharers = [table, *(table.fork() for _ in range(num_sharers - 1))]
        copies = []
        for sharer in sharers:
            sharer.append(1)
            if not together:
                copies += pool.take_copies().tolist()
        copies += pool.take_copies().tolist()

        assert len(copies) == num_sharers - 1
        assert {source for source, _ in copies} == {2}
        assert len({sharer.translate(1) for sharer in sharers}) == num_sharers
        assert pool.take_copies().shape == (0, 2)


def test_a_full_last_block_is_shared_without_a_copy():
    pool, table = table_of(8)
    child = table.fork()

    assert child.append(1).tolist() == [3]
    assert pool.take_copies().size == 0


def test_the_copy_counts_towards_what_is_needed():
    pool, table = table_of(6, num_blocks=3)
    child = table.fork()
    before = state(pool, child)

    with pytest.raises(errors.OutOfBlocksError, match="needed 1, got 0 free"):
        child.append(1)

    assert state(pool, child) == before


def test_both_ends_of_a_copy_stay_until_it_is_taken():
    pool, table = table_of(2, num_blocks=5)
    child = table.fork()
    child.append(1)

    table.free()
    child.free()
    assert pool.num_free_blocks == 2
    assert pool.pin_counts.tolist() == [0, 1, 1, 0, 0]
    assert pool.ref_counts.tolist() == [0, 1, 1, 0, 0]
    with pytest.raises(errors.DoubleFreeError):
        pool.free([1])  # a pin is nobody's to give back

    assert pool.take_copies().tolist() == [[1, 2]]
    assert pool.num_free_blocks == 4


def test_a_copy_of_a_copy_comes_from_the_first_source():
    pool, table = table_of(2)
    child = table.fork()
    child.append(1)
    grandchild = child.fork()

    grandchild.append(1)

    assert pool.take_copies().tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_forks_may_be_freed_in_any_order(order):
    pool, parent = table_of(8)
    child = parent.fork()
    family = [parent, child, child.fork()]

    for rank, member in enumerate(order):
        assert pool.ref_counts.tolist()[1:3] == [3 - rank, 3 - rank]
        family[member].free()

    assert pool.num_free_blocks == 9


def test_adopt_shares_full_blocks_as_a_prefix():
    pool, table = table_of(8)
    other = SequenceBlockTable(pool, 4)

    other.adopt(table.block_ids, 8)
    other.append(1)

    assert other.block_ids.tolist() == [1, 2, 3]
    assert pool.ref_counts.tolist()[:4] == [0, 2, 2, 1]
    assert pool.take_copies().size == 0


def test_an_adopted_part_filled_block_is_copied_before_a_write():
    pool, _ = table_of(6)
    other = SequenceBlockTable(pool, 4)

    other.adopt([1, 2], 6)
    other.append(1)

    assert pool.take_copies().tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("block_ids", "num_tokens", "error", "message"),
    [
        ([1, 2], 4, ValueError, r"num_tokens must lie in \[5, 8\]"),
        ([1, 2], 9, ValueError, r"num_tokens must lie in \[5, 8\]"),
        ([], 1, ValueError, r"num_tokens must lie in \[0, 0\]"),
        ([1, 0], 8, errors.InvalidBlockError, r"block_ids\[1\] must not be NULL"),
        ([1, 10], 8, errors.InvalidBlockError, r"block_ids\[1\] must lie in \[0, 9\]"),
    ],
)
def test_a_refused_adoption_changes_nothing(block_ids, num_tokens, error, message):
    pool, table = table_of(4)
    before = state(pool, table)

    with pytest.raises(error, match=message):
        table.adopt(block_ids, num_tokens)

    assert state(pool, table) == before


def test_adoption_follows_full_blocks():
    pool, table = table_of(6)
    before = state(pool, table)

    with pytest.raises(ValueError, match="must follow full blocks"):
        table.adopt([5], 4)

    assert state(pool, table) == before


@pytest.mark.parametrize("num_tokens", [-1, True, 1.0, None])
def test_append_wants_a_whole_number_from_0(num_tokens):
    _, table = table_of(4)

    with pytest.raises((TypeError, ValueError), match="num_tokens"):
        table.append(num_tokens)


@pytest.mark.parametrize("block_size", [0, -1, 1.0])
def test_a_block_holds_at_least_one_token(block_size):
    with pytest.raises((TypeError, ValueError), match="block_size"):
        SequenceBlockTable(BlockPool(3), block_size)


def test_a_cached_block_is_copied_before_it_is_written():
    """Adopted for seven of its eight tokens, held by nobody else: its key must stay true."""
    pool, hasher = BlockPool(10, enable_prefix_caching=True), BlockHasher(4)
    keys, block_ids = hasher.hash_blocks(range(8)), pool.allocate(2)
    pool.publish(block_ids, keys)
    pool.free(block_ids[::-1])
    table = SequenceBlockTable(pool, 4)
    table.adopt(pool.longest_prefix(keys), 7)

    table.append(1)

    assert table.block_ids.tolist() == [1, 3]
    assert pool.take_copies().tolist() == [[2, 3]]
    assert pool.longest_prefix(keys).tolist() == [1, 2]
    assert pool.is_writable(table.block_ids).tolist() == [False, True]
