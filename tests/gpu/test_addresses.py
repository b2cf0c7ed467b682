"""Addresses over a thousand steps with churn, padding and a growth of the staging; and their values."""

import numpy as np
import pytest

from pagedkv import KVCacheGroupSpec

from .pairs import Pair, arrays_of, assert_same, values_of

pytestmark = pytest.mark.gpu

NUM_STEPS = 1000
NUM_ROWS = 16


class Churning(Pair):
    """Requests come, grow, move and go; at step 500 one comes with a prompt that outgrows the staging."""

    def __init__(self, backend, stable_rows):
        groups = [KVCacheGroupSpec(16, (4, (8, 3)), sliding_window=64), KVCacheGroupSpec(8)]
        super().__init__(backend, groups, NUM_ROWS, 32_768, 256, stable_rows=stable_rows)
        self.do("outputs", 2)
        self.rng = np.random.default_rng(4)

    def change(self, i):
        row = int(self.rng.integers(NUM_ROWS))
        if i == NUM_STEPS // 2:
            self.do("add_row", (np.arange(1, 1501), np.arange(1, 3001)), 0)
        elif i % 4 == 0:
            self.do("add_row", ([1 + i, 2 + i], [3 + i]), row)
        elif i % 4 == 1:
            self.do("move_row", row, (row + 5) % NUM_ROWS)
        elif i % 4 == 2:
            self.do("clear_row", row)
        else:
            rows = np.arange(NUM_ROWS, dtype=np.int32)[i % 3 :: 3]
            ids = np.arange(i + 1, i + 1 + 2 * len(rows), dtype=np.int32)
            self.do("append_rows", rows, np.ones((2, len(rows)), np.int32), ids)

    def step(self, i, stream):
        self.change(i)
        num_reqs = i % NUM_ROWS + 1 if self.device.stable_rows else NUM_ROWS
        rows = {}
        if self.device.stable_rows:
            rows["rows"] = self.rng.integers(-1, NUM_ROWS, num_reqs).astype(np.int32)
        starts = np.arange(num_reqs + 1, dtype=np.int32) * (i % 7)
        computed = self.rng.integers(0, 40, num_reqs).astype(np.int32)
        padding = {"num_reqs_padded": NUM_ROWS, "num_tokens_padded": 128}
        return self.commit(num_reqs, starts, computed, **rows, **padding, out=i % 2, stream=stream)


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
def test_addresses_never_change(gpu_backend, cupy, stream, stable_rows):
    pair = Churning(gpu_backend, stable_rows)
    table, pool = pair.device, cupy.get_default_memory_pool()
    seen, used, words = set(), None, table._committer.staging.words.size
    for i in range(NUM_STEPS):
        expected, step = pair.step(i, stream)
        arrays = arrays_of(step, table)
        persistent = [table[g].get_device_tensor(3) for g in range(2)] + [table[1].slot_mapping]
        seen.add((i % 2, *(array.data.ptr for array in [*arrays.values(), *persistent])))
        if i % 50 == 0 or abs(i - NUM_STEPS // 2) < 6:
            stream.synchronize()
            assert_same(expected, values_of(step, table), f"step {i}")
        if i == NUM_STEPS - 200:
            used = pool.used_bytes()
    assert words < table._committer.staging.words.size, "the staging has grown on the way"
    assert len(seen) == 2, "one set of addresses for each of the two output sets"
    assert used == pool.used_bytes(), "steady steps allocate no device memory"
