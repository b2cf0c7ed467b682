"""Random scheduler steps, refused ones among them: the batch and its rows always equal the model's.

PAGEDKV_UPDATE_EXAMPLES sets the number of runs.
"""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import MultiGroupBlockTable, StaleSequenceError
from pagedkv.batch import AdmittedRequests, InputBatch, RunningRequests, SchedulerOutput
from tests.tables.models import table_of

from .scenes import assert_unchanged, state_of
from .update_model import Decision, GoOn, Model, Start

SETTINGS = settings(max_examples=int(os.environ.get("PAGEDKV_UPDATE_EXAMPLES", "120")), deadline=None)
BLOCK_SIZES = (4, 6, 16, 3)
NAMES = [*"abcdefghij"]
MAX_TOKENS = 200


class Run:
    """A batch beside its model."""

    def __init__(self, random, stable_rows):
        self.random = random
        self.max_num_reqs = random.randint(1, 6)
        self.num_groups = random.randint(2, 4)
        self.thresholds = random.choice([(None, None), (1, None), (1, 3)])
        groups, sizes = BLOCK_SIZES[: self.num_groups], (self.max_num_reqs, 40, MAX_TOKENS)
        options = {"token_alignment": None, "stable_rows": stable_rows, "backend": "numpy"}
        self.table = MultiGroupBlockTable(groups, *sizes, **options)
        self.widths, self.is_stable = self.table.mirror.widths, stable_rows
        self.batch = InputBatch(
            self.table, decode_threshold=self.thresholds[0], short_extend_threshold=self.thresholds[1]
        )
        self.model, self.stale = Model(), []

    # --- decisions ----------------------------------------------------------------------------

    def some(self, names, share):
        return [name for name in names if self.random.random() < share]

    def decide(self):
        """A step that can be taken."""
        known, standing = self.model.known, self.model.order
        finished = self.some([*known, "unknown"], 0.1)
        preempted = self.some(known, 0.1)
        alive = [name for name in known if name not in finished]
        lost = [name for name in alive if known[name].blocks is None or name in preempted]
        # One that rests or runs may be resumed as well, and its old blocks are then nobody's.
        resumed = self.some(lost, 0.5) + self.some([name for name in alive if name not in lost], 0.15)
        new = self.some([name for name in NAMES if name not in alive], 0.2)
        new += [name for name in self.some(alive, 0.05) if name not in resumed]
        staying = [name for name in alive if name not in [*lost, *resumed, *new]]
        running = [name for name in staying if self.random.random() < (0.9 if name in standing else 0.5)]
        self.random.shuffle(running)
        new, resumed = self.fit(finished, preempted, running, new, resumed)
        return Decision(
            {name: self.go_on(name) for name in running},
            {name: self.start() for name in new},
            {name: self.start() for name in resumed},
            finished,
            preempted,
        )

    def fit(self, finished, preempted, running, new, resumed):
        """As many of those that start as there are positions, and rows where these are kept."""
        known = self.model.known
        del running[self.max_num_reqs :]
        room = self.max_num_reqs - len(running)
        if self.is_stable:
            keep = [name for name in known if known[name].blocks is not None]
            room = min(room, self.max_num_reqs - len([n for n in keep if n not in [*finished, *preempted]]))
        new = new[: max(room, 0)]
        return new, resumed[: max(room - len(new), 0)]

    def ids(self, most):
        return [self.random.randint(1, 99) for _ in range(self.random.randint(0, max(most, 0)))]

    def start(self):
        blocks = [self.ids(min(width, 4)) for width in self.widths]
        computed = self.random.choice([0, 0, self.random.randint(1, 9)])
        return Start(self.random.randint(0, 12), computed, self.random.randint(0, 6), blocks)

    def go_on(self, name):
        held = self.model.known[name].blocks
        some = self.random.random() < 0.3
        blocks = [
            self.ids(min(width - len(ids), 2)) if some else []
            for width, ids in zip(self.widths, held, strict=True)
        ]
        return GoOn(self.random.choice([1, 1, 1, 0, 2, 5]), None, blocks)

    # --- as a scheduler writes them -------------------------------------------------------------

    def written(self, decision):
        running = decision.running
        handles = [self.model.known[name].handle for name in running]
        scheduled = [entry.scheduled for entry in running.values()]
        computed = [entry.computed for entry in running.values()] if self.counts_given else None
        blocks = self.flat(running.values())
        if not blocks[0].any() and self.random.random() < 0.5:
            blocks = (None, None)
        if self.random.random() < 0.5:  # ready arrays, for the short way
            handles, scheduled = np.array(handles, np.int64), np.array(scheduled, np.int32)
            computed = None if computed is None else np.array(computed, np.int32)
        return SchedulerOutput(
            RunningRequests(handles, scheduled, computed, *blocks),
            self.admitted(decision.new),
            self.admitted(decision.resumed),
            decision.finished,
            decision.preempted,
        )

    def flat(self, entries):
        entries = list(entries)
        counts = [[len(entry.blocks[g]) for entry in entries] for g in range(self.num_groups)]
        ids = [block for g in range(self.num_groups) for entry in entries for block in entry.blocks[g]]
        counts = np.array(counts, np.int32).reshape(self.num_groups, len(entries))
        return counts, np.array(ids, np.int32)

    def admitted(self, starts):
        entries = starts.values()
        numbers = [[getattr(e, name) for e in entries] for name in ("prefill", "scheduled", "computed")]
        return AdmittedRequests(list(starts), *numbers, *self.flat(entries))

    # --- steps ----------------------------------------------------------------------------------

    def step(self):
        decision = self.decide()
        self.counts_given = self.random.random() < 0.3
        if self.counts_given:
            for name, entry in decision.running.items():
                one = self.model.known[name]
                entry.computed = self.random.randint(one.computed, one.computed + one.scheduled)
        output = self.written(decision)
        if self.random.random() < 0.4:
            self.refuse(output)
        before = {name: one.handle for name, one in self.model.known.items()}
        handles = self.batch.update(output).tolist()
        self.model.take(decision)
        for name, handle in zip(decision.new, handles, strict=True):
            self.model.known[name].handle = handle
        after = [one.handle for one in self.model.known.values()]
        assert len(set(after)) == len(after)
        self.stale += [handle for handle in before.values() if handle not in after]
        assert not set(self.stale) & set(after)

    def meddle(self):
        """What an engine may do between two steps."""
        batch, model, n = self.batch, self.model, len(self.model.order)
        if self.random.random() < 0.2:
            batch.dummy(1, 1)
            if not self.is_stable:
                model.rest()
        elif n and self.random.random() < 0.2:
            name = self.random.choice(model.order)
            assert batch.remove_request(name) == model.order.index(name)
            batch.condense()
            self.stale.append(model.known[name].handle)
            model.remove(name)
        elif n and self.random.random() < 0.2:
            places = (self.random.randrange(n), self.random.randrange(n))
            batch.swap(*places)
            model.swap(*places)

    def refuse(self, output):
        """Break a good step in one place: it is refused, and nothing has changed."""
        broken, errors = self.random.choice(BREAKS)(self, output)
        if broken is None:
            return
        before = state_of(self.batch)
        with pytest.raises(errors):
            self.batch.update(broken)
        assert_unchanged(before, self.batch)

    def check(self, *, commits):
        batch, model = self.batch, self.model
        if self.thresholds[0] is None:
            assert batch.req_ids == model.order
        else:
            assert sorted(batch.req_ids) == sorted(model.order)
            model.order = batch.req_ids
            classes = [self.class_of(model.known[name]) for name in model.order]
            assert classes == sorted(classes)
        held = [model.known[name] for name in model.order]
        assert batch.handles.tolist() == [one.handle for one in held]
        assert batch.num_computed_tokens.tolist() == [one.computed for one in held]
        assert batch.num_scheduled_tokens.tolist() == [one.scheduled for one in held]
        assert batch.previous_positions.tolist() == [model.committed.get(one.handle, -1) for one in held]
        assert len(batch) == len(model.known)
        assert all(batch.handle_of(name) == one.handle for name, one in model.known.items())
        if commits:
            self.check_step(batch.commit(num_reqs_padded=self.max_num_reqs), held)
            model.commit()
        self.check_rows()

    def class_of(self, one):
        decode, short = self.thresholds
        if one.computed == 0:
            return "d prefill"
        if one.scheduled <= decode:
            return "a decode"
        return "b short" if short is not None and one.scheduled <= short else "c long"

    def check_step(self, step, held):
        empty = [[] for _ in range(self.max_num_reqs - len(held))]
        for g, group in enumerate(step):
            expected = table_of([one.blocks[g] for one in held] + empty, self.widths[g])
            np.testing.assert_array_equal(expected, group.block_table_tensor)
        assert step.batch.seq_lens.tolist() == [one.computed + one.scheduled for one in held] + [
            0 for _ in empty
        ]
        prefilling = [one.computed < one.prefill for one in held] + [False for _ in empty]
        assert step.batch.is_prefilling.tolist() == prefilling

    def check_rows(self):
        """Each row of the tables is that of one request, or empty."""
        rows = dict(zip(self.batch.rows.tolist(), self.model.order, strict=True))
        assert len(rows) == len(self.model.order)
        for g, width in enumerate(self.widths):
            resting = [] if not self.is_stable else [
                one.blocks[g]
                for name, one in self.model.known.items()
                if name not in self.model.order and one.blocks
            ]  # fmt: skip
            filled = [ids for ids in self.table.mirror.block_table(g).tolist() if any(ids)]
            standing = [self.model.known[name].blocks[g] for name in self.model.order]
            expected = table_of([ids for ids in [*standing, *resting] if ids], width).tolist()
            assert sorted(filled) == sorted(expected)
            for row, name in rows.items():
                assert self.table.mirror.counts[g, row] == len(self.model.known[name].blocks[g])


