"""A staging buffer is written again only after its own copy has run: shown on a stream that stands still.

A kernel holds the stream while depth + 1 steps are committed. The first `depth` find a buffer each and
return at once; the last needs the first buffer, whose copy waits behind the kernel, and so must block
until a second thread lets the kernel go. Every step is copied on the device right after it, so a buffer
that was written too early shows as a step with another step's values.
"""

import threading
import time

import numpy as np
import pytest

from .pairs import Decoding, Keeper, assert_same

pytestmark = pytest.mark.gpu

DELAY_S = 0.4
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def commit_while_stalled(pair, depth, stall, stream, tamper=None):
    """Commit depth + 1 steps; returns [(expected, kept, whether the commit returned after the release)]."""
    keepers = []
    for _ in range(2 * depth + 1):  # graphs, modules and views are made ahead: no later call waits for them
        _, step = pair.step(stream)
        keepers.append(Keeper(step, pair.device))
        keepers[-1].keep(step, pair.device, stream)
    stream.synchronize()
    if tamper:
        tamper(pair.device._committer.backend)
    graphs = num_graphs(pair)
    stalled = stall(stream)
    began = time.perf_counter()
    second_thread = threading.Timer(DELAY_S, stalled.release)
    second_thread.start()
    steps = []
    for keeper in keepers[: depth + 1]:
        expected, step = pair.step(stream)
        returned_after_release = stalled.is_released
        keeper.keep(step, pair.device, stream)
        steps.append((expected, keeper, returned_after_release))
    took = time.perf_counter() - began
    second_thread.join()
    stream.synchronize()
    assert graphs == num_graphs(pair), "no step was captured anew beside the stalled stream"
    return [(expected, keeper.values(), late) for expected, keeper, late in steps], took


def num_graphs(pair):
    return [len(buffer.graphs) for buffer in pair.device._committer.ring.buffers]


@DEPTHS
def test_each_step_sees_its_own_values_and_the_last_commit_blocks(gpu_backend, depth, stall, stream):
    pair = Decoding(gpu_backend, staging_depth=depth)
    steps, took = commit_while_stalled(pair, depth, stall, stream)
    assert [late for *_, late in steps] == [False] * depth + [True], "which commits waited for the release"
    assert took >= 0.9 * DELAY_S, "the last commit returned before the stream was let go"
    for i, (expected, kept, _) in enumerate(steps):
        assert_same(expected, kept, f"step {i} of {depth + 1}")


@DEPTHS
def test_without_the_wait_the_first_step_sees_the_lasts_values(gpu_backend, depth, stall, stream):
    def never_wait(backend):
        backend.is_done = lambda _event: 0
        backend.wait_for = lambda _event: None

    pair = Decoding(gpu_backend, staging_depth=depth)
    steps, took = commit_while_stalled(pair, depth, stall, stream, never_wait)
    assert not any(late for *_, late in steps), "with the wait gone, no commit blocks"
    assert took < DELAY_S
    (expected, kept, _), (last, *_) = steps[0], steps[-1]
    np.testing.assert_array_equal(last["seq_lens"], kept["seq_lens"])
    assert (expected["seq_lens"] != kept["seq_lens"]).all()
    assert (expected["slot_mapping(0)"] != kept["slot_mapping(0)"]).any()


@DEPTHS
def test_a_captured_step_waits_for_its_own_copy(gpu_backend, depth, stall, stream):
    """Its one private buffer: the second pack blocks, whatever the depth of the ring."""
    pair = Decoding(gpu_backend, staging_depth=depth)
    captured = pair.device.captured_step(8, 8)
    starts = np.arange(9, dtype=np.int32)
    stream.begin_capture()
    captured.enqueue(stream)
    graph = stream.end_capture()
    keepers, late = [], []

    def replay(computed):
        step = captured.pack(8, starts, np.full(8, computed, np.int32))
        late.append(stalled is not None and stalled.is_released)
        graph.launch(stream)
        captured.mark_replayed(stream)
        return step

    stalled = None
    keepers = [Keeper(replay(0), pair.device) for _ in range(2)]
    stream.synchronize()
    late.clear()
    stalled = stall(stream)
    second_thread = threading.Timer(DELAY_S, stalled.release)
    second_thread.start()
    for keeper, computed in zip(keepers, (3, 5), strict=True):
        keeper.keep(replay(computed), pair.device, stream)
    second_thread.join()
    stream.synchronize()
    assert late == [False, True]
    for keeper, computed in zip(keepers, (3, 5), strict=True):
        expected, _ = pair.commit(8, starts, np.full(8, computed, np.int32))
        assert_same(expected, keeper.values(), f"the replay of {computed} computed tokens")
