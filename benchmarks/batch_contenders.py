"""Who prepares a decode step of a whole batch: InputBatch in one call, or an engine's own loop over requests.

Each request's context is such that a sixteenth of them takes a block in every group each step. The loop keeps
a dict per request, as engines do, calls the same tables once for each request that takes a block, and builds
the same arrays and the same metadata; so the device's side of a step is the same.
"""

from types import SimpleNamespace

import numpy as np

import pagedkv
from pagedkv.batch import AdmittedRequests, InputBatch, RunningRequests, SchedulerOutput

BLOCK_SIZE = 16


class DecodeTraffic:
    """Block ids and counts of decode steps, as a scheduler hands them out; made ahead."""

    steps_until_full = 15 * BLOCK_SIZE

    def __init__(self, num_reqs, context, num_groups):
        self.num_reqs, self.num_groups = num_reqs, num_groups
        self.blocks = context // BLOCK_SIZE
        self.max_model_len = context + self.steps_until_full + BLOCK_SIZE
        lag = np.arange(num_reqs) % BLOCK_SIZE
        self.num_computed = (context - lag).astype(np.int32)
        self.rng = np.random.default_rng(7)
        self.ones = np.ones(num_reqs, np.int32)
        self.takers = [np.flatnonzero(lag == turn) for turn in range(BLOCK_SIZE)]
        self.counts = []
        for takers in self.takers:
            counts = np.zeros((num_groups, num_reqs), np.int32)
            counts[:, takers] = 1
            self.counts.append(counts)

    def ids(self, num):
        return self.rng.integers(1, 1 << 24, num, dtype=np.int32)

    def step(self, step):
        """(counts [G, n], ids, positions that take a block) of a step."""
        turn = step % BLOCK_SIZE
        return self.counts[turn], self.ids(self.num_groups * self.takers[turn].size), self.takers[turn]


def table_of(traffic, backend, *, stable_rows=False, mirror=None):
    groups = [BLOCK_SIZE] * traffic.num_groups
    return pagedkv.MultiGroupBlockTable(
        groups,
        traffic.num_reqs,
        traffic.max_model_len,
        max(traffic.num_reqs, 8192),
        backend=backend,
        stable_rows=stable_rows,
        mirror=mirror,
    )


class OneCall:
    """`update`, `commit` and the metadata of every group."""

    def __init__(self, traffic, stream, backend, *, stable_rows=False):
        self.traffic, self.stream = traffic, stream
        self.table = table_of(traffic, backend, stable_rows=stable_rows)
        self.batch = InputBatch(self.table)
        self.handles = np.empty(0, np.int64)
        self.reset()
        self.table.warmup()

    def reset(self):
        traffic = self.traffic
        n, blocks = traffic.num_reqs, traffic.blocks
        names = [f"request {i}" for i in range(n)]
        counts = np.full((traffic.num_groups, n), blocks, np.int32)
        new = AdmittedRequests(
            names,
            traffic.num_computed - 8,
            traffic.ones,
            traffic.num_computed - 1,
            counts,
            traffic.ids(counts.sum()),
        )
        self.handles = self.batch.update(SchedulerOutput(new=new, finished=self.batch.req_ids))
        self.batch.commit(stream=self.stream)

    def step(self, counts, ids, _takers):
        running = RunningRequests(self.handles, self.traffic.ones, None, counts, ids)
        self.batch.update(SchedulerOutput(running))
        return self.batch.commit(stream=self.stream)


