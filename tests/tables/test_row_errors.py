"""A row call that is refused changes nothing: no group, no count, no dirty range, nothing on the device."""

import numpy as np
import pytest

from pagedkv import CapacityError, HostMirror, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.constants import MAX_INT32

from .models import assert_unchanged, everything

WIDTHS = (6, 3, 8)


@pytest.fixture
def table(backend):
    groups = [KVCacheGroupSpec(4, (2,)), KVCacheGroupSpec(8), KVCacheGroupSpec(3)]
    table = MultiGroupBlockTable(groups, 4, 24, 32, token_alignment=None, backend=backend)
    assert table.mirror.widths == WIDTHS
    table.add_row(([1, 2], [3], [4, 5, 6]), 0)
    table.add_row(([7], [8, 9, 10], []), 1)
    table.commit(2, np.array([0, 1, 3], np.int32), np.array([4, 0], np.int32))
    table.append_row(([3], [], []), 0)  # dirty, and not sent
    return table


ROW_CALLS = {
    "add_row": lambda table, row: table.add_row(([1], [1], [1]), row),
    "append_row": lambda table, row: table.append_row(([1], [], [1]), row),
    "append of nothing": lambda table, row: table.append_row(([], [], []), row),
    "clear_row": lambda table, row: table.clear_row(row),
    "move from": lambda table, row: table.move_row(row, 0),
    "move to": lambda table, row: table.move_row(0, row),
    "move onto itself": lambda table, row: table.move_row(row, row),
    "swap": lambda table, row: table.swap_row(0, row),
    "swap first": lambda table, row: table.swap_row(row, 0),
    "add_rows": lambda table, row: table.add_rows([0, row], [[1, 0]] * 3, [1, 1, 1]),
    "append_rows": lambda table, row: table.append_rows([0, row], [[1, 0]] * 3, [1, 1, 1]),
    "clear_rows": lambda table, row: table.clear_rows([0, row]),
    "move_rows": lambda table, row: table.move_rows([1, 0], [2, row]),
    "null_columns": lambda table, row: table.null_columns([0, row], [0, 0], [1, 0]),
    "truncate_rows": lambda table, row: table.mirror.truncate_rows([0, row], [0, 0]),
    "set_blocks": lambda table, row: table.mirror.set_blocks([0, row], [0, 0], [5, 5]),
    "one group's add_row": lambda table, row: table[1].add_row([1], row),
    "one group's clear_row": lambda table, row: table[1].clear_row(row),
    "one group's move_row": lambda table, row: table[2].move_row(0, row),
    "one group's swap_row": lambda table, row: table[0].swap_row(row, 0),
}


@pytest.mark.parametrize("row", [-1, 4, MAX_INT32, -(2**40)])
@pytest.mark.parametrize("call", ROW_CALLS)
def test_a_row_out_of_range(table, call, row):
    before = everything(table)
    with pytest.raises(ValueError, match=r"must lie in \["):
        ROW_CALLS[call](table, row)
    assert_unchanged(before, table)


@pytest.mark.parametrize("row", [1.0, "0", None], ids=repr)
@pytest.mark.parametrize("call", ROW_CALLS)
def test_a_row_that_is_no_integer(table, call, row):
    before = everything(table)
    with pytest.raises((TypeError, ValueError)):
        ROW_CALLS[call](table, row)
    assert_unchanged(before, table)


@pytest.mark.parametrize(
    "call", ["add_row", "append_row", "clear_row", "move onto itself", "swap", "swap first"]
)
def test_a_row_that_is_a_boolean(table, call):
    before = everything(table)
    with pytest.raises(TypeError):
        ROW_CALLS[call](table, True)
    assert_unchanged(before, table)


@pytest.mark.parametrize("too_many", [1, 2, 100])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_row_past_its_capacity(table, group, too_many):
    before = everything(table)
    for row in (0, 1):
        held = int(table[group].num_blocks_per_row[row])
        lists = [[1] if g != group and table[g].num_blocks_per_row[row] < WIDTHS[g] else [] for g in range(3)]
        lists[group] = [1] * (WIDTHS[group] - held + too_many)
        match = f"must hold at most {WIDTHS[group]} blocks, got {WIDTHS[group] + too_many}"
        with pytest.raises(CapacityError, match=match):
            table.append_row(lists, row)
        with pytest.raises(CapacityError, match=match):
            table[group].append_row(lists[group], row)
        lists[group] = [1] * (WIDTHS[group] + too_many)
        with pytest.raises(CapacityError, match=match):
            table.add_row(lists, row)
    assert_unchanged(before, table)


def test_a_repeated_row_is_judged_by_its_sum(table):
    before = everything(table)
    with pytest.raises(CapacityError, match="row 2 of group 0 must hold at most 6 blocks, got 7"):
        table.append_rows([2, 3, 2], [[4, 1, 3], [0, 1, 0], [1, 1, 1]], [1] * 12)
    assert_unchanged(before, table)


@pytest.mark.parametrize("bad", [-1, MAX_INT32 + 1, -(2**31), 2**40])
def test_an_id_out_of_range(table, bad):
    before = everything(table)
    for ids in ([[1], [], [bad]], [[bad], [], [1]], [[1, bad], [1], [1]]):
        with pytest.raises(ValueError, match=r"block_ids must lie in"):
            table.add_row(ids, 0)
        with pytest.raises(ValueError, match=r"block_ids must lie in"):
            table.append_row((ids[0], [], ids[2]), 0)
    with pytest.raises(ValueError, match=r"block_ids must lie in"):
        table.mirror.set_blocks([0], [0], [bad])
    assert_unchanged(before, table)


