"""The oracle bites: each planted fault is found, and said where."""

import numpy as np
import pytest

from pagedkv.replay.engine import Engine
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

from .runs import options_of, requests_of

REQUESTS = requests_of((0.0, 30, 20), (0.0, 25, 20), (0.0, 28, 6), (0.0, 21, 20))


class FaultyStep:
    """A step whose arrays pass through a fault on their way to the reader."""

    def __init__(self, step, faults):
        self._step, self._faults = step, faults

    def __getattr__(self, name):
        found = getattr(self._step, name)
        if not callable(found):
            return self._faults[name](found.copy()) if name in self._faults else found
        return lambda *args: self._faults[name](found(*args).copy()) if name in self._faults else found(*args)


def run_with(fault_at=6, ranks=(0,), lasting=False, changes=None, **faults):
    """Run an engine whose commits have faults from one step on, in that step alone unless lasting."""
    engine = Engine(REQUESTS, options_of(num_samples=1, **(changes or {})))
    commit, count = engine.tables.commit, iter(range(10_000))

    def faulty_commit(*args):
        now = next(count)
        steps = commit(*args)
        if now == fault_at or (lasting and now > fault_at):
            return [FaultyStep(step, faults) if r in ranks else step for r, step in enumerate(steps)]
        return steps

    engine.tables.commit = faulty_commit
    engine.run()
    return engine.findings


def test_no_fault_no_finding():
    assert run_with(block_table=lambda table: table).num_mismatches == 0


def swap_blocks(table):
    table[0, [0, 1]] = table[0, [1, 0]]
    return table


def swap_rows(table):
    return np.roll(table, 1, axis=0)


def drop_last_block(table):
    row = table[0]
    row[np.flatnonzero(row)[-1:]] = 0
    return table


@pytest.mark.parametrize("fault", [swap_blocks, swap_rows, drop_last_block])
def test_a_wrong_block_in_the_table_is_found(fault):
    findings = run_with(block_table=fault, lasting=True)

    assert findings.num_mismatches > 0
    assert "expected position" in findings.examples[0]


def test_a_block_past_the_count_is_found():
    def leave_stale(table):
        table[:, -1] = 3
        return table

    findings = run_with(block_table=leave_stale, lasting=True)

    assert "columns past the count are not NULL" in " ".join(findings.examples)


def shift(slots):
    return slots + 1


def repeat_first(slots):
    slots[:] = slots[0]
    return slots


def reverse(slots):
    return slots[::-1].copy()


@pytest.mark.parametrize("fault", [shift, repeat_first, reverse])
def test_a_wrong_slot_in_one_step_is_found(fault):
    """Written wrong once, in a prefill step; the sequences are read whole when they finish."""
    findings = run_with(fault_at=1, slot_mapping=fault)

    assert findings.num_mismatches > 0


def test_a_slot_of_an_earlier_step_is_found():
    stale = {}

    def earlier(slots):
        previous = stale.get("slots", slots)
        stale["slots"] = slots.copy()
        return np.resize(previous, slots.shape)

    assert run_with(fault_at=4, lasting=True, slot_mapping=earlier).num_mismatches > 0


def test_a_token_without_a_slot_is_found_in_its_step():
    def lose(slots):
        slots[2] = -1
        return slots

    findings = run_with(slot_mapping=lose, fault_at=1)

    assert "token 2 of the step is owned by 0 ranks, expected 1" in findings.examples[0]
    assert findings.examples[0].startswith("step 1, row ")


PARALLEL = {"context_parallel": ContextParallel(3, 0, 2), "groups": (6,)}


def test_a_lost_owner_in_context_parallel_is_found():
    findings = run_with(changes=PARALLEL, ranks=(1,), slot_mapping=lambda slots: np.full_like(slots, -1))

    assert "is owned by 0 ranks, expected 1" in findings.examples[0]


def test_a_second_owner_in_context_parallel_is_found():
    findings = run_with(
        changes=PARALLEL, ranks=(2,), slot_mapping=lambda slots: np.where(slots < 0, 6 * 60, slots)
    )

    assert "is owned by 2 ranks, expected 1" in findings.examples[0]