# --- one thing wrong --------------------------------------------------------------------------------


def on_running(change, *errors):
    """A fault that needs a running request."""

    def broken(run, output):
        running = output.running
        if not len(running.handles):
            return None, None
        return output._replace(running=change(run, running)), errors or ValueError

    return broken


def stale_handle(run, running):
    old = run.random.choice([*run.stale, -1, 1 << 40])
    return running._replace(handles=[*list(running.handles)[:-1], old])


def too_many_blocks(run, running):
    counts = np.zeros((run.num_groups, len(running.handles)), np.int32)
    counts[-1, -1] = run.widths[-1] + 1
    return running._replace(num_new_blocks=counts, block_ids=np.ones(counts[-1, -1], np.int32))


def bad_id(run, running):
    counts = np.zeros((run.num_groups, len(running.handles)), np.int32)
    counts[0, 0] = 1
    return running._replace(num_new_blocks=counts, block_ids=np.array([-7], np.int32))


def twice(run, running):
    return running._replace(
        handles=[*running.handles, running.handles[0]],
        num_scheduled_tokens=[*running.num_scheduled_tokens, 1],
        num_computed_tokens=None,
        num_new_blocks=None,
        block_ids=None,
    )


def last_tokens(value):
    def change(run, running):
        del run
        return running._replace(num_scheduled_tokens=[*list(running.num_scheduled_tokens)[:-1], value])

    return change


