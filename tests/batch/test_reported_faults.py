"""Faults that users of such systems have reported in batches, as small inputs with the right values."""

import numpy as np
import pytest

from pagedkv import BlockTable, MultiGroupBlockTable
from pagedkv.batch import AdmittedRequests, InputBatch, RunningRequests, SchedulerOutput
from tests.tables.models import to_numpy

MODES = pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable"])


def batch_of(backend, block_size, rows, *, stable_rows=False, max_num_reqs=8, width=4):
    """A batch of one group, with these blocks in its rows and one token in each request's step."""
    table = MultiGroupBlockTable(
        [block_size],
        max_num_reqs,
        width * block_size,
        64,
        token_alignment=None,
        stable_rows=stable_rows,
        backend=backend,
    )
    batch = InputBatch(table)
    batch.update(SchedulerOutput(new=admitted(list(rows), list(rows.values()))))
    return batch


def admitted(names, rows, scheduled=None):
    counts, ids = [len(ids) for ids in rows], [block for ids in rows for block in ids]
    scheduled = [1] * len(names) if scheduled is None else scheduled
    return AdmittedRequests(names, scheduled, scheduled, None, [counts], ids)


def running(batch, *names, tokens=1, blocks=()):
    handles = [batch.handle_of(name) for name in names]
    counts = [[len(blocks)] + [0] * (len(names) - 1)] if blocks else None
    return RunningRequests(handles, [tokens] * len(names), None, counts, list(blocks) or None)


def table_of(step):
    return to_numpy(step[0].block_table_tensor).tolist()


# --- padding ----------------------------------------------------------------------------------------


@MODES
def test_padded_rows_are_the_null_block_and_padded_slots_are_not(backend, stable_rows):
    rows = {name: [i + 1, 10 + i, 20 + i, 30 + i] for i, name in enumerate("abcdef")}
    batch = batch_of(backend, 4, rows, stable_rows=stable_rows)
    batch.commit()
    batch.update(SchedulerOutput(running(batch, "a", "b", "c"), finished=["d", "e", "f"]))
    step = batch.commit(num_reqs_padded=8, num_tokens_padded=8)
    assert table_of(step) == [*[rows[name] for name in "abc"], *[[0] * 4] * 5], "in all 4 columns"
    state_indices = to_numpy(step[0].block_table_tensor)[:, 0].tolist()
    assert state_indices == [1, 2, 3, 0, 0, 0, 0, 0]
    assert to_numpy(step[0].slot_mapping).tolist() == [5, 9, 13, -1, -1, -1, -1, -1]


