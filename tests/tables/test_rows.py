"""What each row operation does, on the mirror and, after a commit, in the committed table."""

import numpy as np
import pytest

from pagedkv import BlockTable, KVCacheGroupSpec, MultiGroupBlockTable

from .models import assert_unchanged, everything, table_of, to_numpy

WIDTH = 6
FULL = [11, 12, 13, 14, 15, 16]


def single(backend, *rows):
    table = BlockTable(4, 4, WIDTH, 32, backend=backend)
    for row, ids in enumerate(rows):
        table.add_row(ids, row)
    table.commit_block_table()
    return table


def several(backend):
    groups = [KVCacheGroupSpec(4, (2,)), KVCacheGroupSpec(8, ((2, 5),)), KVCacheGroupSpec(3)]
    return MultiGroupBlockTable(groups, 4, 48, 32, token_alignment=None, backend=backend)


def assert_holds(table, *rows):
    """Mirror, counts and, after a commit, the device hold exactly these rows, NULL past each count."""
    expected = table_of(rows, table.get_numpy_array().shape[1])
    np.testing.assert_array_equal(expected, table.get_numpy_array())
    np.testing.assert_array_equal([len(ids) for ids in rows], table.num_blocks_per_row)
    table.commit_block_table(len(rows))
    np.testing.assert_array_equal(expected, to_numpy(table.get_device_tensor(len(rows))))


# --- one row ----------------------------------------------------------------------------------------


def test_append_adds_after_the_last_block(backend):
    table = single(backend, [5, 8])
    table.append_row([2], 0)
    table.append_row(np.array([7, 3], np.int64), 0)
    assert_holds(table, [5, 8, 2, 7, 3], [], [], [])


def test_append_of_nothing_changes_nothing(backend):
    table = single(backend, [5, 8])
    before = everything(table._owner)
    table.append_row([], 0)
    table.append_row(np.empty(0, np.int32), 1)
    table.append_rows([0, 1], [0, 0], [])
    table.append_rows([], [], [])
    assert_unchanged(before, table._owner)


@pytest.mark.parametrize("new", [[], [9], [1, 2, 3, 4, 5, 6]], ids=["none", "one", "full"])
def test_add_replaces_the_row(backend, new):
    table = single(backend, [21, 22, 23])
    table.add_row(new, 0)
    assert_holds(table, new, [], [], [])


def test_a_row_takes_exactly_its_width(backend):
    table = single(backend, FULL)
    assert_holds(table, FULL, [], [], [])


def test_clear_row_empties_one_row(backend):
    table = single(backend, FULL, [1])
    table.clear_row(0)
    table.clear_row(3)
    assert_holds(table, [], [1], [], [])


def test_a_cleared_row_fills_from_the_start(backend):
    table = single(backend, FULL)
    table.clear_row(0)
    table.append_row([3], 0)
    assert_holds(table, [3], [], [], [])


@pytest.mark.parametrize("source", [[], [21, 22], FULL], ids=["empty", "shorter", "full"])
@pytest.mark.parametrize("target", [[], [31, 32, 33]], ids=["onto empty", "onto live"])
def test_move_row_replaces_the_target_and_empties_its_source(backend, source, target):
    table = single(backend, target, source)
    table.move_row(1, 0)
    assert_holds(table, source, [], [], [])


def test_swap_row_exchanges_rows_and_counts(backend):
    table = single(backend, [3, 4, 5], [7], [])
    table.swap_row(0, 1)
    assert_holds(table, [7], [3, 4, 5], [], [])
    table.swap_row(0, 2)
    assert_holds(table, [], [3, 4, 5], [7], [])


def test_a_row_onto_itself_changes_nothing(backend):
    table = single(backend, [3, 4, 5], [7])
    before = everything(table._owner)
    table.move_row(0, 0)
    table.swap_row(0, 0)
    table.move_rows([1, 0, 2], [1, 0, 2])
    assert_unchanged(before, table._owner)


