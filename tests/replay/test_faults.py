"""The oracle bites: each planted fault is found, and said where."""

from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.allocation.sequence_state import CAPACITY
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


def faulty_manager(engine, **methods):
    """Put wrapped methods in the place of a manager's; each is called with the honest one first."""
    for name, method in methods.items():
        setattr(engine.memory.manager, name, partial(method, getattr(engine.memory.manager, name)))


def give_back_early(engine):
    """Free a block that a running sequence holds, behind the manager's back."""
    block = engine.memory.manager.block_table(0)[engine.batch.row[0], 0]
    engine.memory.manager.pool.free([block])


class FoundError(Exception):
    """Ends a run."""


def run_until_a_mismatch(engine, fault=id, fault_at=6):
    """Run with a fault after some steps; what the damage does to the manager later does not matter."""

    def look(engine):
        if engine.log.num_steps == fault_at:
            fault(engine)
        if engine.findings.num_mismatches:
            raise FoundError

    with suppress(FoundError):
        engine.run(look)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_block_that_was_freed_early_is_found(prefix_caching):
    requests = requests_of(*((0.0, 30, 60) for _ in range(4)))
    engine = Engine(requests, options_of(num_samples=40, num_blocks=80, prefix_caching=prefix_caching))

    run_until_a_mismatch(engine, give_back_early)

    assert engine.findings.num_mismatches > 0
    assert "of request" in engine.findings.examples[0].split("found")[1]  # another one's token


def ahead(manager, handles, computed):
    """Computed tokens as an engine gives them that counts what it has blocks for."""
    capacity = [manager.line(int(handle))[CAPACITY] for handle in handles]
    return np.minimum(computed + 64, np.minimum(capacity, manager.num_tokens(handles)))


def run_with_commits_ahead(requests, *, are_ahead=True, **changes):
    """Run an engine that settles tokens before they are computed."""
    engine = Engine(requests, options_of(num_samples=64, **changes))
    manager = engine.memory.manager
    faulty_manager(
        engine, allocate_slots=lambda honest, seqs, counts: honest(seqs, counts, num_lookahead_tokens=64)
    )
    if are_ahead:
        faulty_manager(
            engine, commit=lambda honest, seqs, computed: honest(seqs, ahead(manager, seqs, computed))
        )
    engine.run()
    return engine.findings


def test_blocks_published_before_they_are_computed_are_found():
    """The second one is preempted within its prompt, and on its return hits what it never computed."""
    requests = requests_of((0.0, 8, 40), (0.0, 200, 5))

    findings = run_with_commits_ahead(requests, num_blocks=54, watermark=0.0)
    honest = run_with_commits_ahead(requests, are_ahead=False, num_blocks=54, watermark=0.0)

    assert findings.num_mismatches > 0
    assert "found nothing written" in findings.examples[0]
    assert honest.num_mismatches == 0


def test_window_blocks_freed_before_they_are_computed_are_found():
    groups = (KVCacheGroupSpec(4), KVCacheGroupSpec(4, sliding_window=9))

    findings = run_with_commits_ahead(requests_of((0.0, 120, 5)), groups=groups, num_blocks=900)

    assert findings.num_mismatches > 0
    assert "group 1" in findings.examples[0]


def test_hits_that_nobody_holds_are_found_when_others_get_them():
    """A hit without its references is handed out again while it is read."""
    requests = requests_of((0.0, 600, 1, 1, 2), (50.0, 600, 90, 1, 3), (50.0, 300, 90))
    engine = Engine(requests, options_of(num_blocks=260, num_samples=64, max_num_batched_tokens=200))

    def lose_references(honest, seqs, counts):
        starting = engine.memory.manager.rows(seqs) < 0
        done = honest(seqs, counts)
        for row in engine.memory.manager.rows(seqs)[starting & (done.num_computed_tokens > 0)]:
            engine.memory.manager.pool.free(engine.memory.manager.block_table(0)[row, :100])
        return done

    faulty_manager(engine, allocate_slots=lose_references)
    run_until_a_mismatch(engine)

    assert engine.findings.num_mismatches > 0


def test_a_preempted_sequence_is_read_whole_before_its_blocks_go():
    """Its first block is spoilt just before; recomputing repairs it, so nothing else could tell."""
    engine = Engine(
        requests_of((0.0, 8, 16), (0.0, 8, 16)),
        options_of(num_blocks=10, watermark=0.0, prefix_caching=False),
    )
    preempt = engine._preempt

    def spoil_and_preempt(place):
        block = engine.tables.mirror.block_table(0)[engine.batch.row[place], 0]
        engine.oracle._kv[0, block, 0] = 0
        preempt(place)

    engine._preempt = spoil_and_preempt
    engine.run()

    assert engine.memory.manager.stats().num_preemptions == 1
    assert engine.findings.num_mismatches == 1
    assert "expected position 0 of request 1 in group 0, found nothing written" in engine.findings.examples[0]


def test_a_hit_of_other_tokens_is_found():
    """Two prompts that hash to equal keys, as if keys were half as long."""
    requests = requests_of((0.0, 600, 300, 1, 2), (1.0, 700, 5, 9, 3))
    engine = Engine(requests, options_of(num_blocks=900, max_num_batched_tokens=600))
    tokens = engine.memory._tokens
    engine.memory._tokens = SimpleNamespace(
        prompt=lambda request: np.arange(requests.prompt_lens[request], dtype=np.int32),
        sampled=tokens.sampled,
    )

    engine.run()

    assert "of prefix 0 in group 0" in engine.findings.examples[0]


def test_a_row_that_was_moved_badly_is_found():
    """The manager thinks that a sequence has moved; its table row has not."""
    requests = requests_of((0.0, 8, 1), (0.0, 8, 30))
    engine = Engine(requests, options_of(compact_every=1))
    engine.memory.manager.move_rows = lambda *_: None

    engine.run()

    assert engine.findings.num_mismatches > 0


def test_only_the_first_mismatches_are_kept_as_examples():
    findings = run_with(fault_at=0, lasting=True, slot_mapping=shift)

    assert len(findings.examples) == 10
    assert findings.num_mismatches > 10
