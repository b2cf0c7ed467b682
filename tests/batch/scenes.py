"""Small batches on each kind of rows, beside what every request of them should hold."""

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from pagedkv import FullAttentionSpec, KVCacheGroupSpec, KVCacheManager, MultiGroupBlockTable
from pagedkv.batch import AdmittedRequests, InputBatch, RunningRequests, SchedulerOutput
from pagedkv.batch import advance as a
from pagedkv.batch.written_rows import BatchOrderRows
from tests.tables import models
from tests.tables.models import positions_of, requests_of, slot_of, table_of, to_numpy

KINDS = ("batch order", "stable", "manager")
BLOCK_SIZES = (4, 6)
MAX_MODEL_LEN = 48


@dataclass
class Held:
    """One request as the scene knows it."""

    prefill: int
    scheduled: int
    computed: int = 0
    handle: int = -1
    blocks: list = field(default_factory=lambda: [[] for _ in BLOCK_SIZES])

    @property
    def length(self):
        return self.computed + self.scheduled

    def settle(self):
        self.computed, self.scheduled = self.length, 0


class Scene:
    """A batch that writes its rows itself; block ids are never used twice, so none can be mistaken."""

    def __init__(self, kind, backend="numpy", max_num_reqs=8, max_num_tokens=64, views=False, **options):
        self.is_stable = kind != "batch order"
        self.sizes = (max_num_reqs, MAX_MODEL_LEN, max_num_tokens)
        self.options = {"stable_rows": self.is_stable, "backend": backend}
        self.specs = [KVCacheGroupSpec(size, (size // 2,) if views else ()) for size in BLOCK_SIZES]
        self.batch = InputBatch(*self.make(), **options)
        self.table = self.batch.table
        self.requests, self.ids = {}, count(1)

    def make(self):
        return (MultiGroupBlockTable(self.specs, *self.sizes, **self.options),)

    def step(self, running=(), *, new=(), resumed=(), finished=(), preempted=()):
        """Take one step: request id -> tokens, for new ones also (prompt, tokens). No commit.

        A list of running ids is one token each.
        """
        running = running if isinstance(running, dict) else dict.fromkeys(running, 1)
        for held in self.requests.values():
            held.settle()
        for req_id in finished:
            self.requests.pop(req_id, None)
        self.give_up(preempted)
        for req_id, tokens in running.items():
            self.requests[req_id].scheduled = tokens
        for req_id, tokens in dict(new).items():
            self.requests[req_id] = Held(*tokens) if isinstance(tokens, tuple) else Held(tokens, tokens)
        for req_id, tokens in dict(resumed).items():
            held = self.requests[req_id]
            held.prefill, held.computed, held.scheduled = tokens, 0, tokens
            held.blocks = [[] for _ in BLOCK_SIZES]
        handles = np.array([self.requests[req_id].handle for req_id in running], np.int64)
        output = SchedulerOutput(
            RunningRequests(handles, np.array([*running.values()], np.int32), None, *self.grow(running)),
            self.admitted(list(new)),
            self.admitted(list(resumed), has_handles=False),
            list(finished),
            list(preempted),
        )
        for req_id, handle in zip(new, self.batch.update(output).tolist(), strict=True):
            self.requests[req_id].handle = handle

    def admitted(self, req_ids, *, has_handles=True):
        held = [self.requests[req_id] for req_id in req_ids]
        lengths = [one.prefill for one in held], [one.scheduled for one in held]
        counts, ids = self.grow(req_ids)
        return AdmittedRequests(
            req_ids, *lengths, None, counts, ids, self.handles(req_ids) if has_handles else None
        )

    def handles(self, req_ids):
        """Handles that new requests are given; the batch makes its own."""
        del req_ids

    def give_up(self, req_ids):
        for req_id in req_ids:
            self.requests[req_id].blocks = [[] for _ in BLOCK_SIZES]

    def grow(self, req_ids):
        """Blocks that requests take for their tokens of the step: counts [G, n] and flat ids."""
        counts, ids = np.zeros((len(BLOCK_SIZES), len(req_ids)), np.int32), []
        for g, size in enumerate(BLOCK_SIZES):
            for i, req_id in enumerate(req_ids):
                held = self.requests[req_id]
                counts[g, i] = -(-held.length // size) - len(held.blocks[g])
                ids += (taken := [next(self.ids) for _ in range(counts[g, i])])
                held.blocks[g] += taken
        return counts, np.array(ids, np.int32)

    def blocks_of(self, req_id):
        return self.requests[req_id].blocks

    def check(self, order, **options):
        """The batch stands in `order`, and a commit hands out what its requests hold; returns that step."""
        batch, held = self.batch, [self.requests[req_id] for req_id in order]
        assert batch.req_ids == order
        assert batch.num_reqs == len(order)
        assert batch.handles.tolist() == [one.handle for one in held]
        assert batch.num_computed_tokens.tolist() == [one.computed for one in held]
        assert batch.num_scheduled_tokens.tolist() == [one.scheduled for one in held]
        assert [batch.position_of(req_id) for req_id in order] == list(range(len(order)))
        assert set(self.requests) == {req_id for req_id in self.requests if req_id in batch}
        assert len(batch) == len(self.requests)
        step = batch.commit(**options)
        self.check_step(step, order)
        return step

    def check_step(self, step, order):
        held = [self.requests[req_id] for req_id in order]
        starts = np.cumsum([0, *[one.scheduled for one in held]])
        computed = [one.computed for one in held]
        positions, reqs = positions_of(starts, computed), requests_of(starts)
        num_reqs, num_tokens = step.batch.num_reqs, step.batch.num_actual_tokens
        padding = [0] * (num_reqs - len(held))
        for g, spec in enumerate(self.specs):
            ids = [self.blocks_of(req_id)[g] for req_id in order]
            shown = to_numpy(step[g].block_table_tensor)
            np.testing.assert_array_equal(
                table_of(ids + [[] for _ in padding], self.table.mirror.widths[g]), shown
            )
            world = self.table._committer.geometry.shard(g)
            slots = [
                slot_of(p, ids[r], spec, world, MAX_MODEL_LEN) for p, r in zip(positions, reqs, strict=True)
            ]
            slots += [-1] * (num_tokens - len(slots))
            assert slots == to_numpy(step[g].slot_mapping).tolist()
        assert to_numpy(step.batch.seq_lens).tolist() == [one.length for one in held] + padding
        assert to_numpy(step.batch.query_start_loc).tolist() == [*starts, *[starts[-1] for _ in padding]]
        assert step.batch.num_computed_tokens_cpu.tolist() == computed + padding
        assert step.batch.is_prefilling.tolist() == [one.computed < one.prefill for one in held] + [
            False for _ in padding
        ]


class ManagedScene(Scene):
    """A batch over a manager's sequences; every token is another one."""

    def make(self):
        groups = [FullAttentionSpec(size) for size in BLOCK_SIZES]
        most, length, _ = self.sizes
        self.manager = KVCacheManager(
            groups, 200, max_num_seqs=most, max_model_len=length, enable_prefix_caching=False
        )
        self.options["mirror"] = self.manager.mirror
        self.tokens = count(1)
        return *super().make(), self.manager

    def step(self, running=(), *, new=(), finished=(), **changes):
        for held in self.requests.values():
            if held.scheduled:
                self.manager.commit([held.handle], [held.length])
        over = {req_id: None for req_id in [*finished, *new] if req_id in self.requests}
        self.manager.free([self.requests[req_id].handle for req_id in over])
        super().step(running, new=new, finished=finished, **changes)

    def handles(self, req_ids):
        return [self.requests[req_id].handle for req_id in req_ids]

    def give_up(self, req_ids):
        self.manager.preempt(self.handles(req_ids))

    def grow(self, req_ids):
        for req_id in req_ids:
            held = self.requests[req_id]
            if held.handle < 0:
                held.handle = self.manager.add([next(self.tokens) for _ in range(held.prefill)])
            more = held.length - int(self.manager.num_tokens([held.handle])[0])
            if more > 0:
                self.manager.append([held.handle], [next(self.tokens) for _ in range(more)], [more])
            if held.scheduled:
                self.manager.allocate_slots([held.handle], [held.scheduled])
        return None, None

    def blocks_of(self, req_id):
        row = self.manager.rows([self.requests[req_id].handle])[0]
        counts = [self.manager.num_blocks_held(g)[row] for g in range(len(BLOCK_SIZES))]
        return [self.manager.block_table(g)[row, :n].tolist() for g, n in enumerate(counts)]


def scene_of(kind, *arguments, **options):
    return (ManagedScene if kind == "manager" else Scene)(kind, *arguments, **options)


def state_of(batch):
    """Copies of all that a refused call must leave alone."""
    states, rows = batch._states, batch._rows
    numbers, setup = states.numbers.copy(), states.setup.copy()
    numbers[:, a.STAMP] = setup[a.STEP] = 0  # which call looked at a request last
    held = rows._kept._held if isinstance(rows, BatchOrderRows) else {}
    kept = {slot: (one.counts, one.ids.tolist()) for slot, one in held.items()}
    free = (list(states._free or ()), states._generation, list(getattr(rows, "_free", ())))
    names = (dict(states._slots), dict(states._names), list(states.holes), states.committed.tolist())
    return numbers, setup, states.order.copy(), kept, free, names, models.everything(batch.table)


def assert_unchanged(before, batch):
    """Nothing of `state_of` has changed."""
    numbers, setup, order, kept, free, names, _ = state_of(batch)
    np.testing.assert_array_equal(before[0], numbers)
    np.testing.assert_array_equal(before[1], setup)
    np.testing.assert_array_equal(before[2], order)
    assert list(before[3].items()) == list(kept.items())
    assert before[4:6] == (free, names)
    models.assert_unchanged(before[6], batch.table)
