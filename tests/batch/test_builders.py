"""MetadataBuilders: built once where groups agree, and never from what belongs to something else."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import FullAttentionSpec, KernelView, KVCacheGroupSpec
from pagedkv.batch.builders import MetadataBuilders

from .fake_builders import Builder, Recorder, Updating, padded, step_of

PLAIN = KVCacheGroupSpec(16)
VIEWED = KVCacheGroupSpec(32, (16, 8))
KINDS = (Builder, Updating)


def two_equal_groups(factory, num_ubatches=1, **options):
    """Builders of two KV-cache groups of one spec."""
    builders = MetadataBuilders([PLAIN, PLAIN], num_ubatches)
    for group in (0, 1):
        builders.register(group, factory, **options)
    return builders


def calls_of(factory):
    """Drain what each builder has been asked for, but for the flag of a capture."""
    names = [[name for name, _ in builder.calls] for builder in factory.made]
    for builder in factory.made:
        builder.calls.clear()
    return names


def assert_is_of(built, common, view, setup):
    """An object, and a graph captured with its buffers, reads its own group, view, batch and set-up."""
    table = common.block_table_tensor if view is None else common.kernel_block_table(view)
    assert built.table is table
    assert built.slots is common.slot_mapping
    assert built.reads() == ((setup, view), padded(common.seq_lens), padded(table))


# --- any mixture of groups, set-ups, views and micro-batches -----------------------------------------


@dataclass(frozen=True)
class Layers:
    """An attention group as drawn."""

    group: int
    kind: type
    setup: int
    view: int | None


@st.composite
def layouts(draw):
    specs = draw(st.lists(st.sampled_from([PLAIN, VIEWED]), min_size=1, max_size=4))
    layers = []
    for group in draw(st.lists(st.integers(0, len(specs) - 1), max_size=6)):
        view = draw(st.sampled_from([None, *range(len(specs[group].kernel_views))]))
        layers.append(Layers(group, draw(st.sampled_from(KINDS)), draw(st.integers(0, 1)), view))
    return specs, layers


@given(layouts(), st.integers(1, 3), st.data())
def test_graphs_and_runs_read_what_is_theirs(layout, num_ubatches, data):
    """A capture, then real and dummy steps, split or not: what was captured reads each one's values."""
    specs, layers = layout
    builders = MetadataBuilders(specs, num_ubatches)
    for number, at in enumerate(layers):
        factory, key = Recorder(at.kind, at.setup), (at.kind, at.setup)
        assert builders.register(at.group, factory, key=key, view=at.view) == number

    def steps(first_id, lengths):
        return [step_of(specs, lengths, first_id + 1000 * u, u) for u in range(num_ubatches)]

    captured = builders.build(steps(1, [7, 7, 7]), for_capture=True)
    for turn in range(2, data.draw(st.integers(2, 5))):
        dummy = data.draw(st.booleans())
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=not dummy, max_size=5))
        step = steps(turn * 100, [0] * len(lengths) if dummy else lengths)
        step = step[: data.draw(st.integers(0, num_ubatches))]
        one = len(step) == 1 and data.draw(st.booleans())

        built = builders.build(step[0] if one else step, for_capture=dummy)

        assert [len(of_ubatch) for of_ubatch in built] == [len(layers)] * len(step)
        for part, of_ubatch, graphs in zip(step, built, captured, strict=False):
            for at, now, graph in zip(layers, of_ubatch, graphs, strict=True):
                common = part.groups[at.group]
                assert_is_of(now, common, at.view, at.setup)
                assert graph.reads() == now.reads()


# --- built once, updated where groups agree ----------------------------------------------------------


def test_equal_groups_are_built_once_and_updated_with_their_own_table_and_slots():
    factory = Recorder()
    builders = two_equal_groups(factory)
    step = step_of(builders.specs, [3, 4], 10)

    [(first, second)] = builders.build(step)

    assert calls_of(factory) == [["build"], ["update"]]
    assert (first.table.tolist(), second.table.tolist()) == ([10, 11], [12, 13])
    assert (first.slots.tolist(), second.slots.tolist()) == ([1000, 1100], [1200, 1300])
    assert second.lengths is first.lengths


