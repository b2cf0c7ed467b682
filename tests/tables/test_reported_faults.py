"""Faults that users of paged KV caches have reported, as small inputs with the right values."""

import numpy as np
import pytest

from pagedkv import BlockTable, ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.specs import cdiv

from .models import to_numpy
from .test_slot_mapping import committed, map_slots


def device(table, num_rows):
    table.commit_block_table()
    return to_numpy(table.get_device_tensor(num_rows)).tolist()


# --- positions past the row -------------------------------------------------------------------------


def test_a_column_past_the_row_reads_no_neighbour(backend):
    table = committed(BlockTable(4, 2, 3, 16, max_model_len=2**31 - 1, backend=backend), [7, 2, 9], [5, 1, 4])
    slots = map_slots(table, [[0, 3, 11, 12, 15, 4_000_000], [0, 12]])
    assert slots == [28, 31, 39, -1, -1, -1, 20, -1]


def test_draft_tokens_past_the_model_length(backend):
    table = committed(BlockTable(16, 1, 3, 8, max_model_len=40, backend=backend), [3, 8, 5])
    assert map_slots(table, [range(38, 43)]) == [86, 87, -1, -1, -1]


def test_draft_tokens_past_the_reserved_blocks(backend):
    table = committed(BlockTable(16, 1, 4, 8, backend=backend), [4, 9])
    assert map_slots(table, [[31, 32, 33]]) == [159, -1, -1], "no lookahead block: PAD, not the null block"
    assert (cdiv(30 + 1 + 3, 16), cdiv(min(34, 32), 16)) == (3, 2)
    table.append_row([6], 0)
    table.commit_block_table()
    assert map_slots(table, [[31, 32, 33]]) == [159, 96, 97]


# --- padding ----------------------------------------------------------------------------------------


def test_the_tail_keeps_no_slot_of_a_longer_step(backend):
    table = MultiGroupBlockTable([4], 2, 12, 12, backend=backend)
    table.add_row(([2, 3, 5],), 0)
    first = table.commit(1, [0, 10], [0])
    assert to_numpy(first.slot_mapping(0)).tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 20, 21]
    assert to_numpy(table[0].slot_mapping)[10:].tolist() == [-1, -1]
    second = table.commit(1, [0, 2], [10], num_tokens_padded=8)
    assert to_numpy(second.slot_mapping(0)).tolist() == [22, 23, -1, -1, -1, -1, -1, -1]
    assert to_numpy(table[0].slot_mapping)[2:].tolist() == [-1] * 10


@pytest.mark.parametrize("stable_rows", [False, True])
def test_padded_rows_are_null_in_all_columns(backend, stable_rows):
    table = MultiGroupBlockTable(
        [4], 8, 16, 16, token_alignment=None, stable_rows=stable_rows, backend=backend
    )
    for row in range(6):
        table.add_row(([row + 1, 10 + row, 20 + row, 30 + row],), row)
    rows = {"rows": [5, 4, 3, 2, 1, 0]} if stable_rows else {}
    table.commit(6, range(7), [0] * 6, **rows)
    if not stable_rows:
        table.clear_rows([3, 4, 5])
    rows = {"rows": [0, 1, 2]} if stable_rows else {}
    step = table.commit(3, range(4), [0] * 3, num_reqs_padded=8, num_tokens_padded=8, **rows)
    shown = to_numpy(step.block_table(0))
    np.testing.assert_array_equal(np.zeros((5, 4)), shown[3:])
    np.testing.assert_array_equal([1, 2, 3, 0, 0, 0, 0, 0], shown[:, 0])
    np.testing.assert_array_equal([4, 8, 12, -1, -1, -1, -1, -1], to_numpy(step.slot_mapping(0)))


# --- rows of the batch ------------------------------------------------------------------------------


