"""Streams: work goes where it was asked for, and commits on different streams keep their order."""

import numpy as np
import pytest

from .pairs import Decoding, Keeper, assert_same, values_of

pytestmark = pytest.mark.gpu


class Foreign:
    """Another library's stream."""

    def __init__(self, stream):
        self._stream = stream

    def __cuda_stream__(self):
        return 0, self._stream.ptr


@pytest.mark.parametrize("how", ["argument", "current", "legacy default", "protocol"])
def test_a_step_runs_on_the_stream_asked_for(gpu_backend, cupy, stall, stream, how):
    if how == "protocol" and not hasattr(cupy.cuda.Stream, "from_external"):
        pytest.skip("this CuPy has no Stream.from_external")
    pair = Decoding(gpu_backend)
    used = cupy.cuda.Stream.null if how == "legacy default" else stream
    named = {"argument": stream, "protocol": Foreign(stream)}.get(how)

    def step():
        if how == "current":
            with stream:
                return pair.step(named)
        return pair.step(named)

    for _ in range(6):
        step()
    used.synchronize()
    stalled = stall(used)
    expected, given = step()
    assert not given.ready.done, "the step did not wait for the stream that it should run on"
    stalled.release()
    given.ready.synchronize()
    used.synchronize()
    assert_same(expected, values_of(given, pair.device))


def test_a_stalled_stream_does_not_hold_another(gpu_backend, cupy, stall, stream):
    """The negative of the test above: a step on another stream is done meanwhile."""
    pair, other = Decoding(gpu_backend), cupy.cuda.Stream(non_blocking=True)
    for _ in range(6):
        _, step = pair.step(stream)
    keeper = Keeper(step, pair.device)
    stalled = stall(other)
    expected, step = pair.step(stream)
    keeper.keep(step, pair.device, stream)
    stream.synchronize()
    assert step.ready.done
    stalled.release()
    other.synchronize()
    assert_same(expected, keeper.values())


def test_commits_alternate_between_streams(gpu_backend, cupy):
    """Three streams, one of them the legacy default; each has an output set, so that its uses keep theirs."""
    pair = Decoding(gpu_backend, stable_rows=True)
    pair.do("outputs", 3)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)] + [cupy.cuda.Stream.null]
    for i in range(9):
        _, step = pair.step(streams[i // 3], out=i // 3)
    keepers = [Keeper(step, pair.device) for _ in range(60)]
    expected = []
    for i, keeper in enumerate(keepers):
        out = (i * i) % 3 if i % 7 else (i + 1) % 3
        values, step = pair.step(streams[out], out=out)
        keeper.keep(step, pair.device, streams[out])
        expected.append(values)
    cupy.cuda.runtime.deviceSynchronize()
    for i, (values, keeper) in enumerate(zip(expected, keepers, strict=True)):
        assert_same(values, keeper.values(), f"step {i}")
    for group in range(2):
        actual = pair.device[group].get_device_tensor(8).get()
        np.testing.assert_array_equal(pair.host.mirror.block_table(group), actual)


def second_of_two(gpu_backend, cupy, stall, stream, tamper=None):
    """A step on a stalled stream, the next one on another: what the second should hold, and what it does."""
    pair = Decoding(gpu_backend)
    other = cupy.cuda.Stream(non_blocking=True)
    for i in range(6):
        pair.step((stream, other)[i % 2])
    cupy.cuda.runtime.deviceSynchronize()
    if tamper:
        tamper(pair.device._committer.backend)
    stalled = stall(stream)
    pair.step(stream)
    expected, step = pair.step(other)
    if tamper:
        other.synchronize()  # it runs ahead, while the first step stands still
    stalled.release()
    cupy.cuda.runtime.deviceSynchronize()
    return expected, values_of(step, pair.device)


def test_the_second_stream_waits_for_the_first(gpu_backend, cupy, stall, stream):
    assert_same(*second_of_two(gpu_backend, cupy, stall, stream))


def test_without_the_wait_the_first_steps_values_come_last(gpu_backend, cupy, stall, stream):
    def no_wait(backend):
        backend.wait = lambda _stream, _event: None

    expected, actual = second_of_two(gpu_backend, cupy, stall, stream, no_wait)
    assert (expected["seq_lens"] != actual["seq_lens"]).all()
    with pytest.raises(AssertionError):
        assert_same(expected, actual)


def test_a_separate_mapping_waits_for_the_rows_of_another_stream(gpu_backend, cupy, stall, stream):
    pair = Decoding(gpu_backend)
    other = cupy.cuda.Stream(non_blocking=True)
    starts, positions = np.arange(9, dtype=np.int32), np.full(8, 8, np.int64)

    def both(row):
        pair.do("append_row", ([70 + row], [80 + row]), row)
        pair.host.commit_block_table()
        pair.device.commit_block_table(stream=stream)
        pair.host.compute_slot_mapping(8, starts, positions)
        pair.device.compute_slot_mapping(8, starts, positions, stream=other)

    both(0)
    cupy.cuda.runtime.deviceSynchronize()
    stalled = stall(stream)
    both(1)
    stalled.release()
    cupy.cuda.runtime.deviceSynchronize()
    for group in range(2):
        np.testing.assert_array_equal(pair.host[group].slot_mapping, pair.device[group].slot_mapping.get())
