"""Micro-batches on streams of their own: they wait for the event of the split, captured or not."""

import numpy as np
import pytest

from pagedkv.batch.micro_batches import MicroBatches
from pagedkv.batch.step_metadata import step_metadata

from .pairs import assert_same, copy_on_device
from .test_captured_split import STARTS, table_on

pytestmark = pytest.mark.gpu

NOTHING = np.zeros(4, np.int32)
COMPUTED = np.array([9, 20, 33, 50], np.int32)


def arrays_of(parts):
    """All device arrays of all parts, by name."""
    found = {}
    for part in parts:
        k = part.batch.ubatch
        for name in ("query_start_loc", "seq_lens", "positions", "token_to_req_indices"):
            found[f"{name} of {k}"] = getattr(part.batch, name)
        for group in part:
            for name in ("block_table_tensor", "slot_mapping", "dcp_local_seq_lens"):
                found[f"{name}({group.group}) of {k}"] = getattr(group, name)
    return found


class Splits:
    """Steps of a table and of its twin on the host, each cut inside a request."""

    def __init__(self, backend):
        self.host, self.table = table_on("numpy"), table_on(backend)
        self.on_host, self.buffers = MicroBatches(self.host), MicroBatches(self.table)

    def expected(self, computed):
        """What the parts of the next step should hold."""
        whole = step_metadata(self.host.commit(4, STARTS, computed), STARTS, computed)
        return {name: array.copy() for name, array in arrays_of(whole.split([6], self.on_host)).items()}

    def commit(self, computed, stream):
        return step_metadata(self.table.commit(4, STARTS, computed, stream=stream), STARTS, computed)


def keep(kept, parts, stream):
    """Copy the arrays of all parts on the device, in a stream's order."""
    for name, array in arrays_of(parts).items():
        copy_on_device(kept[name], array, stream)


def read_on_a_third_stream(gpu_backend, cupy, stall, does_wait):
    """A commit on a stalled stream, its split on another: what the parts should hold, and a third reads."""
    splits = Splits(gpu_backend)
    first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    for _ in range(6):  # loaded and captured ahead
        parts = splits.commit(NOTHING, first).split([6], splits.buffers, second)
        splits.expected(NOTHING)
    kept = {name: cupy.zeros_like(array) for name, array in arrays_of(parts).items()}
    cupy.cuda.runtime.deviceSynchronize()

    stalled = stall(first)
    parts = splits.commit(COMPUTED, first).split([6], splits.buffers, second)
    ready = parts[0].step.ready
    assert ready is parts[1].step.ready
    if does_wait:
        third.wait_event(ready)
    keep(kept, parts, third)
    if not does_wait:
        third.synchronize()  # it runs ahead, while the commit stands still
    assert not ready.done, "the split waits for the commit"
    stalled.release()
    cupy.cuda.runtime.deviceSynchronize()
    assert ready.done
    return splits.expected(COMPUTED), {name: copy.get() for name, copy in kept.items()}


def test_a_third_stream_reads_what_it_has_waited_for(gpu_backend, cupy, stall):
    assert_same(*read_on_a_third_stream(gpu_backend, cupy, stall, does_wait=True))


def test_without_the_wait_it_reads_the_split_before(gpu_backend, cupy, stall):
    expected, actual = read_on_a_third_stream(gpu_backend, cupy, stall, does_wait=False)
    assert (expected["seq_lens of 1"] != actual["seq_lens of 1"]).all()


def test_a_stream_that_waits_for_a_captured_split_joins_the_capture(gpu_backend, cupy, stream):
    """A replay runs what it does, too; and the table's next calls are ordered by events of their own."""
    splits, other = Splits(gpu_backend), cupy.cuda.Stream(non_blocking=True)
    captured, joined = splits.table.captured_step(4, 16), cupy.cuda.Event(disable_timing=True)
    metadata = splits.commit(NOTHING, stream)
    splits.expected(NOTHING)
    parts = metadata.split([6], splits.buffers, stream)
    kept = {name: cupy.zeros_like(array) for name, array in arrays_of(parts).items()}
    cupy.cuda.runtime.deviceSynchronize()

    stream.begin_capture()
    captured.enqueue(stream)
    parts = metadata.split([6], splits.buffers, stream)
    other.wait_event(parts[1].step.ready)
    keep(kept, parts, other)
    joined.record(other)
    stream.wait_event(joined)
    graph = stream.end_capture()

    for shift in range(5):
        computed = COMPUTED - shift
        packed = step_metadata(captured.pack(4, STARTS, computed), STARTS, computed)
        parts = packed.split([6], splits.buffers, enqueue=False)
        graph.launch(stream)
        captured.mark_replayed(stream)
        parts[0].step.ready.synchronize()
        expected = splits.expected(computed)
        assert_same(expected, {name: copy.get() for name, copy in kept.items()}, f"replay {shift}")
        assert_same(expected, {name: array.get() for name, array in arrays_of(parts).items()}, f"{shift}")

    parts = splits.commit(NOTHING, other).split([6], splits.buffers, stream)
    parts[0].step.ready.synchronize()
    assert_same(splits.expected(NOTHING), {name: array.get() for name, array in arrays_of(parts).items()})