def test_each_step_builds_anew():
    factory = Recorder()
    builders = two_equal_groups(factory)
    builders.build(step_of(builders.specs, [3, 4], 10))
    calls_of(factory)

    [(first, second)] = builders.build(step_of(builders.specs, [5], 20))

    assert calls_of(factory) == [["build"], ["update"]]
    assert (first.table.tolist(), second.table.tolist()) == ([20], [21])
    assert first.reads()[1] == second.reads()[1] == padded([5])


def test_builders_without_updates_are_built_for_every_group_and_micro_batch():
    factory = Recorder(Builder)
    builders = two_equal_groups(factory, 2)
    steps = [step_of(builders.specs, [3 + u], 10 * (u + 1), u) for u in (0, 1)]

    for _ in range(2):
        built = builders.build(steps)

    assert calls_of(factory) == [["build", "build"]] * 4
    assert len({id(one.lengths) for of_ubatch in built for one in of_ubatch}) == 4


def test_groups_of_unequal_specs_are_both_built():
    factory = Recorder()
    builders = MetadataBuilders([PLAIN, KVCacheGroupSpec(16, sliding_window=64)])
    for group in (0, 1):
        builders.register(group, factory)

    builders.build(step_of(builders.specs, [3], 10))

    assert calls_of(factory) == [["build"], ["build"]]


def test_the_factory_is_the_key_where_none_is_given():
    factories = Recorder(), Recorder()
    builders = MetadataBuilders([PLAIN] * 3)
    for group, factory in enumerate([factories[0], factories[1], factories[0]]):
        builders.register(group, factory)

    builders.build(step_of(builders.specs, [3], 10))

    assert [calls_of(factory) for factory in factories] == [[["build"], ["update"]], [["build"]]]


def test_a_key_makes_the_builders_of_several_factories_one_kind():
    factories = Recorder(), Recorder()
    builders = MetadataBuilders([PLAIN] * 2)
    for group, factory in enumerate(factories):
        builders.register(group, factory, key=("flash", 32))

    builders.build(step_of(builders.specs, [3], 10))

    assert [calls_of(factory) for factory in factories] == [[["build"]], [["update"]]]


def test_an_earlier_group_is_unchanged_by_the_update_of_a_later_one():
    builders = two_equal_groups(Recorder())
    step = step_of(builders.specs, [3, 4], 10)
    alone = MetadataBuilders(builders.specs)
    alone.register(0, Recorder())

    [(first, _)] = builders.build(step)
    [(expected,)] = alone.build(step)

    assert first.reads() == expected.reads()
    assert first.table is expected.table
    assert first.slots is expected.slots


def test_an_update_in_place_is_refused():
    class InPlace(Updating):
        def update_block_table(self, built, block_table, slot_mapping):
            for name, value in (("table", block_table), ("slots", slot_mapping)):
                object.__setattr__(built, name, value)
            return built

    builders = two_equal_groups(InPlace)

    with pytest.raises(ValueError, match="update_block_table must return a new object, got the one that"):
        builders.build(step_of(builders.specs, [3], 10))


# --- what must not be shared -------------------------------------------------------------------------


def test_a_micro_batch_is_not_updated_from_another():
    """The second micro-batch of the first group has lengths of its own to build."""
    factory = Recorder()
    builders = two_equal_groups(factory, 2)
    steps = [step_of(builders.specs, lengths, 10 + u, u) for u, lengths in enumerate([[3, 4], [9]])]

    built = builders.build(steps)

    assert calls_of(factory) == [["build"], ["build"], ["update"], ["update"]]
    assert [[one.reads()[1] for one in of_ubatch] for of_ubatch in built] == [
        [padded([3, 4])] * 2,
        [padded([9])] * 2,
    ]