def test_clear_zeroes_rows_and_counts_and_the_device_at_the_next_commit(backend):
    table = single(backend, FULL, [1])
    table.clear()
    assert not table.get_numpy_array().any()
    assert to_numpy(table.get_device_tensor(4)).any(), "the device follows at the next commit"
    assert_holds(table, [], [], [], [])


def test_a_null_id_inside_a_row_is_kept(backend):
    table = single(backend, [0, 5, 0])
    assert_holds(table, [0, 5, 0], [], [], [])


# --- many rows in one call --------------------------------------------------------------------------


def test_rows_in_one_call(backend):
    table = single(backend, [1, 2], [3], [4, 5, 6])
    table.append_rows([1, 0, 1], [2, 0, 1], [7, 8, 9])
    assert_holds(table, [1, 2], [3, 7, 8, 9], [4, 5, 6], [])
    table.add_rows(np.array([2, 3, 3]), np.array([0, 2, 1]), np.array([1, 2, 3], np.int64))
    assert_holds(table, [1, 2], [3, 7, 8, 9], [], [3])
    table.clear_rows([0, 0, 3])
    assert_holds(table, [], [3, 7, 8, 9], [], [])
    table.move_rows([1, 0], [0, 2])
    assert_holds(table, [], [], [3, 7, 8, 9], [])


def test_null_columns_keep_the_count_and_the_place_of_the_others(backend):
    table = single(backend, [1, 2, 3, 4], FULL)
    table.null_columns([0, 1, 1], [0, 1, 5], [2, 3, 6])
    assert_holds(table, [0, 0, 3, 4], [11, 0, 0, 14, 15, 0], [], [])


def test_mirror_truncates_and_replaces_single_blocks(backend):
    table = single(backend, [1, 2, 3, 4], FULL, [7])
    table._owner.mirror.truncate_rows([0, 1, 2], [1, 0, 5])
    assert_holds(table, [1], [], [7], [])
    table._owner.mirror.set_blocks([0, 2], [0, 0], [8, 9])
    assert_holds(table, [8], [], [9], [])


# --- several groups ---------------------------------------------------------------------------------


def test_groups_take_one_list_each_and_none_leaves_a_group_alone(backend):
    table = several(backend)
    table.add_row(([1, 2], [3], None), 0)
    table.append_row(([], [4], [5, 6]), 0)
    table.add_row((None, [], [7]), 0)
    assert_holds(table[0], [1, 2], [], [], [])
    assert_holds(table[1], [], [], [], [])
    assert_holds(table[2], [7], [], [], [])


def test_batched_calls_are_flat_over_all_groups(backend):
    table = several(backend)
    table.append_rows([0, 2], [[1, 2], [0, -1], [1, 1]], [1, 2, 3, 4, 5])
    assert_holds(table[0], [1], [], [2, 3], [])
    assert_holds(table[1], [], [], [], [])
    assert_holds(table[2], [4], [], [5], [])
    table.add_rows([0, 2], [[0, -1], [1, 0], [-1, 1]], [8, 9])
    assert_holds(table[0], [], [], [2, 3], [])
    assert_holds(table[1], [8], [], [], [])
    assert_holds(table[2], [4], [], [9], [])
    table.move_row(2, 1)
    table.swap_row(0, 3)
    assert_holds(table[0], [], [2, 3], [], [])
    assert_holds(table[2], [], [9], [], [4])
    table.clear_row(1)
    table.clear_rows([3])
    for group in range(3):
        assert_holds(table[group], [], [], [], [])


def test_calls_on_one_group_leave_the_others_alone(backend):
    table = several(backend)
    table.add_row(([1], [2], [3]), 0)
    table[1].append_row([9], 0)
    table[2].clear_row(0)
    table[0].move_row(0, 2)
    assert_holds(table[0], [], [], [1], [])
    assert_holds(table[1], [2, 9], [], [], [])
    assert_holds(table[2], [], [], [], [])


def test_views_of_the_host_table_are_read_only(backend):
    table = single(backend, [1])
    with pytest.raises(ValueError, match="read-only"):
        table.get_numpy_array()[0, 0] = 5
    with pytest.raises(ValueError, match="read-only"):
        table.num_blocks_per_row[0] = 5
