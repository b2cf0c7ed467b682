"""A manager's recurrent states, found by a table on its mirror: where each step reads and writes them."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import MultiGroupBlockTable
from pagedkv.allocation import FullAttentionSpec, KVCacheManager
from pagedkv.allocation.group_specs import MambaSpec

MAX_MODEL_LEN = 96
NUM_DRAFTS = 2


class States:
    """A manager, a table of stable rows on its mirror, and what each block's state has seen."""

    def __init__(self, groups, backend, max_num_seqs=4, num_blocks=120, *, caching=True):
        self.manager = KVCacheManager(
            groups,
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
        )
        self.table = MultiGroupBlockTable(
            self.manager.table_groups, max_num_seqs, MAX_MODEL_LEN, 256,
            stable_rows=True, backend=backend, mirror=self.manager.mirror,
        )  # fmt: skip
        self.groups = [g for g, group in enumerate(groups) if isinstance(group, MambaSpec)]
        self.num_drafts = [getattr(group, "num_speculative_blocks", 0) for group in groups]
        self.content = {}  # (group, block): the tokens behind the state
        self.tokens = {}  # of each sequence

    def add(self, tokens):
        seq = self.manager.add(tokens)
        self.tokens[seq] = list(tokens)
        self.manager.match_prefix(seq)
        return seq

    def step(self, seqs, counts, kept, lookahead=0):
        """Compute `counts` tokens of each sequence, drafts among them, of which `kept` stay.

        Returns the table's step, whose arrays stay as they are until the next one.
        """
        manager = self.manager
        served = manager.allocate_slots(seqs, counts, num_lookahead_tokens=lookahead)
        computed = served.num_computed_tokens
        starts = np.cumsum([0, *counts]).astype(np.int32)
        step = self.table.commit(len(seqs), starts, computed.astype(np.int32), rows=manager.rows(seqs))
        for g in self.groups:
            written = to_numpy(step.state_indices(g))
            before = to_numpy(step.initial_state_indices(g))
            columns = to_numpy(step.state_columns(g))
            for i, seq in enumerate(seqs):
                self.check_columns(g, seq, written[i].tolist(), int(columns[2, i]))
                done, end = int(computed[i]), int(computed[i]) + kept[i]
                if done:
                    assert self.content[g, int(before[i])] == self.tokens[seq][:done]
                else:
                    assert (int(before[i]), columns[0, i]) == (0, -1)
                self.content[g, int(written[i, 0])] = self.tokens[seq][:end]
        manager.copies_done(manager.take_block_copies())
        manager.commit(seqs, computed + np.array(kept))
        return step

    def check_columns(self, g, seq, written, column):
        """The step writes the running column and the drafts' behind it, the last of the row."""
        row = int(self.manager.rows([seq])[0])
        held = self.manager.block_table(g)[row, : self.manager.num_blocks_held(g)[row]].tolist()
        assert written == held[column:]
        assert len(written) == 1 + self.num_drafts[g]
        assert len({0, *written}) == 2 + self.num_drafts[g]
        assert self.manager.pool.is_writable(written).all()


def to_numpy(array):
    return array.get() if hasattr(array, "get") else np.asarray(array)


@pytest.mark.parametrize("first", [1, 7, 8, 9, 16])
def test_the_running_column_follows_the_tokens_over_boundaries(backend, first):
    """Blocks of 8: a prompt of `first` tokens, then token by token with two drafts, all rejected."""
    states = States([FullAttentionSpec(4), MambaSpec(8, "align", NUM_DRAFTS)], backend)
    seq = states.add(range(first))
    states.step([seq], [first], [first])
    for token in range(first, first + 20):
        states.manager.append([seq], [token, 500, 501], [3])
        states.tokens[seq] += [token, 500, 501]
        states.step([seq], [3], [1])
        states.manager.truncate(seq, token + 1)
        del states.tokens[seq][token + 1 :]


