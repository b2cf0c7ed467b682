"""A table in steady decode, and the kinds of step whose device work is counted."""

import numpy as np

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable

NUM_REQS = 32
KINDS = {
    "nothing new": ["slot_mapping"],
    "nothing new, states": ["slot_mapping", "state_indices"],
    "new blocks": ["apply_writes", "slot_mapping"],
    "new blocks, stable rows": ["apply_writes", "slot_mapping"],
    "another order of stable rows": ["gather_rows", "slot_mapping"],
}
"""Kernels of each kind of step, beside the one copy; for any number of groups."""

STATES = KVCacheGroupSpec(16, state_mode="align", num_speculative_blocks=1)


class Steady:
    """Decode steps of one kind over `num_groups` groups, their graphs captured."""

    def __init__(self, backend, kind, num_groups, stream):
        self.kind, self.stream = kind, stream
        self.table = MultiGroupBlockTable(
            [STATES if "states" in kind else KVCacheGroupSpec(16, (8,))] * num_groups,
            NUM_REQS,
            65536,
            256,
            stable_rows="stable" in kind,
            backend=backend,
        )
        counts = np.full((num_groups, NUM_REQS), 4, np.int32)
        self.rows = np.arange(NUM_REQS, dtype=np.int32)
        self.table.add_rows(self.rows, counts, np.arange(1, counts.sum() + 1, dtype=np.int32))
        self.num_steps = 0
        for _ in range(8):  # every ring buffer has its graph
            self.step()
        stream.synchronize()

    def step(self):
        """Commit one more step."""
        i, num_groups = self.num_steps, self.table.num_groups
        self.num_steps += 1
        if "new blocks" in self.kind:
            some = self.rows[i % 4 :: 4]
            ids = np.arange(1, num_groups * len(some) + 1, dtype=np.int32)
            self.table.append_rows(some, np.ones((num_groups, len(some)), np.int32), ids)
        shift = i if "another order" in self.kind else 0
        rows = {"rows": np.roll(self.rows, shift)} if self.table.stable_rows else {}
        starts, computed = np.arange(NUM_REQS + 1, dtype=np.int32), np.full(NUM_REQS, 40, np.int32)
        return self.table.commit(NUM_REQS, starts, computed, stream=self.stream, **rows)
