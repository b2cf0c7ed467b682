"""apply_writes against the contract of a record, column by column."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.kernels import _layout as layout

from .forms import EXAMPLES
from .world import ONE_BLOCK, STALE, TRAP, Group, World, launches, staging_buffer, worlds


@st.composite
def changes(draw, world, in_batch_order):
    """Records that never overlap: (group, row, start, end, ids or None, sets_count, position)."""
    records = []
    for g, group in enumerate(world.groups):
        places = draw(st.permutations(range(world.max_num_reqs)))
        for row in range(world.max_num_reqs):
            cuts = sorted(draw(st.sets(st.integers(0, group.width), max_size=4)))
            position = row if in_batch_order else draw(st.sampled_from([-1, places[row]]))
            counted = draw(st.integers(0, 4))  # which record of the row sets its count, if any
            for k, (start, end) in enumerate(itertools.pairwise(cuts)):
                ids = draw(st.none() | st.lists(_block_id, min_size=end - start, max_size=end - start))
                records.append((g, row, start, end, ids, k == counted, position))
    return draw(st.permutations(records))


_block_id = st.integers(0, 2**20)


def pack(world, records):
    """The staging buffer of the records, as the host packs it."""
    words, payload = [], []
    for g, row, start, end, ids, sets_count, position in records:
        source = -1 if ids is None else len(payload)
        payload += ids or []
        words.append([g * world.max_num_reqs + row, start, end, 2 * source + sets_count, position])
    sections = {"WRITES": np.array(words, np.int32), "PAYLOAD": np.array(payload, np.int32)}
    return staging_buffer({layout.NUM_WRITES: len(words)}, **sections)


def empty_state(world, in_batch_order):
    """Device arrays before the launch; batch tables are the tables themselves in batch order."""
    state = {"tables": world.arena(STALE), "num_blocks": world.counts(STALE)}
    state["batch_tables"] = state["tables"] if in_batch_order else world.arena(STALE)
    state["batch_num_blocks"] = state["num_blocks"] if in_batch_order else world.counts(STALE)
    return state | {"kernel_tables": world.kernel_arena()}


def apply_one_by_one(world, records, first_live, state):
    for g, row, start, end, ids, sets_count, position in records:
        written = [0] * (end - start) if ids is None else ids
        count = start if ids is None else end
        world.table(state["tables"], g)[row, start:end] = written
        if sets_count:
            state["num_blocks"][g, row] = count
        if position < 0:
            continue
        if sets_count:
            state["batch_num_blocks"][g, position] = count
        for c, block_id in zip(range(start, end), written, strict=True):
            shown = 0 if c < first_live[g, position] else block_id
            world.table(state["batch_tables"], g)[position, c] = shown
            for v, (ratio, stride) in enumerate(world.groups[g].views):
                blocks = [shown * stride + j if shown else 0 for j in range(ratio)]
                view = world.kernel_table(state["kernel_tables"], g, v)
                view[position, c * ratio : (c + 1) * ratio] = blocks


def run(form, world, records, first_live, state, shape=ONE_BLOCK):
    args = pack(world, records), world.geometry, world.views, first_live, *state.values()
    form.run("apply_writes", args, shape)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), world=worlds(), in_batch_order=st.booleans(), shape=launches)
def test_records_change_what_they_name_and_nothing_else(form, data, world, in_batch_order, shape):
    records = data.draw(changes(world, in_batch_order))
    first_live = world.counts()
    if not in_batch_order:
        live = st.lists(st.integers(0, 6), min_size=first_live.size, max_size=first_live.size)
        first_live.flat = data.draw(live)
    expected = empty_state(world, in_batch_order)
    apply_one_by_one(world, records, first_live, expected)

    state = empty_state(world, in_batch_order)
    run(form, world, records, first_live, state, shape)

    for name in expected:
        np.testing.assert_array_equal(expected[name], state[name], name)


@pytest.mark.parametrize("position", [0, -1])
def test_a_long_row_comes_in_chunks(form, position):
    """The host cuts a row of 600 columns into records of 256; the last one sets the count."""
    world = World([Group(16, width=700, views=((2, 3),))], 2)
    ids = list(range(1, 601))
    cuts = [0, layout.WRITE_CHUNK, 2 * layout.WRITE_CHUNK, 600]
    records = [(0, 1, a, b, ids[a:b], b == 600, position) for a, b in itertools.pairwise(cuts)]
    state = empty_state(world, in_batch_order=False)

    run(form, world, records, world.counts(), state)

    assert world.table(state["tables"], 0)[1, :600].tolist() == ids
    assert state["num_blocks"][0].tolist() == [STALE, 600]
    if position < 0:
        assert (state["batch_tables"] == STALE).all()
        return
    assert world.table(state["batch_tables"], 0)[0, :600].tolist() == ids
    assert world.kernel_table(state["kernel_tables"], 0, 0)[0, :4].tolist() == [3, 4, 6, 7]
    assert state["batch_num_blocks"][0].tolist() == [600, STALE]


def test_a_null_record_clears_a_row_without_payload(form):
    world = World([Group(16, width=4)], 1)
    state = empty_state(world, in_batch_order=True)
    state["tables"][:] = TRAP
    state["num_blocks"][:] = 4

    run(form, world, [(0, 0, 0, 3, None, True, 0)], world.counts(), state)

    assert state["tables"].tolist() == [0, 0, 0, TRAP]
    assert state["num_blocks"].tolist() == [[0]]


def test_no_records_change_nothing(form):
    world = World([Group(16, width=2)], 1)
    state = empty_state(world, in_batch_order=False)

    run(form, world, [], world.counts(), state)

    assert all((array == STALE).all() for array in state.values())


def test_rows_lie_64_bits_apart(form):  # vllm#57030
    """Row 20,000 of a table 131,072 wide starts past 2**31; the offset of the table takes it back."""
    row, width = 20_000, 131_072
    world = World([Group(16, width=width)], row + 1)
    world.geometry[0, layout.TABLE_OFFSET] = -row * width
    tables, counts = np.full(2, STALE, np.int32), world.counts(STALE)
    state = {"tables": tables, "num_blocks": counts, "batch_tables": tables, "batch_num_blocks": counts}
    state["kernel_tables"] = np.zeros(0, np.int32)

    run(form, world, [(0, row, 0, 2, [7, 5], True, row)], world.counts(), state)

    assert tables.tolist() == [7, 5]
    assert counts[0, row] == 2