def test_a_vacated_row_keeps_no_ids(backend):
    table = MultiGroupBlockTable([4], 4, 16, 16, token_alignment=None, backend=backend)
    for row, ids in enumerate([[10, 11], [20], [30, 31, 32], [40, 41]]):
        table.add_row((ids,), row)
    table.commit(4, range(5), [0] * 4)
    table.clear_row(1)
    table.move_row(3, 1)
    step = table.commit(3, range(4), [0] * 3, num_reqs_padded=4)
    shown = to_numpy(step.block_table(0))
    assert shown.tolist() == [[10, 11, 0, 0], [40, 41, 0, 0], [30, 31, 32, 0], [0, 0, 0, 0]]
    assert table[0].num_blocks_per_row.tolist() == [2, 2, 3, 0]
    live = shown[shown > 0]
    assert len(live) == len(set(live.tolist())), "no id stands in two rows"


def test_a_dummy_row_reads_no_table(backend):
    table = MultiGroupBlockTable([4], 4, 16, 16, stable_rows=True, backend=backend)
    table.add_row(([6, 9],), 2)
    table.add_row(([50, 51],), 3)  # row -1 read as the last row would show these
    step = table.commit(2, [0, 1, 3], [5, 0], rows=[2, -1])
    assert to_numpy(step.slot_mapping(0)).tolist() == [37, -1, -1]
    assert not to_numpy(step.block_table(0))[1].any()


def test_a_shorter_row_moved_onto_a_longer_one_leaves_no_tail(backend):
    table = committed(BlockTable(4, 2, 4, 16, backend=backend), [11, 12, 13, 14], [21, 22])
    table.move_row(1, 0)
    assert device(table, 2) == [[21, 22, 0, 0], [0, 0, 0, 0]]
    assert table.num_blocks_per_row.tolist() == [2, 0]


def test_swaps_exchange_rows_exactly(backend):
    table = committed(BlockTable(4, 3, 3, 16, backend=backend), [3, 4, 5], [7], [8, 9])
    table.swap_row(0, 1)
    assert device(table, 3) == [[7, 0, 0], [3, 4, 5], [8, 9, 0]]
    assert table.num_blocks_per_row.tolist() == [1, 3, 2]
    table.swap_row(0, 2)  # with the first swap: the cycle 0 -> 1 -> 2 -> 0
    assert device(table, 3) == [[8, 9, 0], [3, 4, 5], [7, 0, 0]]


def test_a_resumed_request_replaces_its_row_and_a_running_one_appends(backend):
    table = committed(BlockTable(16, 1, 5, 8, backend=backend), [5, 6, 7, 8])
    table.clear_row(0)
    table.add_row([12, 13], 0)
    assert device(table, 1) == [[12, 13, 0, 0, 0]]
    table.append_row([14], 0)
    assert device(table, 1) == [[12, 13, 14, 0, 0]]
    assert map_slots(table, [[0, 31]]) == [192, 223]


# --- kernel blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "owned"), [(0, [*range(8), *range(16, 24)]), (1, [*range(8, 16), *range(24, 32)])]
)
def test_ownership_is_worked_out_in_manager_blocks(backend, rank, owned):
    world = ContextParallel(2, rank, 8)
    table = BlockTable(8, 1, 2, 32, kernel_views=(4,), context_parallel=world, backend=backend)
    committed(table, [3, 5])
    expected = np.full(32, -1)
    expected[owned] = [*range(24, 32), *range(40, 48)]
    assert map_slots(table, [range(32)]) == expected.tolist()
    assert to_numpy(table.get_kernel_tensor(1)).tolist() == [[6, 7, 10, 11]]


