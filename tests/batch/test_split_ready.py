"""The event of a split: what it is, and behind what it is recorded."""

from types import SimpleNamespace

import pytest

from pagedkv import PagedKVError
from pagedkv.batch.micro_batches import MicroBatches
from pagedkv.batch.step_metadata import step_metadata

from .drawn import one_step


@pytest.fixture
def watched(monkeypatch):
    """A step, buffers to split it, and what is done on the host's stream; each event is one of its own."""
    drawn = one_step()
    metadata, calls, handles = drawn.metadata("numpy"), [], iter(range(1, 100))
    backend = drawn.table._committer.backend
    bind = backend.bind

    def bind_watched(op, args):
        launch = bind(op, args)
        return lambda grid, stream: (calls.append(op), launch(grid, stream))

    monkeypatch.setattr(backend, "event", lambda: SimpleNamespace(ptr=next(handles), done=True))
    monkeypatch.setattr(backend, "record", lambda event_id, _stream: calls.append(event_id))
    monkeypatch.setattr(backend, "bind", bind_watched)
    made = {"table": drawn.table, "metadata": metadata, "buffers": MicroBatches(drawn.table, 3)}
    return SimpleNamespace(**made, backend=backend, calls=calls)


def test_every_part_has_the_event_that_is_recorded_behind_the_kernels_of_all(watched):
    parts = watched.metadata.split([3, 6], watched.buffers)

    ready = parts[0].step.ready
    assert all(part.step.ready is ready for part in parts)
    assert watched.calls == ["split_batch"] * 3 + [ready.ptr]
    assert ready is not watched.metadata.step.ready
    assert all(part.unpadded().step.ready is ready for part in parts)


def test_the_next_call_of_the_table_goes_behind_it(watched):
    (part, _) = watched.metadata.split([3], watched.buffers)

    assert watched.table._committer.last_event is part.step.ready


def test_each_of_two_buffers_has_its_own(watched):
    first = watched.metadata.split([3], watched.buffers)
    second = watched.metadata.split([3], MicroBatches(watched.table))
    again = watched.metadata.split([6], watched.buffers)

    assert first[0].step.ready is again[0].step.ready
    assert first[0].step.ready is not second[0].step.ready


def test_kernels_that_a_graph_holds_are_done_with_the_packed_step(watched):
    """`mark_replayed` records the event of the step that was packed, behind the graph."""
    watched.metadata.split([3], watched.buffers)
    captured = watched.table.captured_step(4, 10)
    arrays = [0, 1, 5, 7], [4, 5, 6]
    packed = step_metadata(captured.pack(3, *arrays), *arrays)
    watched.calls.clear()

    parts = packed.split([3], watched.buffers, enqueue=False)

    assert [part.step.ready for part in parts] == [packed.step.ready] * 2
    assert watched.calls == []
    captured.mark_replayed()
    assert watched.calls == [packed.step.ready.ptr]


def test_a_capture_has_an_event_of_its_own(watched, monkeypatch):
    """One that was recorded in a capture is good for nothing else: not to order the table's next call by."""
    (eager, _) = watched.metadata.split([3], watched.buffers)
    before, last = eager.step.ready, watched.table._committer.last_event
    stream = SimpleNamespace(ptr=1)
    monkeypatch.setattr(watched.backend, "stream", lambda _stream: stream)
    monkeypatch.setattr(watched.backend, "is_capturing", lambda stream_id: stream_id == 1)
    watched.calls.clear()

    parts = watched.metadata.split([3], watched.buffers)

    ready = parts[0].step.ready
    assert watched.calls == ["split_batch"] * 2 + [ready.ptr]
    assert ready is parts[1].step.ready
    assert ready is not before
    assert watched.table._committer.last_event is last


def test_no_split_between_pack_and_replay(watched):
    """The kernels would read the arrays of the step before; those of a graph read the packed step's."""
    captured = watched.table.captured_step(4, 10)
    arrays = [0, 1, 5, 7], [4, 5, 6]
    packed = step_metadata(captured.pack(3, *arrays), *arrays)
    before = list(watched.calls)

    with pytest.raises(PagedKVError, match="call mark_replayed before"):
        packed.split([3], watched.buffers)

    assert watched.calls == before
    assert len(packed.split([3], watched.buffers, enqueue=False)) == 2
