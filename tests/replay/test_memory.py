"""Which blocks are shared, held and freed, recounted from the tables."""

import numpy as np
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
    """Tokens that the last request shares when it arrives after some steps of the others."""
    engine = Engine(requests, options_of(**({"max_num_batched_tokens": 600, "num_blocks": 900} | options)))
    steps(engine, first_steps)
    tokens, _ = engine.memory.longest_prefix(len(requests) - 1, int(requests.prompt_lens[-1]))
    return tokens


@pytest.mark.parametrize(
    ("prompt", "hash_ids", "first_steps", "expected"),
    [
        (1100, (1, 2, 3), 0, 0),  # nobody is live
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
def test_whole_computed_blocks_of_equal_leading_ids_are_shared(prompt, hash_ids, first_steps, expected):
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
    ("window", "first_steps", "expected"),
    [
        (70, 1, 600),  # the holder stands where the hit ends: the same window
        (70, 2, 0),  # at 1,090 it holds positions from 1,021; a hit of 1,024 needs those from 955
        (1100, 2, 1024),  # nothing has left the window yet
        (1100, 20, 0),  # the first blocks have
    ],
)
def test_a_window_shares_while_the_holder_still_has_its_blocks(window, first_steps, expected):
    requests = requests_of((0.0, 1090, 60, 1, 2, 30), (9.0, 1100, 5, 1, 2, 3))
    groups = (KVCacheGroupSpec(4), KVCacheGroupSpec(4, sliding_window=window))

    assert hits(requests, first_steps, groups=groups) == expected


def recounted(engine):
    """(distinct written positions, positions with room) of held blocks, one by one."""
    written, held = set(), set()
    for (group, row), ids in held_blocks(engine).items():
        size = int(engine.layout.positions_per_block[group, 0])
        table = engine.tables.rows.mirror.block_table(group)[row]
        held |= {(block, offset) for block in ids for offset in range(size)}
        for position in range(int(engine.batch.computed[row])):
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

    def compare(running):
        counts = (running.memory.num_distinct_positions(), running.memory.num_held_positions())
        assert counts == recounted(running)
        distinct = [set() for _ in groups]
        for (group, _), ids in held_blocks(running).items():
            distinct[group] |= set(ids)
        np.testing.assert_array_equal([len(ids) for ids in distinct], running.memory.num_held)
        assert running.memory.num_free == running.num_blocks - 1 - sum(map(len, distinct))

    engine.run(compare)

    assert engine.findings.num_mismatches == 0
    assert_all_free(engine)


def test_window_columns_are_null_and_their_blocks_free():
    requests = requests_of((0.0, 40, 30))
    groups = (KVCacheGroupSpec(4), KVCacheGroupSpec(4, sliding_window=10))
    engine = Engine(requests, options_of(groups=groups))

    def look(running):
        if running.batch.num_reqs:
            first = max(0, int(running.batch.computed[0]) - 9) // 4
            table = running.tables.rows.mirror.block_table(1)[0]
            assert not table[:first].any()
            assert table[first]
            assert running.tables.rows.mirror.block_table(0)[0][0]
            ends = int(running.memory.num_columns()[0, 0]), int(running.memory.num_columns()[1, 0]) - first
            assert running.memory.num_free == running.num_blocks - 1 - sum(ends)

    engine.run(look)

    assert engine.findings.num_mismatches == 0
    assert engine.tally.num_completed == 1