class Managed:
    """The same with a KVCacheManager, which takes the blocks and writes the rows itself; its calls count."""

    def __init__(self, traffic, stream, backend):
        self.traffic, self.stream = traffic, stream
        groups = [pagedkv.FullAttentionSpec(BLOCK_SIZE)] * traffic.num_groups
        per_request = -(-traffic.max_model_len // BLOCK_SIZE) * traffic.num_groups
        self.manager = pagedkv.KVCacheManager(
            groups,
            1 + traffic.num_reqs * per_request,
            max_num_seqs=traffic.num_reqs,
            max_model_len=traffic.max_model_len,
            enable_prefix_caching=False,
        )
        self.table = table_of(traffic, backend, stable_rows=True, mirror=self.manager.mirror)
        self.batch = InputBatch(self.table, self.manager)
        self.handles = np.empty(0, np.int64)
        self.tokens = np.zeros(traffic.num_reqs, np.int32)
        self.reset()
        self.table.warmup()

    def reset(self):
        traffic, manager = self.traffic, self.manager
        if self.handles.size:
            manager.free(self.handles)
        self.computed = traffic.num_computed.copy()
        prompts = [np.zeros(num, np.int32) for num in self.computed]
        self.handles = np.array([manager.add(prompt) for prompt in prompts], np.int64)
        manager.allocate_slots(self.handles, self.computed)
        manager.commit(self.handles, self.computed)
        names = [f"request {i}" for i in range(traffic.num_reqs)]
        new = AdmittedRequests(names, self.computed, 0 * self.computed, self.computed, handles=self.handles)
        self.batch.update(SchedulerOutput(new=new, finished=self.batch.req_ids))
        self.batch.commit(stream=self.stream)

    def step(self, _counts, _ids, _takers):
        manager, ones = self.manager, self.traffic.ones
        manager.append(self.handles, self.tokens)
        manager.allocate_slots(self.handles, ones)
        self.batch.update(SchedulerOutput(RunningRequests(self.handles, ones)))
        metadata = self.batch.commit(stream=self.stream)
        self.computed += 1
        manager.commit(self.handles, self.computed)
        return metadata


class PerRequest:
    """The same step in calls and loops per request."""

    def __init__(self, traffic, stream, backend):
        self.traffic, self.stream = traffic, stream
        self.table = table_of(traffic, backend)
        self.reset()
        self.table.warmup()

    def reset(self):
        traffic = self.traffic
        self.states = []
        for row in range(traffic.num_reqs):
            self.table.add_row([traffic.ids(traffic.blocks) for _ in range(traffic.num_groups)], row)
            computed = int(traffic.num_computed[row]) - 1
            self.states.append({"row": row, "computed": computed, "scheduled": 1, "prompt": computed - 7})
        self._commit()

    def step(self, _counts, ids, takers):
        new = ids.reshape(self.traffic.num_groups, -1)
        ids_of = {int(row): new[:, i] for i, row in enumerate(takers)}
        for state in self.states:
            state["computed"] += state["scheduled"]
            state["scheduled"] = 1
            if state["row"] in ids_of:
                self.table.append_row([[block] for block in ids_of[state["row"]]], state["row"])
        return self._commit()

    def _commit(self):
        starts, computed, lengths, prefilling = [0], [], [], []
        for state in self.states:
            starts.append(starts[-1] + state["scheduled"])
            computed.append(state["computed"])
            lengths.append(state["computed"] + state["scheduled"])
            prefilling.append(state["computed"] < state["prompt"])
        query_start_loc = np.array(starts, np.int32)
        num_computed = np.array(computed, np.int32)
        step = self.table.commit(self.traffic.num_reqs, query_start_loc, num_computed, stream=self.stream)
        shared = {
            "query_start_loc": step.query_start_loc,
            "query_start_loc_cpu": query_start_loc,
            "seq_lens": step.seq_lens,
            "seq_lens_cpu_upper_bound": np.array(lengths, np.int32),
            "num_computed_tokens_cpu": num_computed,
            "positions": step.positions,
            "token_to_req_indices": step.token_to_req_indices,
            "is_prefilling": np.array(prefilling),
            "num_reqs": step.num_reqs_padded,
            "num_actual_tokens": step.num_tokens_padded,
            "max_query_len": max(state["scheduled"] for state in self.states),
            "max_seq_len": max(lengths),
        }
        return [
            SimpleNamespace(
                **shared, block_table_tensor=step.block_table(g), slot_mapping=step.slot_mapping(g)
            )
            for g in range(self.traffic.num_groups)
        ]
