"""The rows of a manager's requests, as the calls beside a commit take them; and who lost its blocks."""

import numpy as np
import pytest

from pagedkv import (
    EncoderSlotMapping,
    FullAttentionSpec,
    KVCacheManager,
    MultiGroupBlockTable,
    StaleSequenceError,
)
from pagedkv.allocation import CrossAttentionSpec
from pagedkv.batch import AdmittedRequests, InputBatch, MicroBatches, RunningRequests, SchedulerOutput
from tests.tables.models import to_numpy

from .scenes import assert_unchanged, scene_of, state_of


def engine_of(backend, *groups):
    """A manager of 64 blocks, and the batch over it."""
    sizes = {"max_num_seqs": 4, "max_model_len": 64}
    manager = KVCacheManager(list(groups), 64, enable_prefix_caching=False, **sizes)
    table = MultiGroupBlockTable(
        manager.table_groups, 4, 64, 64, stable_rows=True, mirror=manager.mirror, backend=backend
    )
    table.outputs(2)
    return manager, table, InputBatch(table, manager)


@pytest.fixture
def scene(backend):
    scene = scene_of("manager", backend)
    scene.step(new={"A": 5, "B": 9, "C": 4})
    scene.check(["A", "B", "C"])
    return scene


def test_rows_are_the_managers_in_batch_order(scene):
    scene.batch.swap(0, 2)
    rows = scene.batch.rows
    assert rows.tolist() == scene.manager.rows(scene.handles("CBA")).tolist()
    assert sorted(rows.tolist()) == [0, 1, 2]
    assert rows.dtype == np.int32


def test_a_preempted_sequence_may_come_back_in_another_row(scene):
    before = scene.batch.rows.tolist()
    scene.step(["B", "C"], preempted=["A"])
    scene.step(["B", "C"], new={"X": 3})
    scene.step(["B", "C", "X"], resumed={"A": 6})
    scene.check(scene.batch.req_ids)
    place = scene.batch.position_of("A")
    assert scene.batch.rows[place] not in (-1, before[0])
    assert scene.batch.rows.tolist() == scene.manager.rows(scene.batch.handles).tolist()


def test_holes_and_requests_without_blocks_have_no_row(scene):
    scene.manager.free(scene.handles(["B"]))
    assert scene.batch.remove_request("B") == 1
    handle = scene.manager.add(range(3))
    scene.batch.add_request("X", 3, handle=handle)
    scene.batch.remove_request("A")
    assert scene.batch.req_ids == [None, "X", "C"]
    assert scene.batch.rows.tolist() == [-1, -1, *scene.manager.rows(scene.handles("C")).tolist()]


def test_a_freed_sequence_that_is_in_the_batch_has_no_row_to_tell(scene):
    scene.manager.free(scene.handles(["B"]))
    with pytest.raises(StaleSequenceError):
        scene.batch.rows  # noqa: B018 - the read is what raises


def test_an_empty_batch_has_no_rows(backend):
    assert engine_of(backend, FullAttentionSpec(4))[2].rows.tolist() == []


def test_drafts_are_mapped_by_the_rows_of_the_batch(backend):
    manager, table, batch = engine_of(backend, FullAttentionSpec(4))
    handles = [manager.add(range(n)) for n in (6, 3)]
    manager.allocate_slots(handles, [6, 3], num_lookahead_tokens=3)
    batch.update(SchedulerOutput(new=AdmittedRequests(list("ab"), [6, 3], [6, 3], handles=handles)))
    batch.swap(0, 1)
    batch.commit()
    starts, positions = [0, 2, 5], np.array([3, 4, 6, 7, 8])
    (slots,) = table.compute_slot_mapping(2, starts, positions, rows=batch.rows, out=1)
    owners = np.array(handles)[[1, 1, 0, 0, 0]]
    assert to_numpy(slots).tolist() == manager.translate(owners, positions).tolist()
    assert (to_numpy(slots) >= 0).all()


def test_an_encoders_tokens_are_mapped_by_the_rows_of_the_batch(backend):
    manager, table, batch = engine_of(backend, FullAttentionSpec(4), CrossAttentionSpec(4, 10))
    handles = [manager.add(range(3), num_encoder_tokens=n) for n in (7, 10)]
    manager.allocate_slots(handles, [3, 3])
    batch.update(SchedulerOutput(new=AdmittedRequests(list("ab"), [3, 3], [3, 3], handles=handles)))
    batch.swap(0, 1)
    batch.commit()
    slots = to_numpy(EncoderSlotMapping(table, 1, 32).compute([10, 7], rows=batch.rows).slot_mapping)
    positions = np.concatenate([np.arange(10), np.arange(7)])
    expected = manager.translate(np.repeat(handles[::-1], [10, 7]), positions, 1)
    assert slots.tolist() == expected.tolist()
    assert (slots >= 0).all()


def test_a_prefix_that_another_request_writes_in_the_same_step_is_seen_by_the_rows_of_the_batch(backend):
    """The engine runs ahead: what the writer computes in this step counts as computed for its fork."""
    manager, table, batch = engine_of(backend, FullAttentionSpec(4))
    writer = manager.add(range(8))
    manager.allocate_slots([writer], [8])
    manager.commit([writer], [8])
    (reader,) = manager.fork(writer).tolist()
    manager.append([reader], [99])
    manager.allocate_slots([reader], [1])
    new = AdmittedRequests(["reader", "writer"], [9, 8], [1, 8], [8, 0], handles=[reader, writer])
    batch.update(SchedulerOutput(new=new))
    buffers = MicroBatches(table, 2)
    assert not buffers.may_split(batch.commit(), [1], rows=batch.rows)
    batch.swap(0, 1)
    assert buffers.may_split(batch.commit(), [8], rows=batch.rows)


# --- who was preempted ------------------------------------------------------------------------------


@pytest.mark.parametrize("rests", [False, True])
def test_a_preempted_request_does_not_come_back_as_one_that_runs(scene, rests):
    """Its counts start anew with `resumed`; as a running one it would go on where it was."""
    if rests:
        scene.step(["B", "C"])
    scene.step(["B", "C"], preempted=["A"])
    handle = scene.batch.handle_of("A")
    scene.manager.allocate_slots([handle], [5])
    output = SchedulerOutput(RunningRequests([handle], [5]))
    before = state_of(scene.batch)
    with pytest.raises(ValueError, match=r"'A' must come back through resumed, got it running \(it was pree"):
        scene.batch.update(output)
    assert_unchanged(before, scene.batch)
    resumed = AdmittedRequests(["A"], [5], [5])
    scene.batch.update(SchedulerOutput(RunningRequests(scene.batch.handles, [0, 0]), resumed=resumed))
    scene.batch.update(SchedulerOutput(RunningRequests(scene.batch.handles, [0, 0, 1])))
    assert scene.batch.num_computed_tokens[scene.batch.position_of("A")] == 5


def test_an_id_that_starts_anew_is_no_preempted_one(scene):
    scene.step(["B", "C"], preempted=["A"])
    scene.step(["B", "C"], new={"A": 3})
    scene.step(["A", "B", "C"])
    scene.check(scene.batch.req_ids)
