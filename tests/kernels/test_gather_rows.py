"""gather_rows against what a batch table must show afterwards, over its whole width."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.kernels import _layout as layout

from .forms import EXAMPLES
from .world import ONE_BLOCK, STALE, Group, World, filled, launches, narrow_launches, staging_buffer, worlds


def shown(world, g, arena, counts, row, num_computed_tokens):
    """What a position must show of a row: (its columns over the whole width, its count, its dead columns)."""
    group = world.groups[g]
    if row < 0:
        return [0] * group.width, 0, 0
    count, dead = int(counts[g, row]), 0
    if group.window is not None:
        first_seen = max(num_computed_tokens - (group.window - 1), 0)
        while dead < count and (dead + 1) * group.block_size * group.cp[0] <= first_seen:
            dead += 1
    ids = world.table(arena, g)[row].tolist()
    return [ids[c] if dead <= c < count else 0 for c in range(group.width)], count, dead


class Batch:
    """The batch-ordered arrays, NULL everywhere at first."""

    def __init__(self, world):
        self.world = world
        self.arrays = {
            "batch_tables": world.arena(),
            "batch_num_blocks": world.counts(),
            "batch_first_live": world.counts(),
            "kernel_tables": world.kernel_arena(0),
        }

    def show(self, i, g, columns, count, dead):
        self.world.table(self.arrays["batch_tables"], g)[i] = columns
        self.arrays["batch_num_blocks"][g, i] = count
        self.arrays["batch_first_live"][g, i] = dead
        for v, (ratio, stride) in enumerate(self.world.groups[g].views):
            blocks = [b * stride + j if b else 0 for b in columns for j in range(ratio)]
            self.world.kernel_table(self.arrays["kernel_tables"], g, v)[i] = blocks


@st.composite
def scenes(draw):
    """A world, its rows, what the batch shows already, and the next step's words."""
    world = draw(worlds())
    arena, counts = draw(filled(world, past_count=0))
    rows = st.integers(-1, world.max_num_reqs - 1)
    tokens = st.integers(0, 120)
    before = Batch(world)
    words, computed = [], []
    num_positions = draw(st.integers(0, world.max_num_reqs))
    num_reqs = draw(st.integers(0, num_positions))
    for i in range(num_positions):
        row = draw(rows)
        keeps = row >= 0 and i < num_reqs and draw(st.booleans())
        earlier = row if keeps else draw(rows)
        p = draw(tokens)
        for g in range(len(world.groups)):
            before.show(i, g, *shown(world, g, arena, counts, earlier, p))
        words.append(layout.KEEP - row if keeps else row)
        computed.append(draw(tokens))
    return {
        "world": world,
        "arena": arena,
        "counts": counts,
        "before": before,
        "words": words,
        "num_reqs": num_reqs,
        "num_computed_tokens": np.array(computed[:num_reqs], np.int32),
        "staged": draw(st.booleans()),
    }


def run(form, scene, shape=ONE_BLOCK):
    world, computed = scene["world"], scene["num_computed_tokens"]
    header = {layout.NUM_REQS: scene["num_reqs"], layout.NUM_GATHER: len(scene["words"])}
    sections = {"GATHER": np.array(scene["words"], np.int32)}
    if scene["staged"]:
        sections["NUM_COMPUTED_TOKENS"], computed = computed, np.zeros(0, np.int32)
    form.run(
        "gather_rows",
        (
            staging_buffer(header, **sections),
            world.geometry,
            world.views,
            computed,
            scene["arena"],
            scene["counts"],
            *scene["before"].arrays.values(),
        ),
        shape.with_groups(len(world.groups)),
    )
    return scene["before"].arrays


def row_of(word):
    return layout.KEEP - word if word <= layout.KEEP else word


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(scene=scenes(), shape=launches | narrow_launches)
def test_the_batch_shows_each_rows_live_columns_and_null_elsewhere(form, scene, shape):
    world, expected = scene["world"], Batch(scene["world"])
    for i, word in enumerate(scene["words"]):
        p = int(scene["num_computed_tokens"][i]) if i < scene["num_reqs"] else 0
        for g in range(len(world.groups)):
            expected.show(i, g, *shown(world, g, scene["arena"], scene["counts"], row_of(word), p))

    arrays = run(form, scene, shape)

    for name in expected.arrays:
        np.testing.assert_array_equal(expected.arrays[name], arrays[name], name)


