"""A kernel that keeps one state a token, over a manager's rows: what follows from the drafts that stay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import MultiGroupBlockTable
from pagedkv.allocation import KVCacheManager, MambaSpec
from tests.tables.models import to_numpy

MAX_MODEL_LEN = 64


class Engine:
    """Each block's state is the tuple of tokens that it has seen.

    After a of a step's drafts were accepted the engine copies the state of column a onto column 0 (`copies`),
    or its kernel starts the next step from column a of the last step's indices.
    """

    def __init__(self, groups, *, backend="numpy", caching=True, copies=True):
        self.manager = KVCacheManager(
            groups, 400, max_num_seqs=4, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=caching
        )
        self.table = MultiGroupBlockTable(
            self.manager.table_groups, 4, MAX_MODEL_LEN, 256,
            stable_rows=True, backend=backend, mirror=self.manager.mirror,
        )  # fmt: skip
        self.groups, self.copies = range(len(groups)), copies
        self.state = {}  # of each block
        self.tokens = {}  # of each sequence
        self.left = {}  # (sequence, group): what its last step wrote, and from which column the next starts

    def add(self, tokens):
        seq = self.manager.add(tokens)
        self.tokens[seq] = tuple(tokens)
        return seq

    def append(self, seq, tokens):
        self.manager.append([seq], tokens, [len(tokens)])
        self.tokens[seq] += tuple(tokens)

    def step(self, seqs, counts, accepted, order=None):
        """Compute `counts` tokens of each sequence; where `accepted` says so, all but one are drafts."""
        manager = self.manager
        computed = manager.allocate_slots(seqs, counts).num_computed_tokens
        copies = manager.take_block_copies()
        for source, target in copies.tolist():
            self.state[target] = self.state[source]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        step = self.table.commit(len(seqs), starts, computed, rows=manager.rows(seqs))
        for g in self.groups:
            written, before = to_numpy(step.state_indices(g)), to_numpy(step.initial_state_indices(g))
            for i in order or range(len(seqs)):
                kept = 0 if accepted[i] is None else accepted[i]
                line, start = written[i].tolist(), int(before[i])
                self.run(g, seqs[i], line, start, int(computed[i]), counts[i], accepted[i])
                if self.copies:
                    self.state[line[0]] = self.state[line[kept]]
                self.left[seqs[i], g] = line, 0 if self.copies else kept
        manager.copies_done(copies)
        for seq, done, count, kept in zip(seqs, computed.tolist(), counts, accepted, strict=True):
            end = done + (count if kept is None else 1 + kept)
            if kept is not None:
                manager.truncate(seq, end)
                self.tokens[seq] = self.tokens[seq][:end]
            manager.commit([seq], [end])

    def run(self, g, seq, written, before, done, count, accepted):
        """Make one request's states from the one before, which must be that of all computed tokens."""
        last, column = self.left.get((seq, g), ([before], 0))
        assert before == last[0], "not the block behind column 0 of the step before"
        seen = self.state[last[column]] if done else ()
        assert seen == self.tokens[seq][:done], "not the state of the computed tokens"
        assert (before == 0) == (done == 0)
        if accepted is None:
            self.state[written[0]] = self.tokens[seq][: done + count]
            return
        for j in range(count):
            self.state[written[j]] = self.tokens[seq][: done + 1 + j]

    def leave(self, seq, *, end):
        """Free a sequence, or preempt it; nobody else has to let go of anything."""
        (self.manager.free if end else self.manager.preempt)([seq])
        for g in self.groups:
            self.left.pop((seq, g), None)

    def fork(self, seq):
        child = int(self.manager.fork(seq)[0])
        self.tokens[child] = self.tokens[seq]
        return child


def verified(engine, accepted, prompt=2, drafts=2):
    """A sequence whose second step has verified two drafts; returns it and what that step wrote."""
    seq = engine.add(range(prompt))
    engine.step([seq], [prompt], [None])
    engine.append(seq, [90, *range(91, 91 + drafts)])
    engine.step([seq], [1 + drafts], [accepted])
    return seq, engine.left[seq, 0][0]


@pytest.mark.parametrize("group", [MambaSpec(4, "align", 2), MambaSpec(4, "none", 2)], ids=["align", "none"])
@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("copies", [True, False], ids=["copied", "started from"])
def test_the_state_of_the_last_accepted_draft_is_in_its_column(backend, group, accepted, copies):
    engine = Engine([group], backend=backend, caching=False, copies=copies)

    seq, written = verified(engine, accepted)

    end = 3 + accepted
    assert engine.state[written[accepted]] == engine.tokens[seq] == (0, 1, 90, 91, 92)[:end]
    assert engine.state[written[0]] == engine.tokens[seq][: end if copies else 3]
    assert engine.manager.num_computed_tokens([seq]).tolist() == [end]
    engine.append(seq, [7, 8, 9])
    engine.step([seq], [3], [2])  # asserts what it reads


@pytest.mark.parametrize("mode", ["align", "none"])
def test_the_next_step_names_column_0_of_the_last_one_however_many_drafts_stay(mode):
    """So without a copy it finds the state after the first token alone."""
    engine = Engine([MambaSpec(4, mode, 2)], caching=False, copies=False)
    seq, written = verified(engine, 2)
    engine.left.clear()  # forget where the state is
    engine.append(seq, [7])

    with pytest.raises(AssertionError, match="not the state of the computed tokens"):
        engine.step([seq], [1], [None])

    step = engine.table.commit(1, [0, 1], [5], rows=[0])
    assert to_numpy(step.initial_state_indices(0)).tolist() == written[:1]
    assert engine.state[written[0]] == (0, 1, 90)