def test_slots_are_in_manager_blocks_and_rows_of_kernels_in_kernel_blocks(backend):
    table = committed(BlockTable(32, 1, 2, 64, kernel_views=(16,), backend=backend), [1, 4])
    assert to_numpy(table.get_kernel_tensor(1)).tolist() == [[2, 3, 8, 9]]
    assert map_slots(table, [[40]]) == [136]
    assert to_numpy(table.get_kernel_tensor(1))[0, 40 // 16] * 16 + 40 % 16 == 136
    table = BlockTable(128, 1, 2, 64, kernel_views=(64,), backend=backend)
    assert table.map_to_kernel_blocks([2, 5]).tolist() == [4, 5, 10, 11]


# --- context parallel -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "local"), [(0, [0, 0]), (8, [4, 4]), (9, [5, 4])], ids=["none", "even", "odd"]
)
def test_tokens_of_a_rank_where_the_length_divides(backend, length, local):
    for rank in (0, 1):
        table = BlockTable(16, 1, 2, 16, context_parallel=ContextParallel(2, rank), backend=backend)
        committed(table, [3, 4])
        assert sum(slot >= 0 for slot in map_slots(table, [range(length)])) == local[rank]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [20, 21, -1, -1, 22, 23, -1, -1]), (1, [-1, -1, 20, 21, -1, -1, 22, 23])],
)
def test_interleaved_chunks_go_round_the_ranks(backend, rank, expected):
    table = BlockTable(4, 1, 2, 16, context_parallel=ContextParallel(2, rank, 2), backend=backend)
    assert map_slots(committed(table, [5]), [range(8)]) == expected


@pytest.mark.parametrize(
    ("rank", "owned", "slots"),
    [
        (0, [0, 1, 6, 7, 12, 13, 18, 19], [30, 31, 32, 33, 34, 35, 12, 13]),
        (1, [2, 3, 8, 9, 14, 15], [30, 31, 32, 33, 34, 35]),
        (2, [4, 5, 10, 11, 16, 17], [30, 31, 32, 33, 34, 35]),
    ],
)
def test_interleaved_chunks_of_a_block_size_that_is_no_power_of_two(backend, rank, owned, slots):
    table = BlockTable(6, 1, 2, 32, context_parallel=ContextParallel(3, rank, 2), backend=backend)
    expected = np.full(20, -1)
    expected[owned] = slots
    assert map_slots(committed(table, [5, 2]), [range(20)]) == expected.tolist()


def test_an_interleave_that_does_not_divide_the_block_size(backend):
    with pytest.raises(ValueError, match="interleave must divide block_size 6, got 4"):
        BlockTable(6, 1, 2, 32, context_parallel=ContextParallel(3, 0, 4), backend=backend)


@pytest.mark.parametrize("rank", [0, 1])
def test_replicated_groups_keep_all_tokens(backend, rank):
    groups = [KVCacheGroupSpec(4, cp_sharded=False), KVCacheGroupSpec(4)]
    world = ContextParallel(2, rank)
    table = MultiGroupBlockTable(
        groups, 1, 8, 16, context_parallel=world, token_alignment=None, backend=backend
    )
    assert table.mirror.widths == (2, 1)
    table.add_row(([6, 9], [6]), 0)
    step = table.commit(1, [0, 8], [0])
    assert to_numpy(step.slot_mapping(0)).tolist() == [24, 25, 26, 27, 36, 37, 38, 39]
    mine = [[24, -1, 25, -1, 26, -1, 27, -1], [-1, 24, -1, 25, -1, 26, -1, 27]]
    assert to_numpy(step.slot_mapping(1)).tolist() == mine[rank]


# --- no KV cache ------------------------------------------------------------------------------------


def test_a_model_without_a_cache(backend):
    table = MultiGroupBlockTable([], 4, 64, 32, backend=backend)
    assert (table.num_groups, len(table), list(table)) == (0, 0, [])
    table.add_row((), 0)
    table.append_rows([0, 1], np.empty((0, 2), np.int32), [])
    table.clear_row(0)
    table.move_row(0, 1)
    table.clear()
    step = table.commit(3, [0, 4, 7, 10], [0, 5, 0], num_reqs_padded=4, num_tokens_padded=16)
    assert {-1} == set(to_numpy(table._committer.outputs[0].slots).ravel().tolist())
    assert to_numpy(step.positions).tolist() == [0, 1, 2, 3, 5, 6, 7, 0, 1, 2, *[0] * 6]
    assert to_numpy(step.seq_lens).tolist() == [4, 8, 3, 0]
    table.commit_block_table()
    table.compute_slot_mapping(1, [0, 2], np.arange(2))
