"""The consumer's own CUDA graph: our device-only calls inside it, captured steps, and what must not be."""

import numpy as np
import pytest

from pagedkv import PagedKVError
from tests.tables.models import assert_unchanged, everything

from .pairs import Decoding, Keeper, assert_same, copy_on_device

pytestmark = pytest.mark.gpu

NUM_REPLAYS = 100


def churn(pair, i, rng):
    """Change some rows: append, replace, clear, move, swap."""
    row = int(rng.integers(8))
    if i % 5 == 1:
        pair.do("add_row", ([1 + i] * (i % 7), None), row)
    elif i % 5 == 2:
        pair.do("clear_row", row)
    elif i % 5 == 3:
        pair.do("move_row", row, (row + 3) % 8)
    elif i % 5 == 4:
        pair.do("swap_row", row, (row + 1) % 8)
    pair.do("append_row", ([500 + i], [900 + i, 901 + i]), int(rng.integers(8)))


def lengths_of(rng, num_reqs, most):
    """Prefix sums of random query lengths."""
    lengths = rng.integers(0, most // num_reqs + 1, num_reqs)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def test_a_device_only_mapping_inside_the_consumers_graph(gpu_backend, cupy, stream):
    pair, rng = Decoding(gpu_backend), np.random.default_rng(1)
    starts, positions, lines = (cupy.zeros(n, d) for n, d in ((9, np.int32), (64, np.int64), (8, np.int32)))
    kept = [cupy.zeros(64, np.int64) for _ in range(2)]
    cupy.cuda.runtime.deviceSynchronize()

    def mapping():
        pair.device.compute_slot_mapping(8, starts, positions, rows=lines, stream=stream)

    pair.device.commit_block_table(stream=stream)
    mapping()  # compiled and loaded before the capture
    copies = pair.device.num_h2d_copies
    stream.begin_capture()
    mapping()
    for group, copy in enumerate(kept):
        copy_on_device(copy, pair.device[group].slot_mapping, stream)
    graph = stream.end_capture()
    assert copies == pair.device.num_h2d_copies
    for i in range(NUM_REPLAYS):
        churn(pair, i, rng)
        inputs = (
            lengths_of(rng, 8, 64),
            rng.integers(-2, 60, 64),
            rng.integers(-1, 8, 8).astype(np.int32),
        )
        pair.host.commit_block_table()
        num_tokens = int(inputs[0][-1])
        pair.host.compute_slot_mapping(8, inputs[0], inputs[1][:num_tokens], rows=inputs[2])
        pair.device.commit_block_table(stream=stream)
        for array, values in zip((starts, positions, lines), inputs, strict=True):
            array.set(values, stream=stream)
        graph.launch(stream)
        stream.synchronize()
        for group, copy in enumerate(kept):
            np.testing.assert_array_equal(
                pair.host[group].slot_mapping, copy.get(), err_msg=f"replay {i}, group {group}"
            )


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
def test_a_captured_step_inside_the_consumers_graph(gpu_backend, cupy, stream, stable_rows):
    """Replayed with changing tables, sizes and rows; every fourth time an ordinary commit comes between."""
    pair, rng = Decoding(gpu_backend, stable_rows=stable_rows), np.random.default_rng(2)
    pair.do("outputs", 2)
    captured = pair.device.captured_step(8, 48, max_new_blocks=64, out=1)
    padding = {"num_reqs_padded": 8, "num_tokens_padded": 48}
    other = cupy.cuda.Stream(non_blocking=True)

    def arguments(num_reqs):
        starts = lengths_of(rng, num_reqs, 48) if num_reqs else np.zeros(1, np.int32)
        computed = rng.integers(-1, 40, num_reqs).astype(np.int32)
        rows = {"rows": rng.integers(-1, 8, num_reqs).astype(np.int32)} if stable_rows else {}
        return (num_reqs, starts, computed), rows

    first, rows = arguments(8)
    expected, step = pair.commit(*first, **rows, **padding, out=1, stream=stream)
    keeper = Keeper(step, pair.device)
    stream.begin_capture()
    captured.enqueue(stream)
    keeper.keep(step, pair.device, stream)
    graph = stream.end_capture()
    copies = pair.device.num_h2d_copies
    for i in range(NUM_REPLAYS):
        churn(pair, i, rng)
        if i % 4 == 3:
            given, rows = arguments(8)
            pair.commit(*given, **rows, stream=other)
            copies += 1
            churn(pair, i + 1, rng)
        num_reqs = int(rng.integers(0, 9)) if stable_rows else 8
        given, rows = arguments(num_reqs)
        from_host = pair.host.commit(*given, **rows, **padding, out=1)
        captured.pack(*given, **rows)
        stream.wait_event(other.record())  # the consumer orders its own graph
        graph.launch(stream)
        captured.mark_replayed(stream)
        copies += 1
        stream.synchronize()
        expected = {name: array.copy() for name, array in values(from_host, pair.host).items()}
        assert_same(expected, keeper.values(), f"replay {i}")
    assert copies == pair.device.num_h2d_copies, "one copy for each replay"
    for group in range(2):
        actual = pair.device[group].get_device_tensor(8).get()
        np.testing.assert_array_equal(pair.host.mirror.block_table(group), actual)


def values(step, table):
    from .pairs import values_of

    return values_of(step, table)


def from_the_host(table, call, stream):
    starts = np.arange(9, dtype=np.int32)
    if call == "commit":
        table.commit(8, starts, np.zeros(8, np.int32), stream=stream)
    elif call == "commit_block_table":
        table.commit_block_table(stream=stream)
    else:
        table.compute_slot_mapping(8, starts, np.zeros(8, np.int64), stream=stream)


@pytest.mark.parametrize("call", ["commit", "commit_block_table", "compute_slot_mapping"])
def test_a_call_that_copies_from_the_host_must_not_be_captured(gpu_backend, cupy, stream, call):
    """It raises, nothing has changed, and the consumer's capture goes on."""
    pair = Decoding(gpu_backend)
    for _ in range(4):
        pair.step(stream)
    pair.do("append_row", ([77], [78]), 2)
    source, target = cupy.arange(5), cupy.zeros(5, np.int64)
    cupy.cuda.runtime.deviceSynchronize()
    before = everything(pair.device)
    stream.begin_capture()
    try:
        with pytest.raises(PagedKVError, match="must not be captured"):
            from_the_host(pair.device, call, stream)
        copy_on_device(target, source, stream)
    finally:
        graph = stream.end_capture()
    assert_unchanged(before, pair.device)
    graph.launch(stream)
    stream.synchronize()
    assert target.get().tolist() == [0, 1, 2, 3, 4]
    expected, step = pair.step(stream)
    keeper = Keeper(step, pair.device)
    keeper.keep(step, pair.device, stream)
    stream.synchronize()
    assert_same(expected, keeper.values())


def test_a_capture_on_another_stream_does_not_disturb_commits(gpu_backend, cupy, stream):
    """One thread of a consumer captures while steps go on; the library's own captures are its own."""
    pair, other = Decoding(gpu_backend), cupy.cuda.Stream(non_blocking=True)
    source, target = cupy.arange(5), cupy.zeros(5, np.int64)
    cupy.cuda.runtime.deviceSynchronize()
    stream.begin_capture()
    for _ in range(5):
        expected, step = pair.step(other)
    other.synchronize()
    copy_on_device(target, source, stream)
    graph = stream.end_capture()
    assert_same(expected, values(step, pair.device))
    graph.launch(stream)
    stream.synchronize()
    assert target.get().tolist() == [0, 1, 2, 3, 4]