def test_a_boundary_is_published_with_column_0_and_must_be_copied_there():
    """Tokens 2 to 4 are verified and 2 and 3 stay: block 0 of 4 tokens is full, and others hit it."""
    for copies in (True, False):
        engine = Engine([MambaSpec(4, "align", 2)], copies=copies)
        seq, _ = verified(engine, 1)
        other = engine.add([*engine.tokens[seq], 5])

        assert engine.manager.match_prefix(other) == 4
        if copies:
            engine.step([other], [1], [None])
            continue
        with pytest.raises(AssertionError, match="not the state of the computed tokens"):
            engine.step([other], [1], [None])


@pytest.mark.parametrize(("mode", "found"), [("align", 0), ("none", 1)])
def test_an_aligned_state_is_settled_before_the_next_step_is_allocated(mode, found):
    """Of a step in flight the block moves on with the next allocation; a running state stays in column 0."""
    engine = Engine([MambaSpec(4, mode)], caching=False)
    seq = engine.add(range(9))
    engine.manager.allocate_slots([seq], [3])
    engine.manager.allocate_slots([seq], [3 + 2])

    step = engine.table.commit(1, [0, 2], [3], rows=engine.manager.rows([seq]))

    assert to_numpy(step.initial_state_indices(0)).tolist() == [found]


def test_nobody_else_gets_the_blocks_of_drafts_until_the_sequence_leaves():
    engine = Engine([MambaSpec(4, "align", 2)], caching=False)
    free = engine.manager.num_free_blocks
    seq, _ = verified(engine, 1, prompt=3)
    assert free - engine.manager.num_free_blocks == 3  # the state and two drafts'; the one before is free

    engine.leave(seq, end=True)

    assert engine.manager.num_free_blocks == free


def test_a_step_that_is_cut_short_may_give_back_the_block_of_an_accepted_draft():
    """Then only the state in column 0 is still there: who copies loses nothing."""
    engine = Engine([MambaSpec(4, "align", 2)], caching=False)
    manager = engine.manager
    seq, written = verified(engine, 1, prompt=3)
    engine.append(seq, [7])
    manager.append([seq], [8] * 8, [8])
    manager.allocate_slots([seq], [9])

    manager.allocate_slots([seq], [1])

    assert written[1] in manager.pool.free_block_ids()
    manager.truncate(seq, len(engine.tokens[seq]))
    engine.step([seq], [1], [None])


MODES = {
    "align, cached": ("align", True, True),
    "align, copied": ("align", False, True),
    "align, started from": ("align", False, False),
    "none, copied": ("none", False, True),
    "none, started from": ("none", False, False),
}


@pytest.mark.parametrize(("mode", "caching", "copies"), MODES.values(), ids=MODES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=2))
def test_every_step_finds_the_state_of_what_was_accepted(mode, caching, copies, data, sizes):
    """Chunks, drafts, hits on each other's prompts, forks, preemptions and requests that rest for a step."""
    most = data.draw(st.integers(0, 3), label="most drafts")
    engine = Engine([MambaSpec(size, mode, most) for size in sizes], caching=caching, copies=copies)
    manager, seqs = engine.manager, []
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        if len(seqs) < 4 and data.draw(st.booleans(), label="starts"):
            seqs.append(engine.add([7] * data.draw(st.integers(1, 14))))
        batch = [seq for seq in seqs if data.draw(st.integers(0, 3), label="runs")]
        counts, accepted = [], []
        for seq in batch:
            waits = manager.rows([seq])[0] < 0
            done = manager.match_prefix(seq) if waits else int(manager.num_computed_tokens([seq])[0])
            rest = len(engine.tokens[seq]) - done
            drafts = data.draw(st.integers(-1, most), label="drafts") if rest == 1 else -1
            counts.append(data.draw(st.integers(1, rest), label="chunk") if drafts < 0 else 1 + drafts)
            accepted.append(None if drafts < 0 else data.draw(st.integers(0, drafts), label="accepted"))
            if drafts > 0:
                engine.append(seq, data.draw(st.lists(st.integers(6, 7), min_size=drafts, max_size=drafts)))
        if batch and copies and data.draw(st.booleans(), label="is cut short"):
            manager.allocate_slots(batch, [count + data.draw(st.integers(0, 9)) for count in counts])
        if batch:
            order = data.draw(st.permutations(range(len(batch))), label="order of requests")
            engine.step(batch, counts, accepted, order)
        for seq in list(seqs):
            if len(engine.tokens[seq]) == manager.num_computed_tokens([seq])[0]:
                engine.append(seq, [7])
            runs = manager.rows([seq])[0] >= 0
            fate = data.draw(st.integers(0, 15), label="fate")
            if fate == 0 or len(engine.tokens[seq]) > MAX_MODEL_LEN - 4:
                engine.leave(seq, end=True)
                seqs.remove(seq)
            elif fate == 1 and runs:
                engine.leave(seq, end=False)
            elif fate == 2 and runs and copies and len(seqs) < 4:
                seqs.append(engine.fork(seq))
    for seq in seqs:
        engine.leave(seq, end=True)
    manager.copies_done(manager.take_block_copies())
    assert manager.usage == 0
