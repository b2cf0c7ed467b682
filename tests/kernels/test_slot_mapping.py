"""slot_mapping against the formula, token by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.kernels import _layout as layout

from .forms import EXAMPLES
from .world import (
    ONE_BLOCK,
    STALE,
    TRAP,
    Group,
    World,
    filled,
    launches,
    narrow_launches,
    staging_buffer,
    worlds,
)

INPUTS = ("query_start_loc", "num_computed_tokens", "positions", "rows")
INT64 = np.iinfo(np.int64)
INT32 = np.iinfo(np.int32)


def expected_slot(group, table, counts, row, p):
    """One token's slot, as the contract words it."""
    if not group.has_slots or not 0 <= row < len(table) or not 0 <= p < group.max_model_len:
        return -1
    world, rank, interleave = group.cp
    column, offset = divmod(p, group.block_size * world)
    if (offset // interleave) % world != rank:
        return -1
    if column >= counts[row] or table[row, column] == 0:
        return -1
    local = offset // (world * interleave) * interleave + offset % interleave
    return int(table[row, column]) * group.block_size + local


def expected_local_length(group, length):
    """How many of a sequence's positions the group's rank holds."""
    world, rank, interleave = group.cp
    if length < 10_000:
        return sum((p // interleave) % world == rank for p in range(length))
    firsts = range(rank * interleave, (rank + 1) * interleave)  # too long to count one by one
    return sum(len(range(first, length, world * interleave)) for first in firsts)


def outputs(world, max_num_tokens, slot_dtype=np.int64):
    return {
        "slots": np.full((len(world.groups), max_num_tokens), STALE, slot_dtype),
        "step_positions": np.full(max_num_tokens, STALE, np.int64),
        "step_seq_lens": np.full(world.max_num_reqs, STALE, np.int32),
        "step_query_start_loc": np.full(world.max_num_reqs + 1, STALE, np.int32),
        "step_token_reqs": np.full(max_num_tokens, STALE, np.int32),
        "step_local_seq_lens": np.full((len(world.groups), world.req_stride), STALE, np.int32),
    }


def map_slots(
    form, world, arena, counts, *, query_start_loc, positions, rows=None, slot_dtype=np.int64, fill=0
):
    """The separate call on device arrays; returns slots [num_groups, max(num_tokens, fill)]."""
    query_start_loc = np.asarray(query_start_loc, np.int32)
    positions = np.asarray(positions, np.int64)
    width = max(len(positions), fill)
    world = replace(world, slot_stride=width)
    out = outputs(world, width, slot_dtype)
    has_rows = rows is not None
    rows = np.asarray(rows if has_rows else [], np.int32)
    none = np.zeros(0, np.int32)
    scalars = len(query_start_loc) - 1, len(positions), fill, int(has_rows)
    args = (
        none,
        world.geometry,
        query_start_loc,
        none,
        positions,
        rows,
        arena,
        counts,
        *out.values(),
        *scalars,
    )
    form.run("slot_mapping", args, ONE_BLOCK.with_groups(len(world.groups)))
    return out["slots"]


def one_row(form, group, ids, positions, **options):
    """Slots of one request whose row holds `ids`."""
    world = World([group], 1)
    arena = world.arena(TRAP)
    arena[: len(ids)] = ids
    counts = world.counts(len(ids))
    slots = map_slots(
        form, world, arena, counts, query_start_loc=[0, len(positions)], positions=positions, **options
    )
    return slots[0].tolist()


@st.composite
def steps(draw):
    """One call: what travels in the staging buffer, what lies on the device, and what must come out."""
    world = draw(worlds())
    arena, counts = draw(filled(world))
    num_reqs = draw(st.integers(0, world.max_num_reqs))
    lens = draw(st.lists(st.integers(0, 6), min_size=num_reqs, max_size=num_reqs))
    starts = np.cumsum([0, *lens]).astype(np.int32)
    num_tokens = int(starts[-1])
    max_num_tokens = num_tokens + draw(st.integers(1, 5))
    row_values = st.integers(-1, world.max_num_reqs)
    edges = st.sampled_from([-1, INT32.min, INT32.max, INT64.min, INT64.max, 2**40])
    capacity = max(g.block_size * g.cp[0] * g.width for g in world.groups)
    return {
        "world": replace(world, slot_stride=max_num_tokens),
        "arena": arena,
        "counts": counts,
        "query_start_loc": starts,
        "num_tokens": num_tokens,
        "max_num_tokens": max_num_tokens,
        "num_computed_tokens": np.array(
            draw(st.lists(st.integers(-3, capacity + 3), min_size=num_reqs, max_size=num_reqs)), np.int32
        ),
        "positions": draw(
            st.none()
            | st.lists(st.integers(-2, capacity + 3) | edges, min_size=num_tokens, max_size=num_tokens).map(
                lambda values: np.array(values, np.int64)
            )
        ),
        "rows": draw(
            st.none()
            | st.lists(row_values, min_size=num_reqs, max_size=num_reqs).map(lambda r: np.array(r, np.int32))
        ),
        "staged": draw(st.sets(st.sampled_from(INPUTS))),
        "counted_on_device": draw(st.booleans()),
        "num_tokens_fill": draw(st.integers(0, max_num_tokens)),
        "num_reqs_fill": draw(st.integers(num_reqs, world.max_num_reqs)),
        "slot_dtype": draw(st.sampled_from([np.int64, np.int32])),
    }


def expected_step(step):
    starts, world = step["query_start_loc"], step["world"]
    num_reqs, num_tokens, fill = len(starts) - 1, step["num_tokens"], step["num_tokens_fill"]
    out = outputs(world, step["max_num_tokens"], step["slot_dtype"])
    out["slots"][:, num_tokens:fill] = -1
    out["step_positions"][num_tokens:fill] = out["step_token_reqs"][num_tokens:fill] = 0
    for i in range(num_reqs):
        for t in range(starts[i], starts[i + 1]):
            if step["positions"] is None:
                p = int(step["num_computed_tokens"][i]) + t - int(starts[i])
            else:
                p = int(step["positions"][t])
            out["step_positions"][t], out["step_token_reqs"][t] = p, i
            row = i if step["rows"] is None else int(step["rows"][i])
            for g, group in enumerate(world.groups):
                table = world.table(step["arena"], g)
                out["slots"][g, t] = expected_slot(group, table, step["counts"][g], row, p)
        length = int(step["num_computed_tokens"][i] + starts[i + 1] - starts[i])
        out["step_seq_lens"][i] = length
        out["step_local_seq_lens"][:, i] = [expected_local_length(group, length) for group in world.groups]
    out["step_seq_lens"][num_reqs : step["num_reqs_fill"]] = 0
    out["step_local_seq_lens"][:, num_reqs : step["num_reqs_fill"]] = 0
    out["step_query_start_loc"][: num_reqs + 1] = starts
    out["step_query_start_loc"][num_reqs + 1 : step["num_reqs_fill"] + 1] = starts[-1]
    return out


def run_step(form, step, shape, **given):
    """The fused call: scalars from the header, each input from the staging buffer or the device.

    `given` names output arrays to write instead of fresh ones.
    """
    inputs = {"query_start_loc": step["query_start_loc"], "num_computed_tokens": step["num_computed_tokens"]}
    inputs |= {name: step[name] for name in ("positions", "rows") if step[name] is not None}
    staged = {name.upper(): value for name, value in inputs.items() if name in step["staged"]}
    num_tokens = -step["max_num_tokens"] - 1 if step["counted_on_device"] else step["num_tokens"]
    header = {
        layout.NUM_REQS: len(step["query_start_loc"]) - 1,
        layout.NUM_REQS_FILL: step["num_reqs_fill"],
        layout.NUM_TOKENS: num_tokens,
        layout.NUM_TOKENS_FILL: step["num_tokens_fill"],
        layout.POSITIONS_GIVEN: step["positions"] is not None,
    }
    on_device = [  # exactly as long as they must be, and empty where the step carries them
        np.zeros(0, np.int64 if name == "positions" else np.int32)
        if name not in inputs or name.upper() in staged
        else inputs[name]
        for name in INPUTS
    ]
    has_rows = step["rows"] is not None and "ROWS" not in staged
    out = outputs(step["world"], step["max_num_tokens"], step["slot_dtype"]) | given
    args = (
        staging_buffer(header, **staged),
        step["world"].geometry,
        *on_device,
        step["arena"],
        step["counts"],
    )
    form.run(
        "slot_mapping", (*args, *out.values(), -1, 0, 0, int(has_rows)), shape.with_groups(len(out["slots"]))
    )
    return out


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(step=steps(), shape=launches | narrow_launches)
def test_a_step_is_mapped_by_the_formula(form, step, shape):
    expected = expected_step(step)

    out = run_step(form, step, shape)

    for name in expected:
        np.testing.assert_array_equal(expected[name], out[name], name)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
def test_a_step_of_many_more_tokens_than_threads(form, is_given, slot_dtype):
    """One long prefill among short requests and an empty one, by one block of threads; an odd padding."""
    lens = [0, 1, 1701, 3, 1, 0, 98]
    groups = [Group(6, width=100, cp=(3, 1, 2)), Group(17, width=101), Group(16, width=50, has_slots=False)]
    starts = np.cumsum([0, *lens]).astype(np.int32)
    num_tokens, max_num_tokens = int(starts[-1]), int(starts[-1]) + 7
    world = World(groups, len(lens), slot_stride=max_num_tokens, req_gap=64 - len(lens))
    counts = world.counts()
    for g, group in enumerate(groups):
        counts[g] = np.arange(len(lens)) * group.width // len(lens) + group.width // 8
    step = {
        "world": world,
        "arena": np.arange(1, world.num_elements + 1, dtype=np.int32),
        "counts": counts,
        "query_start_loc": starts,
        "num_tokens": num_tokens,
        "max_num_tokens": max_num_tokens,
        "num_computed_tokens": np.array([5, 900, 0, 40, 3, 0, 700], np.int32),
        "positions": np.arange(num_tokens) * 7 % 1801 if is_given else None,
        "rows": np.array([6, 5, 4, -1, 2, 1, 0], np.int32),
        "staged": {"rows", "positions"},
        "counted_on_device": False,
        "num_tokens_fill": num_tokens + 5,
        "num_reqs_fill": len(lens),
        "slot_dtype": slot_dtype,
    }
    expected = expected_step(step)

    out = run_step(form, step, ONE_BLOCK)

    assert (expected["slots"][:2] >= 0).any(axis=1).all()
    for name in expected:
        np.testing.assert_array_equal(expected[name], out[name], name)


@settings(max_examples=EXAMPLES, deadline=None)
@given(step=steps())
def test_a_separate_call_maps_given_positions_and_pads_the_tail(form, step):
    if step["positions"] is None:
        step["positions"] = np.arange(step["num_tokens"])
    expected = expected_step(step)["slots"][:, : max(step["num_tokens"], step["num_tokens_fill"])]

    inputs = {name: step[name] for name in ("query_start_loc", "positions", "rows", "slot_dtype")}
    slots = map_slots(
        form, step["world"], step["arena"], step["counts"], **inputs, fill=step["num_tokens_fill"]
    )

    np.testing.assert_array_equal(expected, slots)


@settings(max_examples=EXAMPLES, deadline=None)
@given(step=steps(), seed=st.integers(0, 2**32 - 1), shape=launches | narrow_launches)
def test_no_device_input_leads_astray(form, step, seed, shape):
    """Whatever the device arrays hold, a slot is PAD or one of a live block, a token's request is one of the
    batch, a local length is a share of the length, and nothing else is touched.
    """
    rng = np.random.default_rng(seed)
    num_reqs = len(step["query_start_loc"]) - 1
    step |= {
        "query_start_loc": _any_int(rng, np.int32, num_reqs + 1),
        "num_computed_tokens": _any_int(rng, np.int32, num_reqs),
        "rows": _any_int(rng, np.int32, num_reqs),
        "staged": set(),
    }
    if step["positions"] is not None:  # as many as the caller may have announced
        step["positions"] = _any_int(rng, np.int64, step["max_num_tokens"])
    live = [_live_slots(step, g) for g in range(len(step["world"].groups))]

    out = run_step(form, step, shape)

    assert set(out["step_token_reqs"].tolist()) <= {STALE, 0, *range(num_reqs)}
    for g, group in enumerate(step["world"].groups):
        assert set(out["slots"][g].tolist()) <= live[g]
        shares = [expected_local_length(group, length) for length in out["step_seq_lens"][:num_reqs].tolist()]
        assert shares == out["step_local_seq_lens"][g, :num_reqs].tolist()


def test_the_devices_token_count_is_capped(form):
    """A corrected query_start_loc may end anywhere; no more tokens are mapped than were announced."""
    world = World([Group(4, width=2)], 1, slot_stride=8)
    for last, num_tokens in ((2, 2), (5, 5), (6, 5), (INT32.max, 5), (-7, 0)):
        out, none = outputs(world, 8), np.zeros(0, np.int32)
        header = {layout.NUM_REQS: 1, layout.NUM_REQS_FILL: 1, layout.NUM_TOKENS: -5 - 1}
        inputs = np.array([0, last], np.int32), np.array([1], np.int32), none.astype(np.int64), none
        tables = np.array([3, 9], np.int32), world.counts(2)
        args = staging_buffer(header), world.geometry, *inputs, *tables, *out.values(), -1, 0, 0, 0

        form.run("slot_mapping", args, ONE_BLOCK)

        assert out["slots"][0].tolist() == [13, 14, 15, 36, 37][:num_tokens] + [STALE] * (8 - num_tokens)


def _any_int(rng, dtype, size):
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, size, dtype, endpoint=True)
    near = rng.integers(-3, 20, size, dtype)
    return np.where(rng.random(size) < 0.6, near, values)


def _live_slots(step, g):
    group, table = step["world"].groups[g], step["world"].table(step["arena"], g)
    ids = [b for row, count in zip(table, step["counts"][g], strict=True) for b in row[:count].tolist() if b]
    slots = {b * group.block_size + offset for b in ids for offset in range(group.block_size)}
    return slots | {-1, STALE}


class TestReportedFaults:
    """Inputs on which other systems were reported to go wrong, by the report's public number."""

    def test_a_position_past_the_row_reads_no_neighbour(self, form):  # vllm#53982
        world = World([Group(4, width=3)], 2)
        arena, counts = np.array([7, 2, 9, 5, 1, 4], np.int32), world.counts(3)

        slots = map_slots(
            form,
            world,
            arena,
            counts,
            query_start_loc=[0, 6, 8],
            positions=[0, 3, 11, 12, 15, 4_000_000, 0, 12],
        )

        assert slots[0].tolist() == [28, 31, 39, -1, -1, -1, 20, -1]

    def test_a_position_at_the_model_length_is_padding(self, form):  # vllm#16087
        slots = one_row(form, Group(16, width=3, max_model_len=40), [3, 8, 5], range(38, 43))

        assert slots == [86, 87, -1, -1, -1]

    @pytest.mark.parametrize(
        ("ids", "expected"), [([4, 9, 6], [159, 96, 97]), ([4, 9], [159, -1, -1]), ([4, 9, 0], [159, -1, -1])]
    )
    def test_an_unallocated_block_is_padding_not_the_null_block(self, form, ids, expected):  # vllm#50531
        assert one_row(form, Group(16, width=4), ids, [31, 32, 33]) == expected

    def test_a_shorter_step_leaves_no_slot_of_the_longer_one(self, form):  # vllm#36580
        world = World([Group(4, width=3)], 1, slot_stride=12)
        arena, counts = np.array([2, 3, 5], np.int32), world.counts(3)
        out = outputs(world, 12)
        none, rows = np.zeros(0, np.int32), np.zeros(0, np.int32)

        for first, num_tokens, fill in ((0, 10, 12), (10, 2, 12)):
            query_start_loc = np.array([0, num_tokens], np.int32)
            inputs = query_start_loc, none, np.arange(first, first + num_tokens), rows, arena, counts
            form.run(
                "slot_mapping",
                (none, world.geometry, *inputs, *out.values(), 1, num_tokens, fill, 0),
                ONE_BLOCK,
            )

        assert out["slots"][0].tolist() == [22, 23, *[-1] * 10]

    @pytest.mark.parametrize(
        ("rank", "owned"), [(0, {0: 24, 7: 31, 16: 40, 23: 47}), (1, {8: 24, 15: 31, 24: 40, 31: 47})]
    )
    def test_ownership_is_in_manager_blocks(self, form, rank, owned):  # vllm#51031
        group = Group(8, width=2, cp=(2, rank, 8), views=((2, 2),))

        slots = one_row(form, group, [3, 5], range(32))

        assert {p: slots[p] for p in owned} == owned
        assert [p for p in range(32) if slots[p] != -1] == [p for p in range(32) if p // 8 % 2 == rank]

    def test_the_slot_counts_in_the_managers_block_size(self, form):  # vllm#27547
        assert one_row(form, Group(32, width=2, views=((2, 2),)), [1, 4], [40]) == [136]

    @pytest.mark.parametrize(
        ("rank", "expected"), [(0, [20, 21, -1, -1, 22, 23, -1, -1]), (1, [-1, -1, 20, 21, -1, -1, 22, 23])]
    )
    def test_chunks_of_tokens_go_round_the_ranks(self, form, rank, expected):  # vllm#26696
        assert one_row(form, Group(4, width=1, cp=(2, rank, 2)), [5], range(8)) == expected

    def test_a_block_size_that_is_no_power_of_two_goes_round_three_ranks(self, form):  # vllm#26696
        slots = one_row(form, Group(6, width=2, cp=(3, 0, 2)), [5, 2], range(20))

        owned = {0: 30, 1: 31, 6: 32, 7: 33, 12: 34, 13: 35, 18: 12, 19: 13}
        assert {p: slot for p, slot in enumerate(slots) if slot != -1} == owned

    def test_a_replicated_group_keeps_every_token(self, form):  # vllm#57260
        world = World([Group(4, width=2, cp=(2, 1, 1)), Group(4, width=2)], 1)
        arena, counts = np.array([6, 9, 6, 9], np.int32), world.counts(2)

        slots = map_slots(form, world, arena, counts, query_start_loc=[0, 8], positions=range(8))

        assert slots.tolist() == [[-1, 24, -1, 25, -1, 26, -1, 27], [24, 25, 26, 27, 36, 37, 38, 39]]

    @pytest.mark.parametrize(
        ("block_size", "block_id", "offset", "expected"),
        [(16, 2**27, 0, 2**31), (16, 2**27 + 3, 0, 2**31 + 48), (256, 2**31 - 1, 255, 2**39 - 1)],
    )
    def test_slots_have_64_bits(self, form, block_size, block_id, offset, expected):  # vllm#1486
        assert one_row(form, Group(block_size, width=1), [block_id], [offset]) == [expected]

    def test_rows_lie_64_bits_apart(self, form):  # vllm#57030
        """Row 20,000 of a table 131,072 wide starts past 2**31; the offset of the table takes it back."""
        row, width = 20_000, 131_072
        world = World([Group(16, width=width)], row + 1)
        world.geometry[0, layout.TABLE_OFFSET] = -row * width
        counts = world.counts()
        counts[0, row] = 2
        geometry = world.geometry.copy()
        out, none = outputs(world, 1), np.zeros(0, np.int32)
        inputs = np.array([0, 1], np.int32), none, np.array([17]), np.array([row], np.int32)

        form.run(
            "slot_mapping",
            (none, geometry, *inputs, np.array([7, 5], np.int32), counts, *out.values(), 1, 1, 1, 1),
            ONE_BLOCK,
        )

        assert out["slots"].tolist() == [[5 * 16 + 1]]


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_every_position_has_one_owner_and_each_owner_its_own_slots(form, interleave):
    """Blocks of 16 tokens over two ranks: a row [7, 3, 9] covers positions 0 to 95."""
    ranks = [one_row(form, Group(16, width=3, cp=(2, r, interleave)), [7, 3, 9], range(97)) for r in (0, 1)]

    for p in range(96):
        assert sum(slots[p] != -1 for slots in ranks) == 1
    for slots in ranks:
        local = [slot for slot in slots if slot != -1]
        assert sorted(local) == sorted(b * 16 + offset for b in (7, 3, 9) for offset in range(16))
        assert slots[96] == -1


def test_the_worked_table_of_two_ranks(form):
    """Row [7, 3, 9], blocks of 16, two ranks: what a position maps to, by interleave and rank."""
    positions = [0, 1, 3, 4, 8, 16, 31, 32, 33, 36, 63, 64]
    expected = {
        (1, 0): [112, -1, -1, 114, 116, 120, -1, 48, -1, 50, -1, 144],
        (1, 1): [-1, 112, 113, -1, -1, -1, 127, -1, 48, -1, 63, -1],
        (4, 0): [112, 113, 115, -1, 116, 120, -1, 48, 49, -1, -1, 144],
        (4, 1): [-1, -1, -1, 112, -1, -1, 127, -1, -1, 48, 63, -1],
        (16, 0): [112, 113, 115, 116, 120, -1, -1, 48, 49, 52, -1, 144],
        (16, 1): [-1, -1, -1, -1, -1, 112, 127, -1, -1, -1, 63, -1],
    }

    for (interleave, rank), slots in expected.items():
        assert slots == one_row(form, Group(16, width=3, cp=(2, rank, interleave)), [7, 3, 9], positions)


def test_a_dummy_row_and_repeated_rows(form):
    world = World([Group(4, width=2)], 3)
    arena, counts = np.array([TRAP, TRAP, 8, 9, TRAP, TRAP], np.int32), np.array([[0, 2, 0]], np.int32)

    slots = map_slots(
        form,
        world,
        arena,
        counts,
        query_start_loc=[0, 2, 4, 5, 6, 7],
        positions=[0, 1, 3, 4, 3, 0, 0],
        rows=[-1, 1, 1, 2, 3],
    )

    assert slots[0].tolist() == [-1, -1, 35, 36, 35, -1, -1]