def too_long(run, running):
    """With what is computed, one token past int32; or all by itself."""
    del run
    n = len(running.handles)
    return running._replace(num_computed_tokens=[2**31 - 1] * n, num_scheduled_tokens=[0] * (n - 1) + [1])


def lost_one(run, output):
    """A request that was preempted comes back as one that runs."""
    lost = [one.handle for one in run.model.known.values() if one.blocks is None]
    if not lost:
        return None, None
    return SchedulerOutput(RunningRequests(lost[:1], [1])), ValueError


def one_over(run, output):
    """A running request that is finished as well, or preempted."""
    if not len(output.running.handles):
        return None, None
    name = next(n for n, one in run.model.known.items() if one.handle == output.running.handles[0])
    kind = run.random.choice(["finished", "preempted"])
    return output._replace(**{kind: [*getattr(output, kind), name]}), ValueError


def unknown(kind):
    def broken(run, output):
        if kind == "preempted":
            return output._replace(preempted=[*output.preempted, "unknown"]), LookupError
        return output._replace(resumed=AdmittedRequests(["unknown"], [1], [1])), LookupError

    return broken


def too_many_new(run, output):
    names = [f"more {i}" for i in range(run.max_num_reqs + 1)]
    ones = [1] * len(names)
    return output._replace(new=AdmittedRequests(names, ones, ones)), ValueError


def a_row_too_long(run, output):
    counts = np.zeros((run.num_groups, 1), np.int32)
    counts[0] = run.widths[0] + 1
    new = AdmittedRequests(["more"], [1], [1], None, counts, np.ones(counts.sum(), np.int32))
    return output._replace(new=new), ValueError


BREAKS = [
    on_running(stale_handle, StaleSequenceError),
    on_running(too_many_blocks),
    on_running(bad_id),
    on_running(twice),
    on_running(too_long),
    lost_one,
    on_running(last_tokens(-1)),
    on_running(last_tokens(MAX_TOKENS + 1)),
    on_running(last_tokens(1.5), TypeError, ValueError),
    one_over,
    unknown("preempted"),
    unknown("resumed"),
    too_many_new,
    a_row_too_long,
]


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable"])
@SETTINGS
@given(st.randoms(use_true_random=False))
def test_a_batch_equals_its_model_after_every_step(stable_rows, random):
    run = Run(random, stable_rows)
    for _ in range(random.randint(1, 12)):
        run.step()
        run.check(commits=random.random() < 0.7)
        run.meddle()