def test_a_rank_without_a_replicated_token_is_found():
    def lose(slots):
        slots[0] = -1
        return slots

    changes = {"context_parallel": ContextParallel(2), "groups": (KVCacheGroupSpec(4, cp_sharded=False),)}

    findings = run_with(changes=changes, ranks=(1,), slot_mapping=lose)

    assert "is owned by 1 ranks, expected 2" in findings.examples[0]


def test_one_ranks_wrong_table_is_found():
    findings = run_with(changes=PARALLEL, ranks=(2,), lasting=True, block_table=swap_rows)

    assert "rank 2" in findings.examples[0]
    assert "rank 1" not in " ".join(findings.examples)


def test_a_wrong_kernel_view_is_found():
    changes = {"groups": (KVCacheGroupSpec(4, kernel_views=(2,)),)}

    findings = run_with(changes=changes, lasting=True, kernel_block_table=lambda table: table + (table > 0))

    assert "group 0, kernel view 0" in findings.examples[0]


@pytest.mark.parametrize("name", ["seq_lens", "positions"])
def test_wrong_step_values_are_found(name):
    findings = run_with(**{name: lambda values: values + (np.arange(len(values)) == 1)})

    assert f"{name}: 1 of " in findings.examples[0]


def test_a_window_groups_lost_block_is_found():
    changes = {"groups": (KVCacheGroupSpec(4), KVCacheGroupSpec(4, sliding_window=9))}

    findings = run_with(changes=changes, lasting=True, block_table=drop_last_block)

    assert "group 1" in " ".join(findings.examples)


def test_a_block_that_was_given_out_twice_is_found():
    engine = Engine(REQUESTS, options_of(num_samples=1))
    pool = engine.memory._pool
    allocate = pool.allocate
    calls = iter(range(10_000))

    def allocate_twice(count):
        ids = allocate(count)
        if count and next(calls) == 3:
            held = engine.tables.rows.mirror.block_table(0)[0, :1].copy()
            pool.free(ids[:1])
            pool.touch(held)
            ids[:1] = held
        return ids

    engine.memory._pool = type("Faulty", (), {"__getattr__": lambda _, name: getattr(pool, name)})()
    engine.memory._pool.allocate = allocate_twice
    engine.run()

    assert engine.findings.num_mismatches > 0
    assert "of request" in engine.findings.examples[0].split("found")[1]  # another one's token


def test_a_preempted_sequence_is_read_whole_before_its_blocks_go():
    """Its first block is spoilt just before; recomputing repairs it, so nothing else could tell."""
    engine = Engine(requests_of((0.0, 8, 16), (0.0, 8, 16)), options_of(num_blocks=10, watermark=0.0))
    preempt = engine._preempt

    def spoil_and_preempt(row):
        block = engine.tables.rows.mirror.block_table(0)[row, 0]
        engine.oracle._kv[0, block, 0] = 0
        preempt(row)

    engine._preempt = spoil_and_preempt
    engine.run()

    assert engine.tally.num_preemptions == 1
    assert engine.findings.num_mismatches == 1
    assert "expected position 0 of request 1 in group 0, found nothing written" in engine.findings.examples[0]


def test_a_prefix_shared_before_it_was_computed_is_found():
    requests = requests_of((0.0, 600, 30, 1, 2), (0.0, 700, 5, 1, 3))
    engine = Engine(requests, options_of(num_blocks=900, max_num_batched_tokens=700))
    honest = engine.memory.longest_prefix
    engine.memory.longest_prefix = lambda request, known: (512, 0) if request == 1 else honest(request, known)

    engine.run()

    assert engine.findings.num_mismatches > 0
    assert "found nothing written" in engine.findings.examples[0]


def test_a_prefix_of_other_tokens_is_found():
    requests = requests_of((0.0, 600, 300, 1, 2), (1.0, 700, 5, 9, 3))
    engine = Engine(requests, options_of(num_blocks=900, max_num_batched_tokens=600))
    honest = engine.memory.longest_prefix
    engine.memory.longest_prefix = lambda request, known: (512, 0) if request == 1 else honest(request, known)

    engine.run()

    assert "of prefix 0 in group 0" in engine.findings.examples[0]


def test_only_the_first_mismatches_are_kept_as_examples():
    findings = run_with(fault_at=0, lasting=True, slot_mapping=shift)

    assert len(findings.examples) == 10
    assert findings.num_mismatches > 10