def test_a_micro_batch_may_be_built_alone_and_leaves_the_others_buffers():
    builders = two_equal_groups(Recorder(), 2)
    [zeroth] = builders.build(step_of(builders.specs, [3, 4], 10))

    [first] = builders.build(step_of(builders.specs, [9], 20, ubatch=1))

    assert [one.reads()[1] for one in (*zeroth, *first)] == [padded([3, 4])] * 2 + [padded([9])] * 2


def test_builders_of_one_spec_but_other_query_heads_are_both_built():
    """A target and a draft model over equal groups: the schedule depends on the heads."""
    target, draft = Recorder(setup=32), Recorder(setup=8)
    builders = MetadataBuilders([PLAIN, PLAIN])
    builders.register(0, target, key=("flash", 32))
    builders.register(1, draft, key=("flash", 8))

    [(of_target, of_draft)] = builders.build(step_of(builders.specs, [3], 10))

    assert (calls_of(target), calls_of(draft)) == ([["build"]], [["build"]])
    assert (of_target.setup, of_draft.setup) == ((32, None), (8, None))


def test_attention_groups_of_one_kv_cache_group_read_their_own_view():
    factory = Recorder()
    builders = MetadataBuilders([VIEWED, VIEWED])
    places = [(0, None), (0, 1), (0, 0), (1, 1)]
    for group, view in places:
        builders.register(group, factory, view=view)
    step = step_of(builders.specs, [3, 4], 10)

    [built] = builders.build(step)

    assert calls_of(factory) == [["build"], ["build"], ["build"], ["update"]]
    assert [builder.given for builder in factory.made] == [(VIEWED, view, 0) for _, view in places]
    for one, (group, view) in zip(built, places, strict=True):
        assert_is_of(one, step.groups[group], view, None)
    assert step.groups[0].block_table_tensor.tolist() == [10, 11]  # the step itself is as it was


# --- capture and run time ----------------------------------------------------------------------------


