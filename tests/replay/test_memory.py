"""Which blocks are shared, held and freed, recounted from the tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.replay.engine import Engine
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

from .runs import assert_all_free, held_blocks, options_of, requests_of, traffic


def steps(engine, count):
    """Run a number of steps."""
    engine.arrivals.update()
    for _ in range(count):
        engine.step()


def hits(requests, first_steps, **options):
    """Tokens that the last request finds when it arrives after some steps of the others."""
    engine = Engine(requests, options_of(**({"max_num_batched_tokens": 600, "num_blocks": 900} | options)))
    steps(engine, first_steps)
    tokens, _ = engine.memory.match(len(requests) - 1, int(requests.prompt_lens[-1]))
    return tokens


@pytest.mark.parametrize(
    ("prompt", "hash_ids", "first_steps", "expected"),
    [
        (1100, (1, 2, 3), 0, 0),  # nothing is computed
        (1100, (1, 2, 3), 1, 600),  # the holder has computed 600 tokens
        (1100, (1, 2, 3), 2, 1024),
        (1100, (1, 9, 3), 2, 512),
        (1100, (9, 2, 3), 2, 0),
        (1024, (1, 2), 2, 1020),  # one token of the prompt is always computed
        (1025, (1, 2, 3), 2, 1024),
        (513, (1, 2), 2, 512),
        (512, (1,), 2, 508),
        (3, (1,), 2, 0),  # no whole block
    ],
)
def test_whole_computed_blocks_of_equal_leading_ids_are_found(prompt, hash_ids, first_steps, expected):
    requests = requests_of((0.0, 1090, 50, 1, 2, 30), (9.0, prompt, 5, *hash_ids))

    assert hits(requests, first_steps) == expected


def test_a_partial_last_block_is_shared_only_as_far_as_both_prompts_reach():
    """The holder's outputs follow its prompt inside the last hash block; they are nobody else's."""
    requests = requests_of((0.0, 542, 50, 1, 2), (9.0, 600, 5, 1, 2))

    assert hits(requests, 20) == 540


def test_several_groups_share_blocks_that_are_whole_in_each():
    requests = requests_of((0.0, 1090, 50, 1, 2, 30), (9.0, 1100, 5, 1, 2, 3))
    groups = (KVCacheGroupSpec(6), KVCacheGroupSpec(5, cp_sharded=False))

    assert hits(requests, 2, groups=groups, context_parallel=ContextParallel(2, 0, 3)) == 1020  # of 12 and 5


@pytest.mark.parametrize(
    ("window", "first_steps", "expected"), [(70, 1, 600), (70, 2, 1024), (1100, 20, 1024)]
)
def test_blocks_that_a_window_has_left_are_found_until_they_are_handed_out(window, first_steps, expected):
    requests = requests_of((0.0, 1090, 60, 1, 2, 30), (9.0, 1100, 5, 1, 2, 3))
    groups = (KVCacheGroupSpec(4), KVCacheGroupSpec(4, sliding_window=window))

    assert hits(requests, first_steps, groups=groups) == expected


@pytest.mark.parametrize(
    ("first_steps", "needed"),
    [
        (0, 275),  # 1,100 tokens in blocks of 4, nothing to hit
        (3, 19),  # the holder runs: 256 blocks are there
        (80, 275),  # it is gone: they are taken out of the free blocks
    ],
)
def test_hits_that_nobody_holds_count_as_needed(first_steps, needed):
    requests = requests_of((0.0, 1090, 50, 1, 2, 30), (1e9, 1100, 5, 1, 2, 3))
    engine = Engine(requests, options_of(max_num_batched_tokens=600, num_blocks=900))
    engine.arrivals.update()
    for _ in range(first_steps):
        if engine.batch.num_reqs or engine.arrivals.waiting:
            engine.step()

    assert engine.memory.match(1, 1100)[1] == needed


def recounted(engine):
    """(distinct written positions, positions with room) of held blocks, one by one."""
    written, held = set(), set()
    for (group, place), ids in held_blocks(engine).items():
        size = int(engine.layout.positions_per_block[group, 0])
        table = engine.tables.mirror.block_table(group)[engine.batch.row[place]]
        held |= {(block, offset) for block in ids for offset in range(size)}
        for position in range(int(engine.batch.computed[place])):
            if table[position // size]:
                written.add((int(table[position // size]), position % size))
    return len(written), len(held)


@settings(deadline=None, max_examples=25)
@given(traffic(), st.sampled_from([1, 2]), st.sampled_from([(3,), (4, 6)]), st.sampled_from([None, 1, 9]))
def test_held_and_written_positions_equal_a_recount(requests, world, sizes, window):
    groups = tuple(
        KVCacheGroupSpec(size, sliding_window=window if g else None) for g, size in enumerate(sizes)
    )
    options = options_of(
        groups=groups, num_blocks=2000, max_num_batched_tokens=400, context_parallel=ContextParallel(world)
    )
    engine = Engine(requests, options)
    read = engine._meter.read

    def compare_and_read():
        distinct = {block for ids in held_blocks(engine).values() for block in ids}
        assert recounted(engine) == engine._meter._held.num_positions()
        assert engine.memory.num_free == engine.num_blocks - 1 - len(distinct)
        return read()

    engine._meter.read = compare_and_read
    engine.run()

    assert engine.findings.num_mismatches == 0
    assert_all_free(engine)


def test_window_columns_are_null_and_their_blocks_free():
    requests = requests_of((0.0, 40, 30))
    groups = (KVCacheGroupSpec(4), KVCacheGroupSpec(4, sliding_window=10))
    engine = Engine(requests, options_of(groups=groups))

    def look(running):
        if running.batch.num_reqs:
            first = max(0, int(running.batch.computed[0]) - 9) // 4
            table = running.tables.mirror.block_table(1)[running.batch.row[0]]
            assert not table[:first].any()
            assert table[first]
            assert running.tables.mirror.block_table(0)[running.batch.row[0]][0]
            ends = int(running.memory.num_columns()[0, 0]), int(running.memory.num_columns()[1, 0]) - first
            assert running.memory.num_free == running.num_blocks - 1 - sum(ends)

    engine.run(look)

    assert engine.findings.num_mismatches == 0
    assert engine.tally.num_completed == 1