def test_an_id_whose_kernel_blocks_pass_int32(table):
    """Group 0 has a view of two kernel blocks a block: the largest id is (2**31 - 2) // 2."""
    largest = (MAX_INT32 - 1) // 2
    before = everything(table)
    with pytest.raises(ValueError, match=f"must lie in \\[0, {largest}\\], got {largest + 1}"):
        table.append_row(([largest + 1], [], []), 0)
    assert_unchanged(before, table)
    table.append_row(([largest], [MAX_INT32], []), 0)
    assert table[0].get_numpy_array()[0, 3] == largest


@pytest.mark.parametrize("ids", [[1.0], [True], np.array([1.5]), np.array([True]), ["1"]], ids=repr)
def test_ids_that_are_no_integers(table, ids):
    before = everything(table)
    for call in (table.add_row, table.append_row):
        with pytest.raises(TypeError, match="block_ids must hold integers"):
            call((ids, [2], [3]), 0)
        with pytest.raises(TypeError, match="block_ids must hold integers"):
            call(([2], [2], ids), 0)
    with pytest.raises(TypeError, match="block_ids must hold integers"):
        table[0].append_row(ids, 0)
    assert_unchanged(before, table)


@pytest.mark.parametrize("lists", [[], [[1]], [[1], [1]], [[1], [1], [1], [1]]], ids=len)
def test_a_list_of_lists_of_the_wrong_length(table, lists):
    before = everything(table)
    for call in (table.add_row, table.append_row):
        with pytest.raises(ValueError, match=f"one list for each of 3 groups, got {len(lists)}"):
            call(lists, 0)
    assert_unchanged(before, table)


BAD_ROWS_CALLS = {
    "too few ids": (([0], [[1], [1], [0]], [1]), "block_ids must hold sum.* = 2 ids, got 1"),
    "too many ids": (([0], [[1], [1], [0]], [1, 2, 3]), "block_ids must hold sum.* = 2 ids, got 3"),
    "too few counts of a group": (([0, 1], [[1], [1], [0]], [1, 2]), "counts must have shape"),
    "too many counts of a group": (([0], [[1, 0], [1, 0], [0, 0]], [1, 2]), "counts must have shape"),
    "too few groups": (([0], [[1], [1]], [1, 2]), "counts must have shape"),
    "too many groups": (([0], [[1], [1], [0], [0]], [1, 2]), "counts must have shape"),
    "flat counts": (([0], [1], [1]), "counts must have shape"),
    "counts below -1": (([0], [[-2], [1], [1]], [1, 2]), "counts must"),
    "a row below 0": (([-1], [[1], [1], [0]], [1, 2]), r"rows must lie in \[0, 3\], got -1"),
    "a row past the table": (([4], [[1], [1], [0]], [1, 2]), r"rows must lie in \[0, 3\], got 4"),
    "an id below 0": (([0], [[1], [1], [0]], [1, -2]), r"block_ids must lie in"),
    "an id past the views": (([0], [[1], [1], [0]], [2**30, 2]), r"block_ids must lie in"),
    "a row too long": (([2], [[1], [4], [0]], [1] * 5), "row 2 of group 1 must hold at most 3 blocks, got 4"),
}


@pytest.mark.parametrize("convert", [list, lambda values: np.array(values, np.int32)], ids=["lists", "ready"])
@pytest.mark.parametrize("what", BAD_ROWS_CALLS)
def test_batched_calls_that_do_not_match(table, what, convert):
    arguments, message = BAD_ROWS_CALLS[what]
    before = everything(table)
    for call in (table.add_rows, table.append_rows):
        with pytest.raises(ValueError, match=message):
            call(*map(convert, arguments))
    assert_unchanged(before, table)


def test_pairs_that_do_not_match(table):
    before = everything(table)
    for call in (table.add_rows, table.append_rows):
        with pytest.raises(TypeError, match="counts must hold integers"):
            call([0], [[1.0], [1.0], [0.0]], [1, 2])
    with pytest.raises(ValueError, match="tgts must have shape"):
        table.move_rows([0, 1], [1])
    with pytest.raises(ValueError, match="starts must have shape"):
        table.null_columns([0], [0, 1], [1])
    with pytest.raises(ValueError, match="ends must have shape"):
        table.null_columns([0], [0], [])
    assert_unchanged(before, table)


def test_columns_that_are_not_live(table):
    before = everything(table)
    with pytest.raises(ValueError, match="columns must lie within the 3 live columns of row 0 of group 0"):
        table.null_columns([1, 0], [0, 2], [1, 4])
    with pytest.raises(ValueError, match="columns must lie within"):
        table.null_columns([0], [2], [1])
    with pytest.raises(ValueError, match=r"starts must lie in \[0"):
        table.null_columns([0], [-1], [1])
    with pytest.raises(ValueError, match="columns must lie within"):
        table.mirror.set_blocks([1, 0], [0, 3], [5, 5])
    with pytest.raises(ValueError, match=r"columns must lie in \[0"):
        table.mirror.set_blocks([0], [-1], [5])
    with pytest.raises(ValueError, match=r"counts must lie in \[0"):
        table.mirror.truncate_rows([1, 0], [0, -1])
    with pytest.raises(ValueError, match=r"group must lie in \[0, 2\]"):
        table.null_columns([0], [0], [1], 3)
    assert_unchanged(before, table)


def test_a_mirror_of_another_shape_is_refused(backend):
    mirror = HostMirror(4, [6])
    with pytest.raises(ValueError, match="mirror must have 3 rows"):
        MultiGroupBlockTable([4], 3, 24, 32, token_alignment=None, backend=backend, mirror=mirror)
    with pytest.raises(ValueError, match="mirror must have 4 rows of widths"):
        MultiGroupBlockTable([4], 4, 28, 32, token_alignment=None, backend=backend, mirror=mirror)
