"""Slots of compute_slot_mapping and of commit: the worked table, sentinels, padding, 64 bits, brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import (
    PAD_SLOT_ID,
    BlockTable,
    ContextParallel,
    KVCacheGroupSpec,
    MultiGroupBlockTable,
)
from pagedkv.constants import MAX_INT32

from .models import requests_of, slot_of, to_numpy
from .strategies import group_specs, worlds

HUGE = 2**40 + 7

WORKED_POSITIONS = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 33, 35, 36, 40, 63, 64]
WORKED_SLOTS = {
    (1, 0): "112   - 113   - 114   -   - 116   - 120   -  48   -   -  50  52   - 144",
    (1, 1): "  - 112   - 113   - 114 115   - 119   - 127   -  48  49   -   -  63   -",
    (4, 0): "112 113 114 115   -   -   - 116   - 120   -  48  49  51   -  52   - 144",
    (4, 1): "  -   -   -   - 112 113 115   - 119   - 127   -   -   -  48   -  63   -",
    (16, 0): "112 113 114 115 116 117 119 120 127   -   -  48  49  51  52  56   - 144",
    (16, 1): "  -   -   -   -   -   -   -   -   - 112 127   -   -   -   -   -  63   -",
}


def slots_of_text(text):
    return [PAD_SLOT_ID if word == "-" else int(word) for word in text.split()]


def map_slots(table, rows_of_positions, rows=None):
    """Map lists of positions, one a request, by compute_slot_mapping; returns the real tokens' slots."""
    starts = np.cumsum([0, *(len(p) for p in rows_of_positions)])
    flat = np.array([p for positions in rows_of_positions for p in positions], np.int64)
    table.compute_slot_mapping(len(rows_of_positions), starts, flat, rows=rows)
    slots = to_numpy(table.slot_mapping)
    assert (slots[len(flat) :] == PAD_SLOT_ID).all(), "PAD past the last token"
    return slots[: len(flat)].tolist()


def committed(table, *rows):
    for row, ids in enumerate(rows):
        table.add_row(ids, row)
    table.commit_block_table(len(rows))
    return table


# --- the formula ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interleave", "rank"), WORKED_SLOTS)
def test_worked_table_of_two_ranks(backend, interleave, rank):
    world = ContextParallel(2, rank, interleave)
    table = committed(BlockTable(16, 2, 3, 32, context_parallel=world, backend=backend), [7, 3, 9])
    expected = slots_of_text(WORKED_SLOTS[interleave, rank])
    assert expected == map_slots(table, [WORKED_POSITIONS])


def test_single_device(backend):
    table = committed(BlockTable(16, 2, 3, 32, backend=backend), [5, 8, 2])
    assert map_slots(table, [[0, 15, 16, 31, 32]]) == [80, 95, 128, 143, 32]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_slots_equal_brute_force(backend, data):
    interleave = data.draw(st.sampled_from([1, 2, 3]), "interleave")
    specs = data.draw(st.lists(group_specs(interleave), min_size=1, max_size=3), "groups")
    world = data.draw(worlds(interleave), "rank")[0]
    num_rows, max_len = data.draw(st.integers(1, 4), "rows"), data.draw(st.integers(1, 70), "max_model_len")
    table = MultiGroupBlockTable(
        specs, num_rows, max_len, 40, context_parallel=world, token_alignment=None, backend=backend
    )
    content = []
    for width, limit in zip(table.mirror.widths, table.mirror.layout[:, 2].tolist(), strict=True):
        ids = st.lists(st.sampled_from([0, 1, 2, 3, 30, limit]), max_size=min(width, 10))
        content.append([data.draw(ids, "ids") for _ in range(num_rows)])
    for row in range(num_rows):
        table.add_row([group[row] for group in content], row)
    table.commit_block_table()
    table.compute_slot_mapping(1, [0, 40], np.arange(40) % max_len)  # what the next call must not leave
    num_reqs = data.draw(st.integers(0, num_rows), "num_reqs")
    lengths = data.draw(st.lists(st.integers(0, 10), min_size=num_reqs, max_size=num_reqs), "lengths")
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    where = st.integers(-2, max_len + 2) | st.sampled_from([HUGE, -HUGE, 2**31, 2**63 - 1, -(2**63)])
    positions = [data.draw(where, "position") for _ in range(sum(lengths))]
    rows = data.draw(
        st.none() | st.lists(st.integers(-1, num_rows - 1), min_size=num_reqs, max_size=num_reqs), "rows"
    )

    table.compute_slot_mapping(num_reqs, starts, np.array(positions, np.int64), rows=rows)

    lines = range(num_reqs) if rows is None else rows
    for spec, group, view in zip(specs, content, table, strict=True):
        expected = [
            slot_of(p, group[lines[i]] if lines[i] >= 0 else [], spec, world, max_len)
            for i, p in zip(requests_of(starts), positions, strict=True)
        ]
        expected += [PAD_SLOT_ID] * (40 - len(expected))
        np.testing.assert_array_equal(expected, to_numpy(view.slot_mapping))


