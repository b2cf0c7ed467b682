"""state_indices against the columns' definitions, request by request."""

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

INT32 = np.iinfo(np.int32)


def states_of(kinds, max_num_reqs, gap=0):
    """The states array of (group, by_position, drafts), and the size of the arena of their indices."""
    rows, end = [], 0
    for group, by_position, drafts in kinds:
        rows.append([group, by_position, drafts, end + gap])
        end += gap + max_num_reqs * (1 + drafts)
    return np.array(rows, np.int64).reshape(-1, layout.STATE_WORDS), end


def outputs(states, num_elements, req_stride):
    return {
        "indices": np.full(num_elements, STALE, np.int32),
        "initial_indices": np.full((len(states), req_stride), STALE, np.int32),
        "columns": np.full((len(states), 3, req_stride), STALE, np.int32),
    }


def columns_of(size, by_position, computed, length):
    """(last computed, first scheduled, last scheduled) of one request, as the contract words it."""
    if not by_position:
        return (0 if computed > 0 else -1), 0, 0
    return (
        (computed - 1) // size if computed > 0 else -1,
        max(computed, 0) // size,
        max((length - 1) // size, 0),
    )


def block_of(table, counts, i, column):
    in_row = 0 <= column < min(int(counts[i]), table.shape[1])
    return int(table[i, column]) if in_row else 0


def expected(step):
    world, states, out = step["world"], step["states"], step["before"]
    out = {name: array.copy() for name, array in out.items()}
    for s, (g, by_position, drafts, offset) in enumerate(states.tolist()):
        table, counts = world.table(step["arena"], g), step["counts"][g]
        written = out["indices"][offset : offset + world.max_num_reqs * (1 + drafts)].reshape(-1, 1 + drafts)
        for i in range(max(step["num_reqs"], step["num_reqs_fill"])):
            written[i], out["initial_indices"][s, i], out["columns"][s, :, i] = 0, 0, (-1, 0, 0)
            if i >= step["num_reqs"]:
                continue
            tokens = int(step["num_computed_tokens"][i]), int(step["seq_lens"][i])
            before, first, last = columns_of(world.groups[g].block_size, by_position, *tokens)
            out["columns"][s, :, i] = before, first, last
            out["initial_indices"][s, i] = block_of(table, counts, i, before)
            written[i] = [block_of(table, counts, i, last + j) for j in range(1 + drafts)]
    return out


def run(form, step, shape=ONE_BLOCK):
    header = {layout.NUM_REQS: step["num_reqs"], layout.NUM_REQS_FILL: step["num_reqs_fill"]}
    sections, computed = {}, step["num_computed_tokens"]
    if step["staged"]:
        sections["NUM_COMPUTED_TOKENS"], computed = computed, np.zeros(0, np.int32)
    args = (
        staging_buffer(header, **sections),
        step["world"].geometry,
        step["states"],
        computed,
        step["seq_lens"],
        step["arena"],
        step["counts"],
    )
    out = {name: array.copy() for name, array in step["before"].items()}
    form.run("state_indices", (*args, *out.values()), shape.with_groups(len(step["states"])))
    return out


@st.composite
def steps(draw):
    """Some groups of a world hold states; tokens are anything that the device may say."""
    world = draw(worlds())
    arena, counts = draw(filled(world))
    kind = st.tuples(st.booleans(), st.integers(0, 3))
    groups = draw(st.sets(st.integers(0, len(world.groups) - 1), min_size=1))
    kinds = [(g, *draw(kind)) for g in sorted(groups)]
    states, num_elements = states_of(kinds, world.max_num_reqs, gap=draw(st.integers(0, 3)))
    num_reqs = draw(st.integers(0, world.max_num_reqs))
    capacity = max(group.block_size * group.width for group in world.groups)
    tokens = st.integers(-3, capacity + 3) | st.sampled_from([INT32.min, -1, 0, 1, INT32.max])
    return {
        "world": world,
        "arena": arena,
        "counts": counts,
        "states": states,
        "before": outputs(states, num_elements, world.req_stride),
        "num_reqs": num_reqs,
        "num_reqs_fill": draw(st.integers(0, world.max_num_reqs)),
        "num_computed_tokens": np.array([draw(tokens) for _ in range(num_reqs)], np.int32),
        "seq_lens": np.array([draw(tokens) for _ in range(num_reqs)], np.int32),
        "staged": num_reqs == 0 or draw(st.booleans()),
    }


def one_request(group, ids, computed, length, *, drafts=0, by_position=True):
    """A step of one request whose row holds `ids`."""
    world = World([group], 1)
    arena = world.arena(TRAP)
    arena[: len(ids)] = ids
    states, num_elements = states_of([(0, by_position, drafts)], 1)
    return {
        "world": world,
        "arena": arena,
        "counts": world.counts(len(ids)),
        "states": states,
        "before": outputs(states, num_elements, 1),
        "num_reqs": 1,
        "num_reqs_fill": 1,
        "num_computed_tokens": np.array([computed], np.int32),
        "seq_lens": np.array([length], np.int32),
        "staged": True,
    }


@settings(max_examples=3 * EXAMPLES, deadline=None)
@given(step=steps(), shape=launches | narrow_launches)
def test_states_are_where_the_definition_says(form, step, shape):
    """Nothing else is touched, and nothing past a row's count is read: a TRAP lies there."""
    out = run(form, step, shape)

    for name, array in expected(step).items():
        np.testing.assert_array_equal(array, out[name], name)
    assert TRAP not in out["indices"]
    assert TRAP not in out["initial_indices"]


@pytest.mark.parametrize(
    ("length", "first"), [(0, 0), (1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2)]
)
@pytest.mark.parametrize("drafts", [0, 2])
def test_the_written_states_follow_the_last_token(form, length, first, drafts):
    """Blocks of 16 and a row [100, 101, ...]: of 17 to 32 tokens the state is in column 1."""
    step = one_request(Group(16, width=6), range(100, 106), 0, length, drafts=drafts)

    assert run(form, step)["indices"].tolist() == [100 + first + j for j in range(1 + drafts)]


def test_a_running_state_stays_in_column_0(form):
    step = one_request(Group(16, width=3), [7, 8, 9], 100, 101, drafts=2, by_position=False)

    out = run(form, step)

    assert out["indices"].tolist() == [7, 8, 9]
    assert out["initial_indices"].tolist() == [[7]]
    assert out["columns"].ravel().tolist() == [0, 0, 0]


def test_a_row_shorter_than_the_drafts_ends_in_null(form):
    step = one_request(Group(4, width=5), [7, 8], 5, 6, drafts=3)

    assert run(form, step)["indices"].tolist() == [8, 0, 0, 0]


def test_a_row_shorter_than_its_tokens_has_no_state(form):
    out = run(form, one_request(Group(4, width=3), [7, 8], 9, 12, drafts=1))

    assert out["indices"].tolist() == [0, 0]
    assert out["initial_indices"].tolist() == [[0]]
    assert out["columns"].ravel().tolist() == [2, 2, 2]


def test_a_count_past_the_width_reads_no_neighbour(form):
    step = one_request(Group(4, width=2), [7, 8], 9, 10, drafts=2)
    step["counts"][:] = 99

    out = run(form, step)

    assert out["indices"].tolist() == [0, 0, 0]
    assert out["initial_indices"].tolist() == [[0]]


def test_a_null_block_is_handed_out_as_it_is(form):
    out = run(form, one_request(Group(4, width=3), [0, 0, 6], 8, 9))

    assert out["initial_indices"].tolist() == [[0]]
    assert out["indices"].tolist() == [6]


def test_rows_lie_64_bits_apart(form):
    """Row 2,048 of a table 2**20 wide starts at 2**31; the offset of the table takes it back."""
    row, width = 2048, 2**20
    world = World([Group(16, width=width)], row + 1)
    world.geometry[0, layout.TABLE_OFFSET] = -row * width
    states, num_elements = states_of([(0, True, 1)], row + 1)
    step = {
        "world": world,
        "arena": np.array([7, 5, 6], np.int32),
        "counts": world.counts(),
        "states": states,
        "before": outputs(states, num_elements, row + 1),
        "num_reqs": row + 1,
        "num_reqs_fill": 0,
        "num_computed_tokens": np.full(row + 1, 16, np.int32),
        "seq_lens": np.full(row + 1, 17, np.int32),
        "staged": False,
    }
    step["counts"][0, row] = 3

    out = run(form, step)

    assert out["indices"][-2:].tolist() == [5, 6]
    assert out["initial_indices"][0, -1] == 7
    assert not out["indices"][:-2].any()


class TestReportedFaults:
    """Inputs on which other systems were reported to go wrong, by the report's public number."""

    @pytest.mark.parametrize(
        ("size", "other", "computed", "column"), [(2176, 128, 100_096, 45), (64, 16, 130, 2), (64, 16, 0, -1)]
    )
    def test_the_column_counts_in_the_state_groups_blocks(  # vllm#53142
        self, form, size, other, computed, column
    ):
        width = 50
        world = World([Group(other, width=width), Group(size, width=width)], 1)
        states, num_elements = states_of([(1, True, 0)], 1)
        step = one_request(Group(1, width=1), [], computed, computed + 1) | {
            "world": world,
            "arena": np.arange(1, world.num_elements + 1, dtype=np.int32),
            "counts": world.counts(width),
            "states": states,
            "before": outputs(states, num_elements, 1),
        }

        out = run(form, step)

        assert out["columns"][0, 0].tolist() == [column]
        assert out["initial_indices"].tolist() == [[width + column + 1 if column >= 0 else 0]]

    def test_padding_is_the_null_block_and_keeps_nothing(self, form):  # vllm#35431
        """Six rows, then three of eight padded: no row of the padding keeps an index."""
        world = World([Group(4, width=4)], 8)
        arena = np.arange(1, world.num_elements + 1, dtype=np.int32)
        states, num_elements = states_of([(0, True, 0)], 8)
        step = {"world": world, "arena": arena, "counts": world.counts(4), "states": states, "staged": True}
        step["before"] = outputs(states, num_elements, 8)

        for num_reqs, fill in ((6, 8), (3, 8)):
            tokens = np.full(num_reqs, 5, np.int32)
            step |= {"num_reqs": num_reqs, "num_reqs_fill": fill}
            step |= {"num_computed_tokens": tokens, "seq_lens": tokens}
            step["before"] = run(form, step)

        assert step["before"]["indices"].tolist() == [2, 6, 10, 0, 0, 0, 0, 0]
        assert step["before"]["columns"][0].T.tolist() == [[1, 1, 1]] * 3 + [[-1, 0, 0]] * 5
