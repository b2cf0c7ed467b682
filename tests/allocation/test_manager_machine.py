"""Random traffic through a manager, with the content of every slot: what is read is what was written.

Sequences of two tokens' vocabulary share prefixes all the time; groups of every kind, chunks of any length,
drafts accepted and rejected, forks, preemptions, frees in the middle of a step, windows that free and
refusals. After every step every live position of every sequence is read back.
"""

from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv import errors
from pagedkv.allocation.block_records import UNCACHED
from pagedkv.allocation.events import AllBlocksCleared, BlockStored
from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.group_specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from pagedkv.allocation.hashing import ALGORITHMS
from pagedkv.allocation.manager import KVCacheManager

from .engine import Engine
from .models import snapshot

MAX_MODEL_LEN = 24
CACHED = (
    [FullAttentionSpec(1)],
    [FullAttentionSpec(3)],
    [FullAttentionSpec(4)],
    [SlidingWindowSpec(2, 5)],
    [FullAttentionSpec(4), SlidingWindowSpec(4, 6)],
    [FullAttentionSpec(2), SlidingWindowSpec(4, 3, extra_retained_tokens=2)],
    [SlidingWindowSpec(2, 1), FullAttentionSpec(2), SlidingWindowSpec(2, 4)],
    [FullAttentionSpec(4), ChunkedLocalAttentionSpec(4, 8)],
    [ChunkedLocalAttentionSpec(2, 3), FullAttentionSpec(2)],
    [FullAttentionSpec(2), MambaSpec(4, "align")],
    [MambaSpec(2, "align", num_speculative_blocks=2), SlidingWindowSpec(2, 4)],
    [FullAttentionSpec(4), MambaSpec(4, "align", num_speculative_blocks=3)],
)
UNCACHED_GROUPS = (
    [FullAttentionSpec(4)],
    [FullAttentionSpec(2), MambaSpec(4, "none", num_speculative_blocks=1)],
    [FullAttentionSpec(2), CrossAttentionSpec(2, max_num_encoder_tokens=5)],
    [EncoderOnlyAttentionSpec(), FullAttentionSpec(2)],
)
CHOICES = [*[(groups, True) for groups in CACHED], *[(groups, False) for groups in UNCACHED_GROUPS]]
RANDOM = st.randoms(use_true_random=False)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 40),
        rows=st.integers(1, 6),
        watermark=st.sampled_from([0.0, 0.2]),
        algorithm=st.sampled_from(ALGORITHMS),
        choice=st.sampled_from(CHOICES),
    )
    def make_manager(self, num_blocks, rows, watermark, algorithm, choice):
        groups, caching = choice
        self.manager = KVCacheManager(
            groups,
            num_blocks,
            max_num_seqs=rows,
            max_model_len=MAX_MODEL_LEN,
            watermark=watermark,
            enable_prefix_caching=caching,
            enable_events=caching,
            algorithm=algorithm,
        )
        self.caching = caching
        self.watermark = int(watermark * num_blocks)
        self.rows = rows
        self.engine = Engine(self.manager, num_blocks)
        self.told = set()
        self.parents = {}  # key -> key of the block before
        self.left_while_pinned = False

    def state(self):
        manager = self.manager
        lines = manager._state.arrays.sequences.copy()
        lines[:, [6, 14]] = 0  # what a match found, and the batch's stamp
        tables = [manager.block_table(g).tolist() for g in range(len(manager.groups))]
        counts = [manager.num_blocks_held(g).tolist() for g in range(len(manager.groups))]
        return snapshot(manager.pool), lines.tolist(), tables, counts, manager._state.arrays.rows[0]

    def refuse(self, error, call):
        before = self.state()
        with pytest.raises(error) as raised:
            call()
        assert self.state() == before
        return raised.value

    @rule(random=RANDOM)
    def add(self, random):
        """A prompt that starts as others do, half of the time, or like none."""
        length = random.randint(1, MAX_MODEL_LEN - 2)
        known = random.choice(self.engine.live).tokens if self.engine.live else []
        tokens = known[: random.randint(0, length)] if random.random() < 0.7 else []
        tokens = tokens + [random.randint(0, 1) for _ in range(length - len(tokens))]
        extra_keys = random.choice([None, None, self.extra_keys(random, length)])
        self.engine.add(tokens, extra_keys=extra_keys, num_encoder_tokens=random.randint(0, 5))

    def extra_keys(self, random, length):
        start = random.randrange(length)
        item = random.choice("xy"), start, random.randint(1, length - start)
        return ExtraKeys(
            adapter=random.choice([None, None, "a"]),
            multimodal=random.choice([(), (item,)]),
            cache_salt=random.choice([None, None, "s"]),
        )

    def sample(self, random):
        """Every sequence that has computed all its tokens gets another one, in one call."""
        done = [s for s in self.engine.live if s.running and s.computed == len(s.tokens) < MAX_MODEL_LEN]
        tokens = [random.randint(0, 1) for _ in done]
        self.manager.append([sequence.handle for sequence in done], tokens)
        for sequence, token in zip(done, tokens, strict=True):
            sequence.tokens.append(token)

    @rule(random=RANDOM, num_steps=st.integers(1, 6))
    def steps(self, random, num_steps):
        for _ in range(num_steps):
            self.step(random)

    @rule(random=RANDOM)
    def step(self, random):
        """One step over some of the sequences, in any order."""
        engine, manager = self.engine, self.manager
        self.sample(random)
        ready = [sequence for sequence in engine.live if sequence.computed < len(sequence.tokens)]
        random.shuffle(ready)
        chosen = ready[: random.choice([6, 6, 2, 1])]
        counts, hits, lookahead = [], [], random.randint(0, 2)
        for sequence in chosen:
            hit = sequence.computed
            if not sequence.running:
                if sequence.matched and random.random() < 0.4:  # an old lookup: blocks may have gone since
                    hit = engine.longest_hit(sequence, limit=sequence.matched)
                else:
                    hit = engine.longest_hit(sequence)
                    assert manager.match_prefix(sequence.handle) == hit
                sequence.matched = hit
            hits.append(hit)
            rest = len(sequence.tokens) - hit
            counts.append(rest if random.random() < 0.6 else random.randint(1, rest))
        handles = [sequence.handle for sequence in chosen]
        served = self.allocate(chosen, handles, counts, hits, lookahead, random.random() < 0.5)
        scheduled = []
        for sequence, count, computed in zip(chosen, counts, served, strict=False):
            engine.admit(sequence, computed)
            scheduled.append((sequence, min(count, len(sequence.tokens) - computed)))
        random.shuffle(scheduled)
        for _ in range(random.randint(0, 1) if len(scheduled) > 1 else 0):
            dropped = scheduled.pop()[0]  # already allocated for, and out before the step runs
            self.leave(dropped, preempt=random.random() < 0.5)
            self.try_more(random)
        if random.random() < 0.2:  # a step that is cut short: a sequence waits, the others compute less
            scheduled = [(sequence, random.randint(1, count)) for sequence, count in scheduled[1:]]
            self.allocate_less(scheduled)
        engine.copy(random)
        for sequence, count in scheduled:
            engine.write(sequence, count)
            sequence.computed += count
        if scheduled:
            manager.commit(
                [sequence.handle for sequence, _ in scheduled],
                [sequence.computed for sequence, _ in scheduled],
            )
        engine.read_back()

    def allocate(self, chosen, handles, counts, hits, lookahead, exclusive):
        """Allocate; alone, success must follow the formula. Returns the computed tokens of those served."""
        engine, manager = self.engine, self.manager
        if len(chosen) == 1:
            sequence = chosen[0]
            needed = engine.needed(sequence, hits[0], counts[0], lookahead)
            others = any(other.running for other in engine.live)
            spare = self.watermark if others and not sequence.running else 0
            has_row = sequence.running or sum(other.running for other in engine.live) < self.rows
            if not has_row or needed + spare > manager.num_free_blocks:
                error = errors.OutOfBlocksError if has_row else errors.CapacityError
                refused = self.refuse(
                    error,
                    lambda: manager.allocate_slots(handles, counts, num_lookahead_tokens=lookahead),
                )
                assert not has_row or (refused.needed, refused.index) == (needed, 0)
                served = manager.try_allocate_slots(handles, counts, num_lookahead_tokens=lookahead)
                assert (served.num_sequences, served.block_ids.size) == (0, 0)
                return []
            free, back = manager.num_free_blocks, engine.num_given_back(sequence, counts[0])
            served = manager.allocate_slots(handles, counts, num_lookahead_tokens=lookahead)
            assert free - manager.num_free_blocks == needed - back
            return served.num_computed_tokens.tolist()
        if not exclusive:
            return manager.try_allocate_slots(
                handles, counts, num_lookahead_tokens=lookahead
            ).num_computed_tokens.tolist()
        before = self.state()
        try:
            served = manager.allocate_slots(handles, counts, num_lookahead_tokens=lookahead)
        except (errors.OutOfBlocksError, errors.CapacityError):
            assert self.state() == before
            return []
        return served.num_computed_tokens.tolist()

    def allocate_less(self, scheduled):
        """Allocate anew for fewer tokens: that takes no blocks, and states stand where the step writes."""
        free = self.manager.num_free_blocks
        back = sum(self.engine.num_given_back(sequence, count) for sequence, count in scheduled)
        handles, counts = [s.handle for s, _ in scheduled], [count for _, count in scheduled]
        assert self.manager.allocate_slots(handles, counts).block_ids.size == 0
        assert self.manager.num_free_blocks == free + back

    def try_more(self, random):
        """Another sequence takes what was just given back, in the same step, and computes nothing."""
        waiting = [sequence for sequence in self.engine.live if not sequence.running]
        if waiting:
            sequence = random.choice(waiting)
            sequence.matched = self.manager.match_prefix(sequence.handle)
            served = self.manager.try_allocate_slots([sequence.handle], [1])
            if served.num_sequences:
                self.engine.admit(sequence, int(served.num_computed_tokens[0]))

    def leave(self, sequence, *, preempt):
        self.left_while_pinned |= bool(self.manager.pool.pin_counts.any())
        if preempt:
            self.manager.preempt([sequence.handle])
        else:
            self.manager.free([sequence.handle])
            self.engine.live.remove(sequence)
        sequence.running, sequence.computed, sequence.matched = False, 0, 0

    @precondition(lambda self: self.engine.live)
    @rule(random=RANDOM)
    def append(self, random):
        sequence = random.choice(self.engine.live)
        tokens = [random.randint(0, 1) for _ in range(random.randint(0, 5))]
        if len(sequence.tokens) + len(tokens) > MAX_MODEL_LEN:
            self.refuse(
                errors.CapacityError,
                lambda: self.manager.append([sequence.handle], tokens, [len(tokens)]),
            )
            return
        self.manager.append([sequence.handle], tokens, [len(tokens)])
        sequence.tokens += tokens

    @precondition(lambda self: self.engine.live)
    @rule(random=RANDOM)
    def draft_and_reject(self, random):
        """Drafts are computed with the last token; some are accepted, the others' KV stays as rubbish."""
        sequence = random.choice(self.engine.live)
        drafts = [random.randint(0, 1) for _ in range(random.randint(1, 3))]
        engine, manager = self.engine, self.manager
        self.sample(random)
        known = len(sequence.tokens)
        if not sequence.running or sequence.computed != known - 1:
            return
        if known + len(drafts) > MAX_MODEL_LEN:
            return
        as_tokens = random.random() < 0.5
        served = manager.try_allocate_slots(
            [sequence.handle], [1 + len(drafts)], num_lookahead_tokens=random.randint(0, 3)
        )
        if served.num_sequences == 0:
            return
        accepted = random.randint(0, len(drafts))
        sequence.tokens += drafts
        if as_tokens:
            manager.append([sequence.handle], drafts, [len(drafts)])
        engine.copy(random)
        engine.write(sequence, 1 + len(drafts), num_kept=1 + accepted)
        del sequence.tokens[known + accepted :]
        sequence.computed += 1 + accepted
        if as_tokens:
            manager.truncate(sequence.handle, known + accepted)
        else:
            manager.append([sequence.handle], drafts[:accepted], [accepted])
        manager.commit([sequence.handle], [sequence.computed])
        engine.read_back()

    @precondition(lambda self: self.engine.live)
    @rule(random=RANDOM)
    def truncate(self, random):
        sequence = random.choice(self.engine.live)
        num_tokens = random.randint(1, len(sequence.tokens) + 1)
        lost = sequence.running and num_tokens < sequence.computed
        gone = False
        for g, group in enumerate(self.manager.groups if lost else ()):
            if isinstance(group, MambaSpec):
                gone = True
            elif not isinstance(group, CrossAttentionSpec | EncoderOnlyAttentionSpec):
                first = group.num_skipped_tokens(num_tokens) // group.block_size
                gone |= 0 in self.engine.table(g, sequence)[first:]
        if gone or num_tokens > len(sequence.tokens):
            self.refuse(ValueError, lambda: self.manager.truncate(sequence.handle, num_tokens))
            return
        self.manager.truncate(sequence.handle, num_tokens)
        del sequence.tokens[num_tokens:]
        sequence.extra_keys = sequence.extra_keys and sequence.extra_keys.clipped(num_tokens)
        sequence.computed = min(sequence.computed, num_tokens)
        sequence.matched = min(sequence.matched, num_tokens - 1)
        self.engine.read_back()

    @precondition(lambda self: self.engine.live)
    @rule(random=RANDOM)
    def fork(self, random):
        sequence = random.choice(self.engine.live)
        engine = self.engine
        try:
            handle = int(self.manager.fork(sequence.handle)[0])
        except (errors.OutOfBlocksError, errors.CapacityError):
            return
        child = type(sequence)(handle, sequence.tokens, sequence.extra_keys, sequence.num_encoder_tokens)
        child.computed, child.running = sequence.computed, sequence.running
        engine.live.append(child)
        engine.copy(random)
        engine.read_back()

    @precondition(lambda self: self.engine.live)
    @rule(random=RANDOM)
    def look_up(self, random):
        """A lookup long before the allocation, if one ever comes."""
        sequence = random.choice(self.engine.live)
        if not sequence.running:
            sequence.matched = self.manager.match_prefix(sequence.handle)
            assert sequence.matched == self.engine.longest_hit(sequence)

    @precondition(lambda self: self.engine.live)
    @rule(random=RANDOM)
    def preempt(self, random):
        sequence = random.choice(self.engine.live)
        if sequence.running:
            self.leave(sequence, preempt=True)

    @precondition(lambda self: self.engine.live)
    @rule(random=RANDOM)
    def free(self, random):
        sequence = random.choice(self.engine.live)
        self.leave(sequence, preempt=False)
        for call in (self.manager.free, self.manager.preempt, self.manager.rows):
            self.refuse(errors.StaleSequenceError, lambda call=call: call([sequence.handle]))

    @rule(random=RANDOM)
    def move_row(self, random):
        source, to = random.randrange(self.rows), random.randrange(self.rows)
        taken = {int(self.manager.rows([s.handle])[0]) for s in self.engine.live if s.running}
        if source not in taken or (to in taken and to != source):
            self.refuse(ValueError, lambda: self.manager.move_rows([source], [to]))
        else:
            self.manager.move_rows([source], [to])

    @rule(random=RANDOM)
    def reset(self, random):
        del random
        empty = self.manager.num_free_blocks == self.manager.pool.num_blocks - 1
        assert self.manager.reset_prefix_cache() == empty

    @rule(random=RANDOM)
    def bad_calls(self, random):
        manager = self.manager
        wrong = random.choice([-1, 0, 0x7FFFFFFE << 32, 2**62, (1 << 32) + 1000])
        for call in (
            lambda: manager.allocate_slots([wrong], [1]),
            lambda: manager.commit([wrong], [1]),
            lambda: manager.append([wrong], [1]),
            lambda: manager.truncate(wrong, 1),
            lambda: manager.fork(wrong),
            lambda: manager.match_prefix(wrong),
        ):
            self.refuse(errors.StaleSequenceError, call)
        if self.engine.live:
            sequence = self.engine.live[0]
            self.refuse(ValueError, lambda: manager.allocate_slots([sequence.handle] * 2, [1, 1]))
            self.refuse(ValueError, lambda: manager.allocate_slots([sequence.handle], [0]))
            too_many = MAX_MODEL_LEN + 1
            self.refuse(ValueError, lambda: manager.commit([sequence.handle], [too_many]))

    @invariant()
    def counts_are_table_cells_and_pins(self):
        manager, pool = self.manager, self.manager.pool
        cells = np.concatenate(
            [np.empty(0, np.int32)]
            + [
                self.engine.table(g, s)
                for s in self.engine.live
                if s.running
                for g in range(len(manager.groups))
            ]
        ).astype(np.int64)
        owned = np.bincount(cells[cells > 0], minlength=pool.num_blocks)
        assert owned.tolist() == (pool.ref_counts - pool.pin_counts).tolist()
        assert not pool.pin_counts.any()  # every copy of the step has run
        assert pool.num_free_blocks + np.count_nonzero(pool.ref_counts) == pool.num_blocks - 1
        queue = pool.free_block_ids().tolist()
        assert len(set(queue)) == len(queue) == pool.num_free_blocks
        assert not pool.ref_counts[queue].any()

    @invariant()
    def tables_are_null_past_their_counts(self):
        for g in range(len(self.manager.groups)):
            table, counts = self.manager.block_table(g), self.manager.num_blocks_held(g)
            assert not any(table[row, counts[row] :].any() for row in range(self.rows))
        running = [s for s in self.engine.live if s.running]
        rows = self.manager.rows([s.handle for s in running]).tolist()
        assert len(set(rows)) == len(rows)
        assert self.manager.stats().num_running == len(running)
        assert self.manager.stats().num_sequences == len(self.engine.live)

    @invariant()
    def replayed_events_give_the_keys(self):
        if not self.caching:
            return
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.told.clear()
            elif isinstance(event, BlockStored):
                assert event.token_ids.size == len(event.block_hashes) * event.block_size
                assert event.parent_block_hash is None or len(event.parent_block_hash) == 16
                self.told |= {(block_hash, event.group) for block_hash in event.block_hashes}
                before = [event.parent_block_hash, *event.block_hashes]
                self.parents.update(zip(event.block_hashes, before, strict=False))
            else:
                self.told.remove((event.block_hash, event.group))
        arrays = self.manager.pool.arrays
        keys = arrays.keys[arrays.twins[:, 0] != UNCACHED]
        groups = (keys[:, 1] & np.uint64(0xFF)).tolist()
        keys[:, 1] &= ~np.uint64(0xFF)
        assert self.told == {(key.tobytes(), group) for key, group in zip(keys, groups, strict=True)}

    @invariant()
    def the_prefix_of_a_cached_block_is_cached(self):
        """With full attention alone: a holder of a block holds all before it, and tails are freed first.

        A pin holds its one block only: once a sequence has left while a copy was pending, its source may
        outlive what stands before it.
        """
        if self.left_while_pinned or not self.caching:
            return
        if [type(group) for group in self.manager.groups] != [FullAttentionSpec]:
            return
        for block_hash, group in self.told:
            parent = self.parents[block_hash]
            assert parent is None or (parent, group) in self.told

    @invariant()
    def statistics_make_sense(self):
        stats = self.manager.stats()
        assert 0 <= stats.num_hit_tokens <= stats.num_queried_tokens
        assert 0.0 <= stats.hit_rate <= 1.0

    def teardown(self):
        if hasattr(self, "engine"):
            self.manager.free([sequence.handle for sequence in self.engine.live])
            assert self.manager.num_free_blocks == self.manager.pool.num_blocks - 1
            assert not self.manager.pool.ref_counts.any()


ManagerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_manager = ManagerMachine.TestCase

ACTIONS = {
    "steps": 12,
    "add": 5,
    "append": 2,
    "draft_and_reject": 4,
    "truncate": 2,
    "fork": 4,
    "look_up": 3,
    "preempt": 1,
    "free": 3,
    "move_row": 1,
    "reset": 1,
    "bad_calls": 1,
}


def digest(machine):
    """What is left of a life: the order of the free queue, which tells every call, and the numbers."""
    return f"{machine.manager.pool.free_block_ids().tolist()} {machine.manager.stats()}"


def soak(choice, seed, num_actions):
    """A long random life of one manager; returns how much of what happened."""
    random = Random(seed)
    machine = ManagerMachine()
    machine.make_manager(
        num_blocks=random.choice([12, 24, 40, 80]),
        rows=random.choice([2, 4, 6]),
        watermark=random.choice([0.0, 0.0, 0.2]),
        algorithm=random.choice(ALGORITHMS),
        choice=choice,
    )
    for _ in range(num_actions):
        action = random.choices(list(ACTIONS), ACTIONS.values())[0]
        if action == "steps":
            machine.steps(random, random.randint(1, 6))
        elif machine.engine.live or action in ("add", "reset"):
            getattr(machine, action)(random)
        for check in (
            machine.counts_are_table_cells_and_pins,
            machine.tables_are_null_past_their_counts,
            machine.replayed_events_give_the_keys,
            machine.the_prefix_of_a_cached_block_is_cached,
            machine.statistics_make_sense,
        ):
            check()
    machine.teardown()
    return machine


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "+".join(type(g).__name__ for g in choice[0]))
def test_long_lives(choice):
    """The same, deeper: what the short lives above may not reach in every run."""
    copies = hits = evictions = 0
    for seed in range(8):
        machine = soak(choice, seed, num_actions=60)
        stats = machine.manager.stats()
        copies += machine.engine.num_copies
        hits += stats.num_hit_tokens + stats.num_rehit_tokens
        evictions += stats.pool.num_evictions

    attention = any(isinstance(group, FullAttentionSpec) and group.block_size > 1 for group in choice[0])
    assert copies > 0 or not attention
    assert hits > 0 or not choice[1]
    assert evictions > 0 or not choice[1]