@pytest.mark.parametrize("block_size", [1, 4, 6, 12])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2])
def test_each_position_has_one_owner_and_its_own_slot(backend, block_size, world, interleave):
    if block_size % interleave:
        with pytest.raises(ValueError, match="interleave must divide block_size 1, got 2"):
            BlockTable(
                block_size, 1, 5, 50, context_parallel=ContextParallel(2, 0, interleave), backend=backend
            )
        return
    length = 37
    owners = np.zeros(length, np.int64)
    for rank in range(world):
        context_parallel = ContextParallel(world, rank, interleave)
        width = -(-length // (block_size * world))
        table = BlockTable(block_size, 1, width, 50, context_parallel=context_parallel, backend=backend)
        committed(table, list(range(3, 3 + width)))
        slots = np.array(map_slots(table, [range(length)]))
        local = slots[slots >= 0]
        assert len(local) == len(set(local.tolist())), "local slots are distinct"
        owners += slots >= 0
        # Tokens of a rank: whole rounds of the ranks, and its share of the last round.
        rounds, rest = divmod(length, world * interleave)
        expected = rounds * interleave + min(max(rest - rank * interleave, 0), interleave)
        assert expected == len(local)
    np.testing.assert_array_equal(np.ones(length), owners)


# --- what maps to PAD -------------------------------------------------------------------------------


def test_positions_outside_the_sequence_map_to_pad(backend):
    table = committed(BlockTable(4, 2, 5, 32, max_model_len=10, backend=backend), [3, 5, 7], [9])
    below = [-1, -4, -(2**31), -(2**63)]
    assert map_slots(table, [below]) == [PAD_SLOT_ID] * 4
    past = [10, 11, 12, 2**31, 2**31 + 3, 2**32, 2**32 + 1, 2**63 - 1]
    assert [29, *[PAD_SLOT_ID] * 8] == map_slots(table, [[9, *past]])
    assert map_slots(table, [[0], [3, 4]]) == [12, 39, PAD_SLOT_ID], "row 1 has one block"


def test_null_columns_and_dummy_rows_map_to_pad(backend):
    table = committed(BlockTable(4, 4, 4, 32, backend=backend), [3, 0, 7], [9])
    assert map_slots(table, [[1, 5, 8]]) == [13, PAD_SLOT_ID, 28]
    slots = map_slots(table, [[1, 2], [0], [0], []], rows=[1, -1, 1, 2])
    assert slots == [37, 38, PAD_SLOT_ID, 36]


def test_the_tail_is_pad_after_every_call(backend):
    table = committed(BlockTable(4, 2, 8, 32, backend=backend), [3, 4, 5, 6, 7, 8, 9, 10])
    for num in (32, 5, 0, 17, 1, 0):
        assert list(range(12, 12 + num)) == map_slots(table, [range(num)])


@pytest.mark.parametrize("stable_rows", [False, True])
def test_the_tail_is_pad_after_rows_were_sent_alone(backend, stable_rows):
    table = MultiGroupBlockTable([4], 2, 32, 16, stable_rows=stable_rows, backend=backend)
    rows = {"rows": [0]} if stable_rows else {}
    table.add_row(([3, 4, 5],), 0)
    table.commit(1, [0, 10], [0], **rows)
    table.append_row(([6],), 0)
    table.commit_block_table()
    step = table.commit(1, [0, 2], [1], num_tokens_padded=6, **rows)
    assert to_numpy(table[0].slot_mapping).tolist() == [13, 14, *[PAD_SLOT_ID] * 14]
    assert to_numpy(step.positions).tolist() == [1, 2, 0, 0, 0, 0]


def test_a_group_switched_off_is_all_pad(backend):
    groups = [KVCacheGroupSpec(4), KVCacheGroupSpec(4, slot_mapping=False), KVCacheGroupSpec(2)]
    table = MultiGroupBlockTable(groups, 2, 32, 16, token_alignment=None, backend=backend)
    table.add_row(([5], [6], [7, 8]), 0)
    step = table.commit(1, [0, 4], [0], num_tokens_padded=8)
    expected = [[20, 21, 22, 23], [PAD_SLOT_ID] * 4, [14, 15, 16, 17]]
    for group, slots in enumerate(expected):
        assert slots + [PAD_SLOT_ID] * 4 == to_numpy(step.slot_mapping(group)).tolist()
    table.compute_slot_mapping(1, [0, 2], np.array([1, 3]))
    assert to_numpy(table[0].slot_mapping)[:2].tolist() == [21, 23]
    assert (to_numpy(table[1].slot_mapping) == PAD_SLOT_ID).all()


def test_sharded_and_replicated_groups_side_by_side(backend):
    groups = [KVCacheGroupSpec(4), KVCacheGroupSpec(4, cp_sharded=False)]
    for rank in (0, 1):
        world = ContextParallel(2, rank, 2)
        table = MultiGroupBlockTable(
            groups, 1, 16, 16, context_parallel=world, token_alignment=None, backend=backend
        )
        table.add_row(([6, 9], [6, 9, 2, 3]), 0)
        step = table.commit(1, [0, 10], [0])
        mine = (
            [24, 25, -1, -1, 26, 27, -1, -1, 36, 37]
            if rank == 0
            else [-1, -1, 24, 25, -1, -1, 26, 27, -1, -1]
        )
        assert mine == to_numpy(step.slot_mapping(0)).tolist()
        assert to_numpy(step.slot_mapping(1)).tolist() == [24, 25, 26, 27, 36, 37, 38, 39, 8, 9]


# --- width of the products --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "block", "offset", "slot"),
    [
        (16, 65535, 15, 1048575),
        (16, 2**27, 0, 2147483648),
        (16, 2**27 + 3, 0, 2147483696),
        (256, MAX_INT32, 255, 549755813887),
    ],
)
def test_slots_are_formed_in_64_bits(backend, block_size, block, offset, slot):
    table = committed(BlockTable(block_size, 1, 2, 8, backend=backend), [block, block])
    assert to_numpy(table.slot_mapping).dtype == np.int64
    assert [slot, slot] == map_slots(table, [[offset, block_size + offset]])