@settings(max_examples=EXAMPLES, deadline=None)
@given(scene=scenes(), seed=st.integers(0, 2**32 - 1))
def test_any_position_from_the_device_nulls_at_most_the_row(form, scene, seed):
    """Tokens counts corrected on the device may be anything; columns past the count are never read."""
    rng = np.random.default_rng(seed)
    scene["staged"] = False
    scene["num_computed_tokens"] = rng.integers(-(2**31), 2**31, scene["num_reqs"], np.int32)
    world = scene["world"]
    for g, group in enumerate(world.groups):
        for row in range(world.max_num_reqs):
            world.table(scene["arena"], g)[row, scene["counts"][g, row] : group.width] = STALE

    arrays = run(form, scene)

    assert STALE not in arrays["batch_tables"]
    assert (arrays["batch_first_live"] <= arrays["batch_num_blocks"]).all()
    for i, word in enumerate(scene["words"]):
        count = scene["counts"][:, row_of(word)] if row_of(word) >= 0 else 0
        np.testing.assert_array_equal(arrays["batch_num_blocks"][:, i], count)


def window_scene(word, num_computed_tokens, before_dead, shown_before):
    """One request, blocks of 16, window 32: row 0 holds four blocks, the batch shows `shown_before`."""
    world = World([Group(16, width=6, window=32)], 1)
    batch = Batch(world)
    batch.show(0, 0, shown_before, 4, before_dead)
    return {
        "world": world,
        "arena": np.array([5, 6, 7, 8, STALE, STALE], np.int32),
        "counts": np.array([[4]], np.int32),
        "before": batch,
        "words": [word],
        "num_reqs": 1,
        "num_computed_tokens": np.array([num_computed_tokens], np.int32),
        "staged": True,
    }


def test_a_position_that_keeps_its_row_is_not_touched_without_a_window(form):
    scene = window_scene(layout.KEEP, 40, 0, [STALE] * 6)
    scene["world"].geometry[0, layout.WINDOW_REACH] = -1

    assert run(form, scene)["batch_tables"].tolist() == [STALE] * 6


def test_the_window_nulls_only_the_columns_that_it_left_since(form):
    """Of tokens 47 - 31 = 16 onwards everything is seen: column 0 is dead, and nothing else is written."""
    arrays = run(form, window_scene(layout.KEEP, 47, 0, [STALE] * 6))

    assert arrays["batch_tables"].tolist() == [0, *[STALE] * 5]
    assert arrays["batch_first_live"].tolist() == [[1]]


def test_columns_that_were_dead_already_are_not_written_again(form):
    arrays = run(form, window_scene(layout.KEEP, 63, 1, [STALE] * 6))

    assert arrays["batch_tables"].tolist() == [STALE, 0, *[STALE] * 4]
    assert arrays["batch_first_live"].tolist() == [[2]]


def test_columns_come_back_when_the_position_goes_back(form):
    arrays = run(form, window_scene(layout.KEEP, 20, 2, [0, 0, STALE, STALE, STALE, STALE]))

    assert arrays["batch_tables"].tolist() == [5, 6, STALE, STALE, STALE, STALE]
    assert arrays["batch_first_live"].tolist() == [[0]]


def test_the_window_reaches_further_over_ranks(form):
    """A column of a group sharded over two ranks spans 32 tokens: column 0 is live at 62 and dead at 63."""
    for p, dead in ((62, 0), (63, 1)):
        scene = window_scene(0, p, 0, [0] * 6)
        scene["world"].geometry[0, layout.CP_WORLD] = 2

        assert run(form, scene)["batch_first_live"].tolist() == [[dead]]


def test_padding_becomes_null_up_to_the_previous_count(form):
    arrays = run(form, window_scene(-1, 0, 0, [5, 6, 7, 8, STALE, STALE]))

    assert arrays["batch_tables"].tolist() == [0, 0, 0, 0, STALE, STALE]
    assert arrays["batch_num_blocks"].tolist() == [[0]]


def test_one_row_may_show_at_several_positions(form):
    world = World([Group(16, width=3, views=((2, 2),))], 5)
    arena, counts = world.arena(), world.counts()
    world.table(arena, 0)[3, :2] = [4, 9]
    counts[0, 3] = 2
    scene = {"world": world, "arena": arena, "counts": counts, "before": Batch(world), "staged": True}
    scene |= {"words": [3, -1, 3, 3, 0], "num_reqs": 5, "num_computed_tokens": np.zeros(5, np.int32)}

    arrays = run(form, scene)

    shown_rows = world.table(arrays["batch_tables"], 0).tolist()
    assert shown_rows == [[4, 9, 0], [0, 0, 0], [4, 9, 0], [4, 9, 0], [0, 0, 0]]
    assert world.kernel_table(arrays["kernel_tables"], 0, 0)[2].tolist() == [8, 9, 18, 19, 0, 0]