@MODES
def test_a_padded_slot_is_no_index(backend, stable_rows):
    """A consumer masks slots below 0; as a Python index, -1 is the last slot of the last block."""
    batch = batch_of(backend, 16, {"a": [2], "b": [4]}, stable_rows=stable_rows)
    batch.remove_request("b")  # block 4 is somebody else's now
    batch.add_request("c", 4, block_ids=[[1]])
    batch.update(SchedulerOutput(RunningRequests([batch.handle_of("c")], [1], [3])))
    step = batch.commit(num_tokens_padded=3, num_reqs_padded=3)
    slots = to_numpy(step[0].slot_mapping)
    assert slots.tolist() == [16 + 3, -1, -1]
    cache = np.zeros((5, 16), np.int64)
    written = slots[slots >= 0]
    cache[written // 16, written % 16] = 7
    assert np.flatnonzero(cache).tolist() == [19]
    faulty = np.zeros((5, 16), np.int64)
    faulty[slots // 16, slots % 16] = 7
    assert np.flatnonzero(faulty).tolist() == [19, 79], "what the mask is for: block 4, offset 15"


# --- rows of the batch ------------------------------------------------------------------------------


@MODES
def test_a_vacated_row_keeps_no_ids_for_a_dummy_step(backend, stable_rows):
    rows = {"a": [10, 11], "b": [20], "c": [30, 31, 32], "d": [40, 41]}
    batch = batch_of(backend, 4, rows, stable_rows=stable_rows, max_num_reqs=4)
    batch.commit()
    batch.update(SchedulerOutput(running(batch, "a", "c", "d"), finished=["b"]))
    assert batch.req_ids == ["a", "d", "c"], "3 -> 1"
    shown = table_of(batch.commit(num_reqs_padded=4))
    assert shown == [[10, 11, 0, 0], [40, 41, 0, 0], [30, 31, 32, 0], [0, 0, 0, 0]]
    counts = batch.table[0].num_blocks_per_row.tolist()
    assert counts == ([2, 0, 3, 2] if stable_rows else [2, 2, 3, 0])
    live = [block for row in shown for block in row if block]
    assert len(live) == len(set(live)), "no id stands in two rows"
    step = batch.dummy(4, 4)
    assert table_of(step) == [[0] * 4] * 4
    assert to_numpy(step[0].slot_mapping).tolist() == [-1] * 4


def test_a_dummy_row_beside_a_real_one_reads_no_table(backend):
    """The batch of one request and one dummy row: row -1 is never read as the last row."""
    batch = batch_of(
        backend, 4, {"x": [1], "y": [2], "a": [6, 9], "z": [50, 51]}, stable_rows=True, max_num_reqs=4
    )
    assert batch.rows.tolist() == [0, 1, 2, 3]
    step = batch.table.commit(2, [0, 1, 3], [5, 0], rows=[batch.rows[2], -1])
    assert to_numpy(step.slot_mapping(0)).tolist() == [37, -1, -1]
    assert not to_numpy(step.block_table(0))[1].any()


@MODES
def test_a_shorter_row_that_moves_onto_a_longer_one_leaves_no_tail(backend, stable_rows):
    batch = batch_of(
        backend, 4, {"a": [11, 12, 13, 14], "b": [21, 22]}, stable_rows=stable_rows, max_num_reqs=2
    )
    batch.commit()
    batch.update(SchedulerOutput(running(batch, "b"), finished=["a"]))
    assert table_of(batch.commit(num_reqs_padded=2)) == [[21, 22, 0, 0], [0, 0, 0, 0]]
    assert sorted(batch.table[0].num_blocks_per_row.tolist()) == [0, 2]


@MODES
def test_swaps_exchange_rows_exactly_and_a_cycle_of_them_is_the_permutation_once(backend, stable_rows):
    rows = {"a": [3, 4, 5], "b": [7], "c": [8, 9]}
    batch = batch_of(backend, 4, rows, stable_rows=stable_rows, width=3)
    batch.commit()
    batch.swap(0, 1)
    assert table_of(batch.commit()) == [[7, 0, 0], [3, 4, 5], [8, 9, 0]]
    assert batch.table[0].num_blocks_per_row[batch.rows].tolist() == [1, 3, 2]
    batch.swap(0, 2)  # with the first: the cycle 0 -> 1 -> 2 -> 0
    assert table_of(batch.commit()) == [[8, 9, 0], [3, 4, 5], [7, 0, 0]]
    batch.reorder([1, 2, 0])
    assert table_of(batch.commit()) == [[3, 4, 5], [7, 0, 0], [8, 9, 0]]
    assert batch.req_ids == ["a", "b", "c"]


def test_rows_of_a_table_are_exchanged_and_not_copied_over_each_other(backend):
    """The report's own rows, whole: no view of one row may be read after it was overwritten."""
    table = BlockTable(4, 2, 8, 16, backend=backend)
    table.add_row([1, 1, 1], 0)
    table.add_row([2, 2, 2, 1, 1, 1, 1, 1], 1)
    table.swap_row(0, 1)
    table.commit_block_table()
    shown = to_numpy(table.get_device_tensor(2)).tolist()
    assert shown == [[2, 2, 2, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0]]


@MODES
@pytest.mark.parametrize("said", [True, False], ids=["preempted named", "resumed alone"])
def test_a_resumed_request_replaces_its_row_and_a_running_one_appends(backend, stable_rows, said):
    batch = batch_of(backend, 16, {"a": [5, 6, 7, 8]}, stable_rows=stable_rows, width=5)
    batch.update(SchedulerOutput(preempted=["a"] if said else []))
    batch.update(SchedulerOutput(resumed=admitted(["a"], [[12, 13]], [32])))
    step = batch.commit()
    assert table_of(step) == [[12, 13, 0, 0, 0]]
    slots = to_numpy(step[0].slot_mapping)
    assert (slots[0], slots[31]) == (192, 223)
    batch.update(SchedulerOutput(running(batch, "a", blocks=[14])))
    step = batch.commit()
    assert table_of(step) == [[12, 13, 14, 0, 0]]
    assert to_numpy(step[0].slot_mapping).tolist() == [14 * 16]