@pytest.mark.parametrize("seed", range(4))
def test_every_step_finds_the_state_that_the_last_one_left(backend, seed):
    """Chunked prompts, drafts kept and rejected, prefix hits, preemption; and a group of running states."""
    random = Random(seed)
    groups = [
        MambaSpec(8, "align", NUM_DRAFTS),
        FullAttentionSpec(4),
        MambaSpec(12, "align", NUM_DRAFTS),
    ]
    states = States(groups, backend)
    manager, seqs, num_hits = states.manager, [], 0
    for _ in range(150):
        if len(seqs) < 4 and random.random() < 0.5:
            seqs.append(states.add([random.randint(0, 1)] * random.randint(1, 50)))
        batch = random.sample(seqs, random.randint(0, len(seqs)))
        counts, kept = [], []
        for seq in batch:
            rest = len(states.tokens[seq]) - manager.num_computed_tokens([seq])[0]
            if manager.rows([seq])[0] < 0:
                hit = manager.match_prefix(seq)
                num_hits += hit > 0
                rest = len(states.tokens[seq]) - hit
            drafts = [7] * random.randint(0, NUM_DRAFTS) if rest == 1 else []
            manager.append([seq], drafts, [len(drafts)])
            states.tokens[seq] += drafts
            some = random.choice([24, random.randint(1, 24)])  # a prefix hit ends on 24 tokens
            counts.append(1 + len(drafts) if rest == 1 else min(some, int(rest)))
            kept.append(random.randint(1, counts[-1]) if drafts else counts[-1])
        if batch:
            states.step(batch, counts, kept, lookahead=random.randint(0, 12))
        for seq, count, num in zip(batch, counts, kept, strict=True):
            tokens = states.tokens[seq]
            manager.truncate(seq, len(tokens) - count + num)
            del tokens[len(tokens) - count + num :]
            if len(tokens) == manager.num_computed_tokens([seq])[0]:
                manager.append([seq], [1])
                tokens.append(1)
            if len(tokens) > MAX_MODEL_LEN - 4 or random.random() < 0.02:
                manager.free([seq])
                seqs.remove(seq)
            elif random.random() < 0.05:
                manager.preempt([seq])
    assert num_hits > 3


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 9])
def test_the_block_that_a_step_writes_is_the_one_that_the_next_step_starts_from(backend, caching, lookahead):
    """Blocks of 4, 3 tokens computed, a step of one: it ends in column 0 for table and manager."""
    states = States([MambaSpec(4, "align", 2)], backend, caching=caching)
    seq = states.add(range(3))
    states.step([seq], [3], [3])
    written = []
    for token in range(3, 9):
        states.manager.append([seq], [token])
        states.tokens[seq].append(token)
        step = states.step([seq], [1], [1], lookahead)
        before = to_numpy(step.initial_state_indices(0)).tolist()
        assert not written or before == written[-1:]
        written.append(int(to_numpy(step.state_indices(0))[0, 0]))
    assert written[0] == 1


def test_a_step_of_fewer_tokens_than_were_allocated_for_needs_another_allocation(backend):
    """The table looks for its state by the step's length, and NULL stands there until the state is moved."""
    states = States([MambaSpec(4, "align", 2)], backend)
    manager, seq = states.manager, states.add(range(20))
    manager.allocate_slots([seq], [14])
    step = states.table.commit(1, [0, 6], [0], rows=manager.rows([seq]))
    assert to_numpy(step.state_indices(0))[0, :2].tolist() == [0, 0]

    for count in (6, 2, 8, 1):  # each after an allocation for more
        manager.allocate_slots([seq], [count + 5])
        states.step([seq], [count], [count])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), caching=st.booleans(), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=2))
def test_states_are_found_whatever_is_drafted_kept_looked_ahead_or_cut_short(data, caching, sizes):
    """Brute force over contents: a step reads the state of all computed tokens, writes where nobody does.

    Sequences of equal prompts hit each other's states; allocations for other counts come before a step's.
    """
    numbers = st.integers(0, 9)
    drafts = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    groups = [MambaSpec(size, "align", num) for size, num in zip(sizes, drafts, strict=True)]
    states = States([*groups, FullAttentionSpec(2)], "numpy", num_blocks=300, caching=caching)
    manager, seqs = states.manager, []
    for _ in range(data.draw(st.integers(1, 10), label="steps")):
        if len(seqs) < 3 and data.draw(st.booleans(), label="starts"):
            seqs.append(states.add([7] * data.draw(st.integers(1, 20))))
        counts, kept = [], []
        for seq in seqs:
            done = int(manager.num_computed_tokens([seq])[0])
            if manager.rows([seq])[0] < 0:
                done = manager.match_prefix(seq)
            rest = len(states.tokens[seq]) - done
            counts.append(rest if rest == 1 else data.draw(st.integers(1, rest), label="chunk"))
            kept.append(counts[-1])
            if rest == 1:
                extra = [1] * data.draw(st.integers(0, 4), label="drafts")
                manager.append([seq], extra, [len(extra)])
                states.tokens[seq] += extra
                counts[-1] += len(extra)
                kept[-1] = data.draw(st.integers(1, counts[-1]), label="kept")
        for extra in data.draw(st.lists(numbers, max_size=2), label="allocations before"):
            manager.allocate_slots(seqs, [1 + extra] * len(seqs), num_lookahead_tokens=data.draw(numbers))
        if seqs:
            states.step(seqs, counts, kept, data.draw(numbers, label="lookahead"))
        for seq, count, num in zip(seqs, counts, kept, strict=True):
            tokens = states.tokens[seq]
            del tokens[len(tokens) - count + num :]
            manager.truncate(seq, len(tokens))
            if len(tokens) == manager.num_computed_tokens([seq])[0]:
                manager.append([seq], [1])
                tokens.append(1)