def test_slots_of_32_bits_on_request(backend):
    table = MultiGroupBlockTable([16], 2, 64, 8, slot_dtype=np.int32, backend=backend)
    largest = MAX_INT32 // 16
    table.add_row(([largest - (MAX_INT32 % 16 != 15)],), 0)
    with pytest.raises(ValueError, match=r"block_ids must lie in \[0, \d+\]"):
        table.append_row(([largest + 1],), 0)
    step = table.commit(1, [0, 1], [15], num_tokens_padded=2)
    slots = to_numpy(step.slot_mapping(0))
    assert slots.dtype == np.int32
    assert [largest * 16 + 15, PAD_SLOT_ID] == slots.tolist()


def test_places_in_a_table_of_more_than_2_31_elements(backend):
    """Row 20,000 of rows of 131,072 columns; the memory is reserved, and on the host hardly touched."""
    try:
        table = BlockTable(16, 20_001, 131_072, 8, backend=backend)
    except MemoryError as error:
        pytest.skip(f"no room for two tables of 10.5 GB: {error}")
    row, last = 20_000, 131_071
    table.add_row(np.arange(1, last + 2), row)
    table.add_row([7], 16_384)
    table.commit_block_table()
    assert row * 131_072 + last == 2_621_571_071
    slots = map_slots(table, [[16 * last + 2, 16 * last + 16], [5, 16]], rows=[row, 16_384])
    assert slots == [16 * 131_072 + 2, PAD_SLOT_ID, 7 * 16 + 5, PAD_SLOT_ID]
    np.testing.assert_array_equal([131_072], to_numpy(table.get_device_tensor(row + 1)[row, last:]))
