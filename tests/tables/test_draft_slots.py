"""compute_slot_mapping into an output set of its own: a draft's slots beside those of the target's step."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import PAD_SLOT_ID, BlockTable, KVCacheGroupSpec, MultiGroupBlockTable

from .models import (
    assert_unchanged,
    everything,
    positions_of,
    requests_of,
    slot_of,
    to_numpy,
)
from .strategies import group_specs, worlds

MAX_TOKENS = 24


@pytest.fixture(params=[False, True], ids=["batch order", "stable rows"])
def stable_rows(request):
    return request.param


def table_of_rows(backend, *rows, stable_rows=False, max_model_len=64, groups=(16,), num_sets=2):
    """A table whose rows hold the same ids in all groups, sent to the device."""
    table = MultiGroupBlockTable(
        groups,
        4,
        max_model_len,
        MAX_TOKENS,
        token_alignment=None,
        stable_rows=stable_rows,
        backend=backend,
    )
    table.outputs(num_sets)
    for row, ids in enumerate(rows):
        table.add_row([ids] * len(groups), row)
    table.commit_block_table()
    return table


def draft(table, *positions, rows=None, out=1):
    """Map lists of positions, one a request, into an output set; returns the slots of each group."""
    starts = np.cumsum([0, *map(len, positions)])
    flat = np.array([p for each in positions for p in each], np.int64)
    slots = table.compute_slot_mapping(len(positions), starts, flat, rows=rows, out=out)
    return [to_numpy(group).tolist() for group in slots]


def held(table, group=0, out=1):
    """All slots that an output set holds for a group."""
    return to_numpy(table.slot_mapping(group, MAX_TOKENS, out)).tolist()


def padded(slots):
    return slots + [PAD_SLOT_ID] * (MAX_TOKENS - len(slots))


# --- where drafts go --------------------------------------------------------------------------------


def test_drafts_past_the_model_length_have_no_slot(backend, stable_rows):
    """The last block has room for them, and position 0 must not be written in their place."""
    table = table_of_rows(backend, [3, 8, 5], stable_rows=stable_rows, max_model_len=40)
    assert draft(table, range(38, 43), rows=[0]) == [[86, 87, -1, -1, -1]]
    assert held(table) == padded([86, 87])


def test_drafts_go_into_lookahead_blocks_and_nowhere_without_them(backend, stable_rows):
    table = table_of_rows(backend, [4, 9], stable_rows=stable_rows)
    assert draft(table, [31, 32, 33], rows=[0]) == [[159, -1, -1]], "PAD, not the null block"
    table.append_row([[6]], 0)
    assert draft(table, [31, 32, 33], rows=[0]) == [[159, -1, -1]], "the new block is not on the device yet"
    table.commit_block_table()
    assert draft(table, [31, 32, 33], rows=[0]) == [[159, 96, 97]]


def test_drafts_of_a_dummy_have_no_slot(backend, stable_rows):
    """Row -1, read as the last row, would write into the blocks of a live request."""
    table = table_of_rows(backend, [4], [9], [6], [50], stable_rows=stable_rows)
    assert draft(table, [1, 2], [3], [0], rows=[2, -1, 0]) == [[97, 98, -1, 64]]
    assert draft(table, [1], [3], [0], rows=[-1, -1, -1]) == [[-1, -1, -1]]
    assert held(table) == padded([])


def test_without_rows_request_i_is_row_i(backend):
    table = table_of_rows(backend, [4], [9])
    assert draft(table, [1], [1]) == draft(table, [1], [1], rows=[0, 1]) == [[65, 145]]


# --- two sets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "drafts"), [(0, 1), (1, 0)])
def test_a_target_and_its_drafts_keep_their_own_slots(backend, stable_rows, target, drafts):
    table = table_of_rows(backend, [3, 8, 5], [9, 2], stable_rows=stable_rows, groups=(16, 8))
    rows = {"rows": [1, 0]} if stable_rows else {}
    step = table.commit(2, [0, 2, 3], [5, 9], num_tokens_padded=8, out=target, **rows)
    first, second = (9, 3) if stable_rows else (3, 9)
    expected = [
        [16 * first + 5, 16 * first + 6, 16 * second + 9, *[-1] * 5],
        [8 * first + 5, 8 * first + 6, 8 * (8 if stable_rows else 2) + 1, *[-1] * 5],
    ]
    assert [to_numpy(step.slot_mapping(g)).tolist() for g in (0, 1)] == expected
    for i in range(3):
        slots = draft(table, [7 + i], [10 + i], rows=rows.get("rows"), out=drafts)
        assert [to_numpy(step.slot_mapping(g)).tolist() for g in (0, 1)] == expected, f"draft {i}"
        assert [held(table, g, target) for g in (0, 1)] == [padded(e) for e in expected]
        assert slots[0] == [16 * first + 7 + i, 16 * second + 10 + i]
    lengths = [to_numpy(step.seq_lens).tolist(), to_numpy(step.positions).tolist()]
    assert lengths == [[7, 10], [5, 6, 9, 0, 0, 0, 0, 0]], "a mapping writes slots alone"
    table.commit(1, [0, 1], [30], out=target, **({"rows": [0]} if stable_rows else {}))
    assert [held(table, g, drafts) for g in (0, 1)] == [padded(s) for s in slots], "and the other way round"


def test_a_shorter_draft_leaves_no_slot_of_a_longer_one(backend, stable_rows):
    table = table_of_rows(backend, [3, 8, 5, 7], stable_rows=stable_rows)
    for num in (20, 3, 7, 0, MAX_TOKENS, 1):
        assert draft(table, range(num), rows=[0])[0] == held(table)[:num]
        assert held(table)[num:] == [PAD_SLOT_ID] * (MAX_TOKENS - num)
    draft(table, range(20), rows=[0])
    rows = {"rows": [0]} if stable_rows else {}
    step = table.commit(1, [0, 2], [4], num_tokens_padded=10, out=1, **rows)
    assert to_numpy(step.slot_mapping(0)).tolist() == [52, 53, *[PAD_SLOT_ID] * 8]
    assert held(table) == padded([52, 53]), "a step into the set pads what the draft left"
    assert draft(table, [9], rows=[0]) == [[57]]
    assert held(table) == padded([57]), "and a draft what the step left"


def test_sets_that_are_made_later_begin_empty(backend):
    table = table_of_rows(backend, [3, 8], num_sets=1)
    draft(table, range(5), out=0)
    table.outputs(3)
    assert held(table, out=2) == padded([])
    assert held(table, out=0) == padded([48, 49, 50, 51, 52])
    assert draft(table, [1], out=2) == [[49]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sets_hold_what_was_written_to_them(backend, data):
    """Steps, drafts and row changes in any order, into any set: each set equals brute force to its end."""
    interleave = data.draw(st.sampled_from([1, 2]), "interleave")
    specs = data.draw(st.lists(group_specs(interleave), min_size=1, max_size=2), "groups")
    specs = [KVCacheGroupSpec(s.block_size, (), s.cp_sharded, s.slot_mapping) for s in specs]
    world = data.draw(worlds(interleave), "rank")[0]
    stable = data.draw(st.booleans(), "stable_rows")
    max_len = data.draw(st.sampled_from([1, 9, 40]), "max_model_len")
    table = MultiGroupBlockTable(
        specs, 3, max_len, MAX_TOKENS, context_parallel=world, token_alignment=None,
        stable_rows=stable, backend=backend,
    )  # fmt: skip
    table.outputs(3)
    rows = [[[] for _ in range(3)] for _ in specs]
    expected = [[padded([]) for _ in specs] for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 6), "calls")):
        row = data.draw(st.integers(0, 2), "row")
        for ids, width in zip(rows, table.mirror.widths, strict=True):
            ids[row] = data.draw(st.lists(st.integers(0, 9), max_size=min(width, 6)), "ids")
        table.add_row([ids[row] for ids in rows], row)
        table.commit_block_table()
        num_reqs = data.draw(st.sampled_from([3, 0, 1, 2]), "num_reqs")
        lengths = data.draw(st.lists(st.integers(0, 8), min_size=num_reqs, max_size=num_reqs), "lengths")
        starts, out = np.cumsum([0, *lengths]).astype(np.int32), data.draw(st.integers(0, 2), "out")
        lines = st.lists(st.integers(-1, 2), min_size=num_reqs, max_size=num_reqs)
        is_step = data.draw(st.booleans(), "step")
        given_rows = data.draw(lines if stable else st.none() if is_step else st.none() | lines, "rows")
        if is_step:
            computed = [data.draw(st.integers(0, max_len), "computed") for _ in lengths]
            table.commit(num_reqs, starts, np.array(computed, np.int32), rows=given_rows, out=out)
            positions = positions_of(starts, computed)
        else:
            positions = [data.draw(st.integers(-1, max_len + 2), "position") for _ in range(starts[-1])]
            flat = np.array(positions, np.int64)
            table.compute_slot_mapping(num_reqs, starts, flat, rows=given_rows, out=out)
        which = range(num_reqs) if given_rows is None else given_rows
        expected[out] = [
            padded(
                [
                    slot_of(p, ids[which[i]] if which[i] >= 0 else [], spec, world, max_len)
                    for i, p in zip(requests_of(starts), positions, strict=True)
                ]
            )
            for spec, ids in zip(specs, rows, strict=True)
        ]
        assert [[held(table, g, o) for g in range(len(specs))] for o in range(3)] == expected


# --- what is handed out -----------------------------------------------------------------------------


def test_slots_are_views_of_one_address(backend):
    table = table_of_rows(backend, [3, 8], groups=(16, 8))
    first = table.compute_slot_mapping(1, [0, 3], np.arange(3), out=1)
    second = table.compute_slot_mapping(1, [0, 1], np.array([5]), out=1)
    assert [s.shape for s in first + second] == [(3,), (3,), (1,), (1,)]
    assert [to_numpy(s).tolist() for s in first] == [[53, -1, -1], [29, -1, -1]], "the set was written anew"
    assert to_numpy(table.slot_mapping(1, 5, out=1)).tolist() == [29, -1, -1, -1, -1]
    assert {to_numpy(s).dtype for s in (*first, table.slot_mapping(0, 0))} == {np.dtype(np.int64)}


def test_positions_past_the_last_token_are_not_read(backend):
    table = table_of_rows(backend, [3, 8])
    slots = table.compute_slot_mapping(1, [0, 2], np.arange(9), out=1)
    assert [to_numpy(s).tolist() for s in slots] == [[48, 49]]
    assert held(table) == padded([48, 49])


def test_a_table_of_one_group_has_its_slots_where_they_were(backend):
    table = BlockTable(16, 2, 3, 8, backend=backend)
    table.add_row([3, 8], 0)
    table.commit_block_table()
    assert table.compute_slot_mapping(1, [0, 2], np.array([15, 16])) is None
    assert to_numpy(table.slot_mapping).tolist() == [63, 128, *[-1] * 6]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"out": 2},
            ValueError,
            r"out must name one of 2 output sets, got 2 \(make more with outputs\(n\)\)",
        ),
        ({"out": -1}, ValueError, "out must name one of 2 output sets, got -1"),
        ({"out": True}, TypeError, "out must be an int, got bool"),
        ({"out": 1.0}, TypeError, "out must be an int, got float"),
        ({"rows": [4]}, ValueError, r"rows must lie in \[-1, 3\], got 4"),
        ({"rows": [0, 1]}, ValueError, "rows must have shape"),
        ({"positions": np.arange(1)}, ValueError, "positions must hold the 2 scheduled tokens"),
        ({"query_start_loc": [0, 25], "positions": np.arange(25)}, ValueError, "max_num_batched_tokens = 24"),
    ],
)
def test_a_mapping_that_is_refused_changes_no_set(backend, change, error, message):
    table = table_of_rows(backend, [3, 8], [9])
    draft(table, [1, 2], rows=[0])
    call = {"num_reqs": 1, "query_start_loc": [0, 2], "positions": np.arange(2), "out": 1}
    before, kept = everything(table), copy.deepcopy(call)
    with pytest.raises(error, match=message):
        table.compute_slot_mapping(**{**call, **change})
    assert_unchanged(before, table)
    slots = table.compute_slot_mapping(**kept)
    assert to_numpy(slots[0]).tolist() == [48, 49]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 4), r"group must lie in \[0, 0\], got 1"),
        ((0, 25), r"num_tokens must lie in \[0, 24\], got 25"),
        ((0, -1), "num_tokens must lie in"),
        ((0, 4, 2), "out must name one of 2 output sets, got 2"),
    ],
)
def test_slots_that_are_not_there(backend, arguments, message):
    with pytest.raises(ValueError, match=message):
        table_of_rows(backend, [3]).slot_mapping(*arguments)
