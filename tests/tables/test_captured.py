"""Captured steps: what pack takes, and the order of pack, replay and mark_replayed.

On the numpy backend `enqueue` stands in for the replay of a graph that holds it.
"""

import numpy as np
import pytest

from pagedkv import CapacityError, KVCacheGroupSpec, MultiGroupBlockTable, PagedKVError

from .models import assert_unchanged, everything, table_of, to_numpy


def table_of_four(backend, stable_rows=False):
    groups = [KVCacheGroupSpec(4, (2,)), 8]
    table = MultiGroupBlockTable(
        groups, 4, 4096, 32, token_alignment=None, stable_rows=stable_rows, backend=backend
    )
    for row in range(3):
        table.add_row(([row + 1, 11], [row + 21]), row)
    table.commit_block_table()
    return table


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
def test_a_captured_step_shows_each_packed_step(backend, stable_rows):
    table = table_of_four(backend, stable_rows)
    table.outputs(2)
    captured = table.captured_step(4, 16, max_new_blocks=8, out=1)
    rows = [[row + 1, 11] for row in range(3)]
    for i in range(20):
        row = i % 3
        if i % 5 == 4:
            table.clear_row(row)
            rows[row] = []
        table.append_row(([30 + i], [50 + i]), row)
        rows[row] = [*rows[row], 30 + i]
        num = 3 if stable_rows is False else i % 3 + 1
        order = np.roll(np.arange(3), i)[:num]
        shown = order if stable_rows else np.arange(num)
        lines = {"rows": order.astype(np.int32)} if stable_rows else {}
        starts, computed = 2 * np.arange(num + 1, dtype=np.int32), np.zeros(num, np.int32)

        step = captured.pack(num, starts, computed, **lines)
        captured.enqueue()
        captured.mark_replayed()

        expected = table_of([*(rows[line] for line in shown), *[[]] * (4 - num)], table.mirror.widths[0])
        np.testing.assert_array_equal(expected, to_numpy(step.block_table(0)))
        slots = [rows[line][0] * 4 + offset for line in shown for offset in (0, 1)]
        np.testing.assert_array_equal(slots + [-1] * (16 - 2 * num), to_numpy(step.slot_mapping(0)))
        np.testing.assert_array_equal([2] * num + [0] * (4 - num), to_numpy(step.seq_lens))
        if i % 4 == 2:  # an ordinary commit between two replays takes its own output set
            kept = to_numpy(step.slot_mapping(0)).copy()
            table.commit(num, starts, computed, **lines)
            np.testing.assert_array_equal(kept, to_numpy(step.slot_mapping(0)))


def test_pack_and_replay_take_turns(backend):
    table = table_of_four(backend)
    captured = table.captured_step(4, 16)
    with pytest.raises(PagedKVError, match="mark_replayed must follow a pack"):
        captured.mark_replayed()
    captured.pack(3, [0, 1, 2, 3], [0, 0, 0])
    table.append_row(([5], []), 0)
    before = everything(table)
    with pytest.raises(PagedKVError, match="must be replayed, and mark_replayed called, before pack"):
        captured.pack(3, [0, 1, 2, 3], [0, 0, 0])
    assert_unchanged(before, table)
    captured.enqueue()
    captured.mark_replayed()
    with pytest.raises(PagedKVError, match="mark_replayed must follow a pack"):
        captured.mark_replayed()
    step = captured.pack(3, [0, 1, 2, 3], [8, 0, 0])
    captured.enqueue()
    captured.mark_replayed()
    assert to_numpy(step.slot_mapping(0)).tolist() == [20, 8, 12, *[-1] * 13]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, [0, 1, 2, 3, 4], [0] * 4), CapacityError, "at most the captured 3, got 4"),
        ((3, [0, 1, 2, 9], [0] * 3), ValueError, "at least the 9 scheduled tokens, got 8"),
        ((3, [0, 1, 2], [0] * 3), ValueError, "query_start_loc must have shape"),
        ((-1, [], []), ValueError, "num_reqs must lie in"),
        ((3, [0, 2, 1, 3], [0] * 3), ValueError, "must not decrease"),
    ],
)
def test_a_step_that_the_capture_does_not_hold(backend, arguments, error, message):
    table = table_of_four(backend)
    captured = table.captured_step(3, 8)
    table.append_row(([5], []), 0)
    before = everything(table)
    with pytest.raises(error, match=message):
        captured.pack(*arguments)
    assert_unchanged(before, table)
    step = captured.pack(3, [0, 1, 2, 3], [8, 0, 0])
    captured.enqueue()
    captured.mark_replayed()
    assert to_numpy(step.slot_mapping(0))[:4].tolist() == [20, 8, 12, -1]


def test_more_new_blocks_than_the_capture_holds(backend):
    table = table_of_four(backend)
    captured = table.captured_step(3, 8, max_new_blocks=4)
    table.append_row((range(1, 1001), []), 0)
    before = everything(table)
    with pytest.raises(CapacityError, match="captured step must fit"):
        captured.pack(3, [0, 1, 2, 3], [0, 0, 0])
    assert_unchanged(before, table)
    table.commit_block_table()  # the way out that the message names
    step = captured.pack(3, [0, 1, 2, 3], [0, 0, 0])
    captured.enqueue()
    captured.mark_replayed()
    row = [1, 11, *range(1, 1001)]
    np.testing.assert_array_equal(table_of([row], 1024)[0], to_numpy(step.block_table(0))[0])


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
def test_rows_are_given_exactly_with_stable_rows(backend, stable_rows):
    table = table_of_four(backend, stable_rows)
    captured = table.captured_step(3, 8)
    table.append_row(([5], []), 0)
    before = everything(table)
    rule = "be given when" if stable_rows else "be None unless"
    with pytest.raises(ValueError, match=f"rows must {rule} the table has stable_rows"):
        captured.pack(1, [0, 1], [0], rows=None if stable_rows else [0])
    assert_unchanged(before, table)


@pytest.mark.parametrize("sizes", [(5, 8), (-1, 8), (4, 33), (4, -1)])
def test_sizes_that_the_table_does_not_hold(backend, sizes):
    with pytest.raises(ValueError, match="must lie in"):
        table_of_four(backend).captured_step(*sizes)


def test_an_output_set_that_is_not_there(backend):
    with pytest.raises(ValueError, match="out must name one of 1 output sets, got 1"):
        table_of_four(backend).captured_step(4, 8, out=1)


def test_warmup_captures_what_steps_will_launch(backend):
    table = table_of_four(backend)
    num = table.warmup([16], max_new_blocks=8)
    assert (num == 0) == (backend == "numpy"), "there are no graphs on the host"
    step = table.commit(3, [0, 1, 2, 3], [0, 0, 0])
    assert to_numpy(step.slot_mapping(0)).tolist() == [4, 8, 12]
