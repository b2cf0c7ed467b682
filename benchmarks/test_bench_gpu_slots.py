"""Slot mapping and churn on a GPU.

Slot mapping alone, replayed from graphs that hold it once and many times over, beside device copies of the
same bytes (one int64 a token, read and written) and beside a kernel with one thread block a request.
"""

import numpy as np
import pytest

from pagedkv import MultiGroupBlockTable
from pagedkv.backends import why_unavailable

from .gpu_contenders import BLOCK_SIZE, SLOTS

pytestmark = pytest.mark.gpu

IN_A_GRAPH = 20
SHAPES = {
    "256 decodes": [1] * 256,
    "8k prefill + 255 decodes": [8192] + [1] * 255,
    "128k prefill + 255 decodes": [131072] + [1] * 255,
    "1M prefill": [1 << 20],
}


@pytest.fixture
def cupy():
    if reason := why_unavailable("cupy"):
        pytest.skip(f"backend cupy: {reason}")
    return pytest.importorskip("cupy")


def replayed(cupy, stream, enqueue, calls=IN_A_GRAPH):
    """Microseconds on the device of one of some calls, captured one after the other in one graph."""
    enqueue(stream)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(calls):
        enqueue(stream)
    graph = stream.end_capture()
    graph.upload(stream)
    times = []
    for _ in range(60):
        stream.synchronize()
        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        began.record(stream)
        graph.launch(stream)
        ended.record(stream)
        stream.synchronize()
        times.append(1000 * cupy.cuda.get_elapsed_time(began, ended) / calls)
    return graph, round(float(np.median(times)), 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_slot_mapping(benchmark, cupy, shape):
    benchmark.group = f"slot_mapping/{shape}"
    lengths = np.array(SHAPES[shape])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_reqs, num_tokens = len(lengths), int(starts[-1])
    past = np.where(lengths == 1, 8191, 0)
    positions = np.concatenate([p + np.arange(n) for p, n in zip(past, lengths, strict=True)])
    blocks = -(-(past + lengths) // BLOCK_SIZE)
    stream = cupy.cuda.Stream(non_blocking=True)
    ids = np.arange(1, 1 + blocks.sum(), dtype=np.int32)
    tables = {}
    for backend in ("cupy", "numba"):
        if why_unavailable(backend) is None:
            table = MultiGroupBlockTable([BLOCK_SIZE], num_reqs, 1 << 20, num_tokens, backend=backend)
            table.add_rows(np.arange(num_reqs, dtype=np.int32), blocks[None].astype(np.int32), ids)
            table.commit_block_table(stream=stream)
            tables[backend] = table
    with stream:
        device_starts, device_positions = cupy.asarray(starts), cupy.asarray(positions)
        copied, slots = cupy.empty_like(device_positions), cupy.empty(num_tokens, np.int64)
    stream.synchronize()
    kernel = cupy.RawKernel(SLOTS, "slots")
    rows = tables["cupy"][0].get_device_tensor(num_reqs)
    sizes = tuple(np.int32(x) for x in (num_reqs, rows.shape[1], BLOCK_SIZE, num_tokens))
    runtime, mine = cupy.cuda.runtime, None

    def copy(s):
        runtime.memcpyAsync(
            copied.data.ptr, device_positions.data.ptr, 8 * num_tokens, runtime.memcpyDeviceToDevice, s.ptr
        )

    def block_per_request(s):
        kernel((num_reqs + 1,), (256,), (rows, device_starts, device_positions, slots, *sizes), stream=s)

    enqueue = {
        backend: lambda s, table=table: table.compute_slot_mapping(
            num_reqs, device_starts, device_positions, stream=s
        )
        for backend, table in tables.items()
    } | {"copy": copy, "block_per_request": block_per_request}
    extra = benchmark.extra_info
    extra["num_tokens"] = num_tokens
    for calls in (1, IN_A_GRAPH):
        for name, call in enqueue.items():
            graph, extra[f"{name}_us_{calls}_in_a_graph"] = replayed(cupy, stream, call, calls)
            mine = graph if name == "cupy" else mine
        times = [extra[f"{name}_us_{calls}_in_a_graph"] for name in ("cupy", "copy")]
        extra[f"over_copy_{calls}_in_a_graph"] = round(times[0] / times[1], 3)

    def replay():
        mine.launch(stream)
        stream.synchronize()

    benchmark.pedantic(replay, rounds=1 if benchmark.disabled else 200, warmup_rounds=5)
    expected = rows.get()[np.repeat(np.arange(num_reqs), lengths), positions // BLOCK_SIZE]
    expected = expected.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    np.testing.assert_array_equal(expected, tables["cupy"][0].slot_mapping.get())


@pytest.mark.parametrize("backend", ["cupy", "numba"])
def test_churn_step(benchmark, backend):
    """2 % of 256 requests are replaced by prompts of 2,000 tokens, rows condensed, one commit."""
    if reason := why_unavailable(backend):
        pytest.skip(f"backend {backend}: {reason}")
    cupy = pytest.importorskip("cupy")
    benchmark.group = "churn/256 requests, 8192 tokens"
    num_reqs, num_new, context, prompt = 256, 5, 8192, 2000
    stream = cupy.cuda.Stream(non_blocking=True)
    table = MultiGroupBlockTable([BLOCK_SIZE], num_reqs, 2 * context, 16384, backend=backend)
    rng = np.random.default_rng(3)
    every = np.arange(num_reqs, dtype=np.int32)
    blocks, prompt_blocks = context // BLOCK_SIZE, prompt // BLOCK_SIZE
    counts = np.full((1, num_reqs), blocks, np.int32)
    table.add_rows(every, counts, rng.integers(1, 1 << 24, counts.sum(), dtype=np.int32))
    new_rows = every[-num_new:]
    new_counts = np.full((1, num_new), prompt_blocks, np.int32)
    lengths = np.where(every >= num_reqs - num_new, prompt, 1)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    computed = np.where(lengths == 1, prompt - 1, 0).astype(np.int32)

    def step(gone, ids):
        table.clear_rows(gone)
        table.move_rows(new_rows, gone)
        table.add_rows(new_rows, new_counts, ids)
        return table.commit(num_reqs, starts, computed, stream=stream)

    def setup():
        gone = rng.choice(num_reqs - num_new, num_new, replace=False).astype(np.int32)
        ids = rng.integers(1, 1 << 24, num_new * prompt_blocks, dtype=np.int32)
        stream.synchronize()
        return (gone, ids), {}

    for _ in range(5):
        step(*setup()[0])
    copies = table.num_h2d_copies
    last = step(*setup()[0])
    benchmark.extra_info["h2d_copies"] = table.num_h2d_copies - copies
    benchmark.pedantic(step, setup=setup, rounds=1 if benchmark.disabled else 300, warmup_rounds=5)
    stream.synchronize()
    np.testing.assert_array_equal(table[0].get_numpy_array()[:num_reqs], last.block_table(0).get())
