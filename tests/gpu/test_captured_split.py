"""Micro-batches inside a consumer's graph: the kernels of a split are replayed with the step."""

import numpy as np
import pytest

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.batch.micro_batches import MicroBatches
from pagedkv.batch.step_metadata import step_metadata

pytestmark = pytest.mark.gpu

STARTS = np.arange(0, 17, 4, dtype=np.int32)
"""Four requests of four tokens: the cut at 8 lies between two of them."""


def table_on(backend):
    groups = [KVCacheGroupSpec(4, (2,)), KVCacheGroupSpec(8, cp_sharded=False)]
    world = ContextParallel(2, 1)
    table = MultiGroupBlockTable(groups, 4, 64, 16, context_parallel=world, backend=backend)
    for row in range(4):
        table.add_row((range(10 * row + 1, 10 * row + 9), range(10 * row + 101, 10 * row + 109)), row)
    return table


@pytest.mark.parametrize("cut", [8, 6])
def test_each_replay_splits_its_own_step(gpu_backend, cupy, stream, cut):
    host, table, rng = table_on("numpy"), table_on(gpu_backend), np.random.default_rng(3)
    captured, buffers, on_host = table.captured_step(4, 16), MicroBatches(table), MicroBatches(host)
    first = np.zeros(4, np.int32)
    metadata = step_metadata(table.commit(4, STARTS, first, stream=stream), STARTS, first)
    metadata.split([cut], buffers, stream)
    stream.synchronize()
    copies = table.num_h2d_copies

    stream.begin_capture()
    captured.enqueue(stream)
    metadata.split([cut], buffers, stream)
    graph = stream.end_capture()

    for _ in range(20):
        computed = rng.integers(0, 60, 4).astype(np.int32)
        packed = step_metadata(captured.pack(4, STARTS, computed), STARTS, computed)
        parts = packed.split([cut], buffers, enqueue=False)
        graph.launch(stream)
        captured.mark_replayed(stream)
        stream.synchronize()
        whole = step_metadata(host.commit(4, STARTS, computed), STARTS, computed)
        for part, expected in zip(parts, whole.split([cut], on_host), strict=True):
            for name in ("query_start_loc", "seq_lens", "positions", "token_to_req_indices"):
                actual = getattr(part.batch, name).get()
                np.testing.assert_array_equal(getattr(expected.batch, name), actual, name)
            for group, of_host in zip(part, expected, strict=True):
                for name in ("block_table_tensor", "slot_mapping", "dcp_local_seq_lens"):
                    np.testing.assert_array_equal(getattr(of_host, name), getattr(group, name).get(), name)
    assert table.num_h2d_copies == copies + 20, "one copy for each replay, none for its split"