def test_a_capture_takes_the_same_way_as_a_run():
    factories = Recorder(), Recorder(Builder)
    builders = MetadataBuilders([PLAIN] * 4, 2)
    for group in range(4):
        builders.register(group, factories[group // 2])
    steps = [step_of(builders.specs, [3], 10, u) for u in (0, 1)]

    def build(*, for_capture):
        builders.build(steps, for_capture=for_capture)
        flags = [flag for factory in factories for builder in factory.made for _, flag in builder.calls]
        assert flags == [for_capture] * 8
        return [calls_of(factory) for factory in factories]

    assert build(for_capture=True) == build(for_capture=False)


def test_a_later_groups_graph_reads_buffers_that_runs_write():
    """It was captured with the first group's lengths; its own builder's are never written at run time."""
    builders = two_equal_groups(Recorder())
    [graphs] = builders.build(step_of(builders.specs, [7, 7], 10), for_capture=True)

    builders.build(step_of(builders.specs, [3, 4], 20))

    assert [graph.reads()[1:] for graph in graphs] == [
        (padded([3, 4]), padded([20, 21])),
        (padded([3, 4]), padded([22, 23])),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dummy_run_leaves_no_block_of_the_last_batch_in_a_captured_buffer(kind):
    """Replaying a full graph on dummy tables, all NULL: every group's indices are written again."""
    builders = two_equal_groups(Recorder(kind), 2)
    dummies = [step_of(builders.specs, [0, 0], 0, u) for u in (0, 1)]
    for dummy in dummies:
        for common in dummy.groups:
            common.block_table_tensor[:] = 0
    graphs = builders.build(dummies, for_capture=True)
    builders.build([step_of(builders.specs, [3, 4], 20 + u, u) for u in (0, 1)])

    builders.build(dummies, for_capture=True)

    assert [graph.reads()[1:] for of_ubatch in graphs for graph in of_ubatch] == [
        (padded([]), padded([]))
    ] * 4


def test_registering_more_changes_nothing_for_what_was_captured():
    factory = Recorder()
    builders = two_equal_groups(factory)
    [graphs] = builders.build(step_of(builders.specs, [7], 10), for_capture=True)
    calls_of(factory)
    builders.register(0, factory)

    [built] = builders.build(step_of(builders.specs, [3], 20))

    assert calls_of(factory) == [["build"], ["update"], ["update"]]
    assert [graph.reads() for graph in graphs] == [one.reads() for one in built[:2]]


# --- refusals ----------------------------------------------------------------------------------------


def test_without_attention_groups_or_micro_batches_nothing_is_built():
    assert MetadataBuilders([PLAIN]).build(step_of([PLAIN], [3], 10)) == [()]
    assert MetadataBuilders([]).build(step_of([], [3], 10)) == [()]
    assert MetadataBuilders([PLAIN]).build([]) == []


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((2, Recorder()), {}, ValueError, r"group must lie in \[0, 1\], got 2"),
        ((-1, Recorder()), {}, ValueError, r"group must lie in \[0, 1\], got -1"),
        ((None, Recorder()), {}, TypeError, "group must be an int, got NoneType"),
        ((0, Recorder()), {"view": 0}, ValueError, "group 0 has no kernel views, got view 0"),
        ((1, Recorder()), {"view": 2}, ValueError, r"view must lie in \[0, 1\], got 2"),
        ((1, Recorder()), {"view": "fp8"}, TypeError, "view must be an int, got str"),
        ((0, Recorder()), {"key": ["flash", 32]}, TypeError, "key must be hashable, got list"),
    ],
)
def test_a_wrong_attention_group_is_refused_and_nothing_made(arguments, options, error, message):
    builders = MetadataBuilders([PLAIN, VIEWED])

    with pytest.raises(error, match=message):
        builders.register(*arguments, **options)

    assert arguments[1].made == []
    assert builders.build(step_of(builders.specs, [3], 10)) == [()]


def test_a_factory_that_fails_registers_nothing():
    """It fails in the second micro-batch; the group that comes next is then the first of its kind."""
    factory, has_room = Recorder(), []

    def limited(spec, view, ubatch):
        if ubatch == 1 and not has_room:
            raise MemoryError("no room for buffers")
        return factory(spec, view, ubatch)

    builders = MetadataBuilders([PLAIN, PLAIN], 2)
    with pytest.raises(MemoryError):
        builders.register(0, limited)
    has_room.append(True)

    assert builders.register(1, limited) == 0
    builders.build([step_of(builders.specs, [3], 10, u) for u in (0, 1)])
    assert calls_of(factory) == [[], ["build"], ["build"]]


@pytest.mark.parametrize("ubatches", [[1], [0, 0], [1, 0], [0, 2]])
def test_micro_batches_out_of_order_are_refused(ubatches):
    factory = Recorder()
    builders = two_equal_groups(factory, 3)

    with pytest.raises(ValueError, match="micro-batches must come in order, 0 first, got"):
        builders.build([step_of(builders.specs, [3], 10, u) for u in ubatches])

    assert calls_of(factory) == [[]] * 6


@pytest.mark.parametrize("ubatch", [2, 5])
def test_more_micro_batches_than_there_are_builders_for_are_refused(ubatch):
    factory = Recorder()
    builders = two_equal_groups(factory, 2)

    with pytest.raises(
        ValueError,
        match=rf"num_ubatches must be at least {ubatch + 1} for micro-batch {ubatch}, got 2 \(pass it",
    ):
        builders.build(step_of(builders.specs, [3], 10, ubatch))

    with pytest.raises(ValueError, match="num_ubatches must be at least 3 for micro-batch 2, got 2"):
        builders.build([step_of(builders.specs, [3], 10, u) for u in range(3)])
    with pytest.raises(ValueError, match=r"ubatch must lie in \[0, \d+\], got -1"):
        builders.build(step_of(builders.specs, [3], 10, -1))
    assert calls_of(factory) == [[]] * 4


def test_metadata_of_another_number_of_groups_is_refused():
    factory = Recorder()
    builders = two_equal_groups(factory)

    with pytest.raises(ValueError, match="metadata must be of 2 groups, got 3"):
        builders.build(step_of([PLAIN] * 3, [3], 10))

    assert calls_of(factory) == [[], []]


OTHERS = {
    "block_size=16, got block_size=32": KVCacheGroupSpec(32),
    "sliding_window=None, got sliding_window=64": KVCacheGroupSpec(16, sliding_window=64),
    "kernel_views=(), got kernel_views=(8,)": KVCacheGroupSpec(16, (8,)),
    "block_size=16, cp_sharded=True, got block_size=8, cp_sharded=False": KVCacheGroupSpec(8, (), False),
    "max_num_encoder_tokens=None, got max_num_encoder_tokens=9": KVCacheGroupSpec(
        16, max_num_encoder_tokens=9
    ),
}


@pytest.mark.parametrize(("message", "other"), OTHERS.items(), ids=range(len(OTHERS)))
def test_metadata_of_other_specs_is_refused_whenever_it_comes(message, other):
    """In the first step and after steps of the builders' own table, in each micro-batch, and twice."""
    factory = Recorder()
    builders = two_equal_groups(factory, 2)
    own, wrong = step_of([PLAIN, PLAIN], [3], 10), step_of([PLAIN, other], [3], 10)
    message = re.escape(f"group 1 of the metadata must have {message} (give MetadataBuilders")

    for steps in (wrong, wrong, own, wrong, [own, step_of([PLAIN, other], [3], 10, 1)], own):
        if steps is own:
            builders.build(own)
            assert calls_of(factory) == [["build"], [], ["update"], []]
            continue
        with pytest.raises(ValueError, match=message):
            builders.build(steps)
        assert calls_of(factory) == [[]] * 4


def test_equal_specs_are_the_same_however_they_are_written():
    """Those of another table, int block sizes, and kernel views in any notation."""
    builders = MetadataBuilders([16, np.int64(12), KVCacheGroupSpec(32, (16, 8))])
    assert builders.specs == (PLAIN, KVCacheGroupSpec(12), VIEWED)
    builders.register(2, Recorder(), view=1)

    for views in ((16, 8), ((16, 2), KernelView(8)), (KernelView(16), (8, 4))):
        specs = [KVCacheGroupSpec(16), KVCacheGroupSpec(12), KVCacheGroupSpec(32, views)]
        [[built]] = builders.build(step_of(specs, [3], 10))
        assert built.setup == (None, 1)

    with pytest.raises(ValueError, match="group 2 of the metadata must have kernel_views="):
        builders.build(step_of([PLAIN, KVCacheGroupSpec(12), KVCacheGroupSpec(32, (16, (8, 5)))], [3], 10))


class Unbuildable:
    supports_update_block_table = True


class NoUpdate(Unbuildable):
    build = print


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, r"factory must return a MetadataBuilder.*build\(\), got NoneType \(return"),
        (object(), "factory must return a MetadataBuilder.*got object"),
        (Unbuildable(), r"factory must return a MetadataBuilder.*got Unbuildable"),
        (NoUpdate(), r"update_block_table\(\) where it supports that, got NoUpdate \(or set"),
    ],
)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_factory_that_makes_no_builder_registers_nothing(made, message, bad):
    """In the first or in a later micro-batch, also beside a builder that takes no updates."""
    builders, good = MetadataBuilders([PLAIN], 2), Builder(PLAIN, None, 0)

    with pytest.raises(TypeError, match=message):
        builders.register(0, lambda *given: made if given[2] == bad else good)

    assert builders.build(step_of([PLAIN], [3], 10)) == [()]
    assert builders.register(0, Recorder()) == 0


def test_wrong_specs_and_numbers_of_micro_batches_are_refused():
    with pytest.raises(TypeError, match="specs must hold KVCacheGroupSpec or int block sizes, got str"):
        MetadataBuilders(["16"])
    with pytest.raises(TypeError, match=r"got FullAttentionSpec \(.*manager.table_groups\)"):
        MetadataBuilders([FullAttentionSpec(16)])
    with pytest.raises(TypeError, match="specs must be a list, one entry a group, got int"):
        MetadataBuilders(16)
    with pytest.raises(ValueError, match="block_size must lie in"):
        MetadataBuilders([0])
    with pytest.raises(ValueError, match="num_ubatches must lie in"):
        MetadataBuilders([PLAIN], 0)
