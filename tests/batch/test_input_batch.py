"""InputBatch: who stands where, and what a commit hands out, on each kind of rows and each backend."""

import gc

import numpy as np
import pytest

from pagedkv import HostMirror, MultiGroupBlockTable
from pagedkv.batch import AdmittedRequests, InputBatch, RunningRequests, SchedulerOutput
from tests.tables.models import to_numpy

from .scenes import KINDS, Scene, scene_of

FIVE = {"A": 5, "B": 9, "C": 4, "D": 13, "E": 1}
COLUMNS = ("handles", "slots", "rows", "num_computed_tokens", "num_scheduled_tokens", "previous_positions")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def scene(kind, backend):
    return scene_of(kind, backend)


@pytest.fixture
def five(scene):
    """Five requests after their first step."""
    scene.step(new=FIVE)
    scene.check(list(FIVE))
    return scene


# --- positions --------------------------------------------------------------------------------------


def test_who_comes_takes_the_lowest_hole_and_the_last_closes_the_next(five):
    five.step(["A", "C", "E"], new={"X": 7}, finished=["B", "D"])
    five.check(["A", "X", "C", "E"])


def test_the_last_requests_leave_no_hole_to_close(five):
    five.step(["A", "B", "C"], finished=["D", "E"])
    five.check(["A", "B", "C"])


def test_the_highest_goes_into_the_lowest_hole(five):
    five.step(["C", "D", "E"], finished=["B", "A"])
    five.check(["E", "D", "C"])


def test_more_come_than_go(five):
    five.step(["A", "C", "D", "E"], new={"X": 3, "Y": 6, "Z": 2}, finished=["B"])
    five.check(["A", "X", "C", "D", "E", "Y", "Z"])


def test_all_go_and_others_come(five):
    five.step(finished=list(FIVE))
    five.check([])
    five.step(new={"X": 3})
    five.check(["X"])


def test_all_go_as_others_come(five):
    five.step(new={"X": 3, "Y": 14}, finished=list(FIVE))
    five.check(["X", "Y"])


def test_the_order_of_the_running_does_not_matter(five):
    five.step({"E": 2, "A": 1, "D": 3, "B": 1, "C": 5})
    five.check(list(FIVE))


def test_an_empty_step_lets_all_rest(five):
    five.step()
    five.check([])
    assert five.batch.position_of("B") is None
    five.step(["D", "A"])
    five.check(["D", "A"])


def test_ids_that_are_no_strings(scene):
    scene.step(new={7: 3, ("a", 1): 5, None: 2})
    scene.check([7, ("a", 1), None])


# --- rests and preemptions --------------------------------------------------------------------------


def test_a_skipped_request_comes_back_with_its_blocks_and_those_that_it_takes_now(five):
    five.step(["A", "C", "E"])
    five.check(["A", "E", "C"])
    five.step({"A": 1, "B": 16, "C": 1, "E": 1})  # B grows by two blocks and more
    five.check(["A", "E", "C", "B"])


def test_a_skipped_request_comes_back_without_new_blocks(five):
    five.step(["A"])
    five.check(["A"])
    five.step({"D": 1, "A": 1})
    five.check(["A", "D"])
    five.step(["D"])
    five.check(["D"])


def test_a_request_that_rests_can_be_finished(five):
    five.step(["A", "B"])
    five.step(["A", "B"], finished=["D", "unknown"])
    five.check(["A", "B"])
    assert "D" not in five.batch
    assert len(five.batch) == 4


def test_a_resumed_request_holds_its_new_blocks_and_no_old_one(five):
    five.step(["A", "C", "D", "E"], preempted=["B"])
    five.check(["A", "E", "C", "D"])
    assert "B" in five.batch
    five.step(["A", "C", "D", "E"], resumed={"B": 10})
    five.check(["A", "E", "C", "D", "B"])
    five.step(["A", "B", "C", "D", "E"])
    five.check(["A", "E", "C", "D", "B"])


def test_a_resumed_request_rests_and_comes_back_as_any_other(five):
    five.step(["A", "C", "D", "E"], preempted=["B"])
    five.step(["A", "C", "D", "E"], resumed={"B": 10})
    five.step(["A", "C", "D", "E"])
    five.step(["A", "B", "C", "D", "E"])
    five.check(["A", "E", "C", "D", "B"])


def test_a_request_is_preempted_and_resumed_in_one_step(five):
    five.step(["A", "C", "D", "E"], preempted=["B"], resumed={"B": 10})
    five.check(["A", "B", "C", "D", "E"])


def test_a_request_is_preempted_while_it_rests(five):
    five.step(["A", "C", "D", "E"])
    five.step(["A", "C", "D", "E"], preempted=["B"])
    five.step(["A", "C", "D", "E"], resumed={"B": 10})
    five.check(["A", "E", "C", "D", "B"])
    five.step(["B", "A", "C", "D", "E"])
    five.check(["A", "E", "C", "D", "B"])


@pytest.mark.parametrize("kind", ["batch order", "stable"])
@pytest.mark.parametrize("rests", [False, True])
def test_resumed_replaces_blocks_though_nobody_said_preempted(scene, rests):
    """Whether blocks replace a row is decided by the list that a request is in, and by nothing else."""
    scene.step(new=FIVE)
    if rests:
        scene.step(["A", "C", "D", "E"])
    scene.step(["A", "C", "D", "E"], resumed={"B": 10})
    order = ["A", "E", "C", "D", "B"] if rests else list(FIVE)
    scene.check(order)
    scene.step(["A", "B", "C", "D", "E"])
    scene.check(order)
    scene.step({"A": 1, "B": 9, "C": 1, "D": 1, "E": 1}, new={"X": 3})
    scene.check([*order, "X"])


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_a_preempted_request_gives_its_row_to_another(backend, kind):
    scene = Scene(kind, backend, max_num_reqs=2)
    scene.step(new={"A": 5, "B": 9})
    scene.step(["A"], new={"C": 3}, preempted=["B"])
    scene.check(["A", "C"])
    scene.step(["C"], resumed={"B": 10}, finished=["A"])
    scene.check(["B", "C"])


# --- one id, several lives --------------------------------------------------------------------------


def test_a_finished_id_starts_anew_in_the_same_step(five):
    old = five.batch.handle_of("B")
    five.step(["A", "C", "D", "E"], new={"B": 3}, finished=["B"])
    five.check(list(FIVE))
    assert five.batch.handle_of("B") != old


def test_a_known_id_among_the_new_starts_anew(five):
    """As a streaming session sends its next prompt."""
    old = five.batch.handle_of("C")
    five.step(["A", "B", "D", "E"], new={"X": 2, "C": 11})
    assert five.batch.previous_positions.tolist() == [0, 1, -1, 3, 4, -1]
    five.check(["A", "B", "X", "D", "E", "C"])
    assert five.batch.handle_of("C") != old


def test_an_id_starts_anew_while_it_rests(five):
    five.step(["A", "B", "D", "E"])
    five.step(["A", "B", "D", "E"], new={"C": 11})
    five.check(["A", "B", "E", "D", "C"])


def test_an_aborted_request_comes_again_in_the_next_step(five):
    five.step(["A", "C", "D", "E"], finished=["B"])
    assert "B" not in five.batch
    five.step(["A", "C", "D", "E"], new={"B": 6})
    assert five.batch.previous_positions.tolist() == [0, 4, 2, 3, -1]
    five.check(["A", "E", "C", "D", "B"])


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_a_handle_is_never_given_twice(scene):
    seen = set()
    for _ in range(30):
        scene.step(new={"A": 1, "B": 1}, finished=["A"])
        seen |= {scene.batch.handle_of("A"), scene.batch.handle_of("B")}
        assert scene.batch.slots.max() < scene.table.max_num_reqs, "slots are used again"
    assert len(seen) == 60


# --- what is known of a request ---------------------------------------------------------------------


def test_chunks_of_a_prompt_are_prefills_until_it_is_computed(scene):
    scene.step(new={"A": (9, 4), "B": (3, 3)})
    assert scene.check(["A", "B"]).batch.is_prefilling.tolist() == [True, True]
    scene.step({"A": 4, "B": 1})
    assert scene.check(["A", "B"]).batch.is_prefilling.tolist() == [True, False]
    scene.step({"A": 1, "B": 1})
    assert scene.check(["A", "B"]).batch.is_prefilling.tolist() == [True, False]
    scene.step({"A": 1, "B": 1})
    step = scene.check(["A", "B"], num_reqs_padded=4)
    assert step.batch.is_prefilling.tolist() == [False] * 4


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_prefix_hits_and_rejected_drafts_are_what_the_scheduler_says(scene):
    counts, ids = [[2], [2]], [1, 2, 3, 4]
    new = AdmittedRequests(["A"], [9], [3], [6], counts, ids)
    handles = scene.batch.update(SchedulerOutput(new=new))
    assert scene.batch.num_computed_tokens.tolist() == [6]
    scene.batch.update(SchedulerOutput(RunningRequests(handles, [4])))
    assert scene.batch.num_computed_tokens.tolist() == [9]
    scene.batch.update(SchedulerOutput(RunningRequests(handles, [4], [10])))  # of 4, 3 were rejected
    step = scene.batch.commit()
    assert to_numpy(step.batch.seq_lens).tolist() == [14]
    assert to_numpy(step.batch.positions).tolist() == [10, 11, 12, 13]
    scene.batch.update(SchedulerOutput())
    scene.batch.update(SchedulerOutput(RunningRequests(handles, [1], [11])))
    assert scene.batch.num_computed_tokens.tolist() == [11]


def test_requests_without_tokens_stand_in_the_batch(scene):
    scene.step(new={"A": 5, "B": (6, 6)})
    scene.step({"A": 0, "B": 1})
    step = scene.check(["A", "B"])
    assert to_numpy(step.batch.query_start_loc).tolist() == [0, 0, 1]
    scene.step({"A": 1, "B": 0})
    scene.check(["A", "B"])


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_a_new_request_without_blocks_and_tokens_takes_both_later(backend, kind):
    scene = Scene(kind, backend)
    scene.step(new={"A": (5, 0), "B": 3})
    scene.check(["A", "B"])
    scene.step(["B"])
    scene.step({"A": 5, "B": 1})
    scene.check(["B", "A"])


def test_sizes_are_those_of_the_step(five):
    assert five.batch.sizes() == (5, 32, 13)
    five.batch.remove_request("D")
    assert five.batch.sizes() == (4, 19, 9)


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_handles_and_slots_name_the_same_requests(five):
    handles = five.batch.handles
    np.testing.assert_array_equal(handles & 0xFFFFFFFF, five.batch.slots)
    assert [five.batch.handle_of(req_id) for req_id in five.batch.req_ids] == handles.tolist()
    rows = five.batch.rows.tolist()
    assert sorted(rows) == list(range(5))


def test_reads_are_arrays_of_their_own(five):
    batch = five.batch
    for name in COLUMNS:
        getattr(batch, name)[:] = 77
    batch.req_ids.clear()
    five.check(list(FIVE))


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_more_requests_can_be_known_than_stand_in_the_batch(backend, kind):
    scene = Scene(kind, backend, max_num_reqs=3)
    scene.step(new={"A": 2, "B": 3, "C": 4})
    scene.step(new={"D": 2, "E": 3}, preempted=["A", "B", "C"])
    scene.step(new={"F": 2, "G": 3, "H": 4}, preempted=["D", "E"])
    scene.check(["F", "G", "H"])
    assert len(scene.batch) == 8
    scene.step(resumed={"E": 4, "A": 3, "C": 5}, preempted=["F", "G", "H"])
    scene.check(["E", "A", "C"])


# --- one request at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_requests_are_added_and_removed_one_at_a_time(scene):
    batch = scene.batch
    handles = [
        batch.add_request(name, 5, 5, block_ids=([i + 1, i + 11], [i + 21])) for i, name in enumerate("ABC")
    ]
    assert batch.handles.tolist() == handles
    assert batch.remove_request("A") == 0
    assert (batch.remove_request("A"), batch.remove_request("unknown")) == (None, None)
    assert batch.req_ids == [None, "B", "C"]
    for name in COLUMNS:
        assert (getattr(batch, name)[0], getattr(batch, name).size) == (-1, 3), name
    assert (batch.num_reqs, len(batch)) == (2, 2)
    assert batch.add_request("D", 3, 3, block_ids=([4], None)) != handles[0]
    assert batch.req_ids == ["D", "B", "C"]
    step = batch.commit()
    assert to_numpy(step[0].block_table_tensor)[:, :2].tolist() == [[4, 0], [2, 12], [3, 13]]
    assert to_numpy(step[1].block_table_tensor)[:, :2].tolist() == [[0, 0], [22, 0], [23, 0]]
    assert to_numpy(step[1].slot_mapping).tolist() == [-1] * 3 + [*range(132, 137), *range(138, 143)]


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_condense_moves_the_highest_into_the_lowest_hole(five):
    for req_id in ("B", "D"):
        five.batch.remove_request(req_id)
        del five.requests[req_id]
    five.batch.condense()
    five.check(["A", "E", "C"])
    five.batch.condense()
    five.check(["A", "E", "C"])


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_an_update_closes_the_holes_as_well(five):
    five.batch.remove_request("A")
    del five.requests["A"]
    five.step(["B", "C", "D", "E"])
    five.check(["E", "B", "C", "D"])


def test_removing_all_leaves_an_empty_batch(five):
    for req_id in FIVE:
        five.batch.remove_request(req_id)
    assert (five.batch.num_reqs, len(five.batch)) == (0, 0)
    five.batch.condense()
    five.requests.clear()
    five.check([])


def test_a_request_of_a_manager_is_added_with_its_handle(backend):
    scene = scene_of("manager", backend)
    handle = scene.manager.add(range(5))
    scene.manager.allocate_slots([handle], [5])
    assert scene.batch.add_request("A", 5, 5, handle=handle) == handle
    assert to_numpy(scene.batch.commit()[0].block_table_tensor)[:, :3].tolist() == [[1, 2, 0]]


def test_swaps_and_orders_are_followed_by_rows(five):
    five.batch.swap(0, 3)
    five.check(["D", "B", "C", "A", "E"])
    five.batch.swap(2, 2)
    five.check(["D", "B", "C", "A", "E"])
    five.batch.reorder([1, 2, 4, 0, 3])  # a cycle
    five.check(["B", "C", "E", "D", "A"])
    five.batch.reorder(np.arange(5))
    five.check(["B", "C", "E", "D", "A"])


# --- drafts ---


@pytest.mark.parametrize("kind", ["batch order", "stable"])
def test_rejected_drafts_leave_their_blocks_and_their_slots_are_written_again(scene):
    batch = scene.batch
    handles = batch.update(SchedulerOutput(new=AdmittedRequests(["A"], [3], [3], None, [[1], [1]], [5, 6])))
    drafts = RunningRequests(handles, [4], None, [[1], [1]], [7, 8])  # positions 3 to 6, of which one is kept
    batch.update(SchedulerOutput(drafts))
    first = [to_numpy(group.slot_mapping).tolist() for group in batch.commit()]
    batch.update(SchedulerOutput(RunningRequests(handles, [4], [4])))
    again = [to_numpy(group.slot_mapping).tolist() for group in batch.commit()]
    assert first == [[23, 28, 29, 30], [39, 40, 41, 48]]
    assert again == [[28, 29, 30, 31], [40, 41, 48, 49]]


# --- commits ----------------------------------------------------------------------------------------


def test_padding_is_null_and_pad(five):
    five.step(["A", "C"], finished=["B"])
    step = five.check(["A", "C"], num_reqs_padded=6, num_tokens_padded=9)
    assert (step.batch.num_reqs, step.batch.num_actual_tokens) == (6, 9)
    assert (step.batch.num_reqs_unpadded, step.batch.num_tokens_unpadded) == (2, 2)


def test_a_step_is_one_copy_whatever_changed(five):
    before = five.table.num_h2d_copies
    five.step(["A", "C", "E"], new={"X": 7, "Y": 9}, finished=["B"])
    assert five.table.num_h2d_copies == before
    five.check(["A", "X", "C", "Y", "E"])
    assert five.table.num_h2d_copies == before + 1


def test_a_steps_host_arrays_stay_whatever_later_steps_do(five):
    batch = five.batch.commit(num_reqs_padded=6).batch
    names = ("query_start_loc_cpu", "seq_lens_cpu_upper_bound", "num_computed_tokens_cpu", "is_prefilling")
    before = [getattr(batch, name).copy() for name in names]
    for _ in range(4):
        five.step(["A", "C"])
        five.batch.commit(num_reqs_padded=6)
    for name, expected in zip(names, before, strict=True):
        np.testing.assert_array_equal(expected, getattr(batch, name))
        assert not getattr(batch, name).flags.writeable


def test_a_batch_can_be_committed_again(five):
    five.check(list(FIVE))
    five.check(list(FIVE), num_reqs_padded=8)


def test_max_seq_len_is_what_was_promised_and_never_too_small(five):
    assert five.check(list(FIVE)).batch.max_seq_len == 13
    assert five.check(list(FIVE), max_seq_len=48).batch.max_seq_len == 48
    assert five.check(list(FIVE), max_seq_len=13).batch.max_seq_len == 13
    assert five.check(list(FIVE)).batch.max_query_len == 13
    captured = five.table.captured_step(6, 40)
    for call in (
        lambda: five.batch.commit(max_seq_len=12),
        lambda: five.batch.pack(captured, max_seq_len=12),
        lambda: five.batch.dummy(2, 26, max_seq_len=12),
    ):
        with pytest.raises(ValueError, match=r"max_seq_len must lie in \[13, 2147483647\], got 12"):
            call()
    five.check(list(FIVE))


def test_the_device_knows_of_rejected_drafts(five):
    given = to_device(five.table, np.array([4, 9, 3, 13, 1], np.int32))
    five.step(dict.fromkeys(FIVE, 2))
    step = five.batch.commit(num_computed_tokens=given)
    assert to_numpy(step.batch.seq_lens).tolist() == [6, 11, 5, 15, 3]
    assert step.batch.seq_lens_cpu_upper_bound.tolist() == [7, 11, 6, 15, 3]
    assert to_numpy(step.batch.positions)[:2].tolist() == [4, 5]


def test_true_counts_may_come_from_the_host_as_well(five):
    five.step(dict.fromkeys(FIVE, 2))
    step = five.batch.commit(num_computed_tokens=[4, 9, 3, 13, 1])
    assert to_numpy(step.batch.seq_lens).tolist() == [6, 11, 5, 15, 3]
    assert step.batch.seq_lens_cpu_upper_bound.tolist() == [7, 11, 6, 15, 3]


def to_device(table, array):
    if table.backend == "numpy":
        return array
    import cupy

    return cupy.asarray(array)


def test_steps_into_two_output_sets_both_stay(five):
    five.table.outputs(2)
    first = five.check(list(FIVE), out=0)
    slots = [to_numpy(group.slot_mapping).copy() for group in first]
    five.step(["A", "C", "D", "E"], new={"X": 7}, finished=["B"])
    five.check(["A", "X", "C", "D", "E"], out=1)
    for expected, group in zip(slots, first, strict=True):
        np.testing.assert_array_equal(expected, to_numpy(group.slot_mapping))


def test_a_step_can_be_packed_for_a_consumers_graph(five):
    captured = five.table.captured_step(6, 16)
    five.step(["A", "C", "D", "E"], new={"X": 7}, finished=["B"])
    step = five.batch.pack(captured, max_seq_len=48)
    captured.enqueue()
    captured.mark_replayed()
    five.check_step(step, ["A", "X", "C", "D", "E"])
    assert (step.batch.num_reqs, step.batch.num_actual_tokens, step.batch.max_seq_len) == (6, 16, 48)


def test_a_table_without_groups_has_batches_too(backend):
    batch = InputBatch(MultiGroupBlockTable([], 4, 64, 16, backend=backend))
    handles = batch.update(SchedulerOutput(new=AdmittedRequests(["a", "b"], [3, 4], [3, 4])))
    batch.update(SchedulerOutput(RunningRequests(handles[:1], [1])))
    step = batch.commit(num_reqs_padded=3)
    assert batch.req_ids == ["a"]
    assert len(step.groups) == 0
    assert to_numpy(step.batch.seq_lens).tolist() == [4, 0, 0]


# --- arrays of other kinds --------------------------------------------------------------------------

CONVERSIONS = {
    "lists": lambda values: np.asarray(values).tolist(),
    "tuples": lambda values: tuple(np.asarray(values).tolist()),
    "int64": lambda values: np.asarray(values, np.int64),
    "uint64": lambda values: np.asarray(values, np.uint64),
    "backwards": lambda values: np.ascontiguousarray(np.asarray(values)[..., ::-1])[..., ::-1],
    "every other": lambda values: np.repeat(np.asarray(values), 2, axis=-1)[..., ::2],
    "read-only": lambda values: read_only(np.array(values)),
}


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("kind", ["batch order", "stable"])
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("comes", [False, True])
def test_arrays_of_any_kind_do_as_ready_ones(kind, name, comes):
    scene, convert = Scene(kind), CONVERSIONS[name]
    scene.step(new={"A": 4, "B": 6, "C": 3})
    handles = convert(scene.batch.handles)
    counts = np.array([[1, 0, 1], [0, 1, 0]], np.int32)
    ids = np.array([91, 92, 93], np.int32)
    running = RunningRequests(
        handles, convert(np.array([1, 1, 2], np.int32)), convert(np.array([4, 5, 3], np.int32)),
        convert(counts), convert(ids),
    )  # fmt: skip
    new = AdmittedRequests(
        convert(np.array([7, 8])) if name != "read-only" else (7, 8),
        convert(np.array([4, 2])), convert(np.array([4, 2])), convert(np.array([0, 0])),
        convert(np.array([[1, 0], [0, 1]])), convert(np.array([81, 82])),
    )  # fmt: skip
    scene.batch.update(SchedulerOutput(running, new) if comes else SchedulerOutput(running))
    step = scene.batch.commit()
    assert scene.batch.num_computed_tokens.tolist() == [4, 5, 3] + [0, 0] * comes
    first, second = (to_numpy(group.block_table_tensor)[:, :2].tolist() for group in step)
    a, b, c = (scene.requests[req_id].blocks for req_id in "ABC")
    assert first == [[*a[0], 91], b[0], [*c[0], 93 - 1]] + [[81, 0], [0, 0]] * comes
    assert second == [[*a[1], 0], [*b[1], 93], [*c[1], 0]] + [[0, 0], [82, 0]] * comes


def test_ids_and_sets_as_lists_of_those_that_go(scene):
    scene.step(new=FIVE)
    if scene.batch.manager is not None:
        scene.manager.preempt(scene.handles(["A"]))
    output = SchedulerOutput(
        RunningRequests(scene.batch.handles[3:], np.ones(2, np.int32)),
        finished={"B"},
        preempted=np.array(["A"]),
    )
    scene.batch.update(output)
    assert scene.batch.req_ids == ["E", "D"]


def test_a_single_group_takes_flat_counts(backend):
    batch = InputBatch(MultiGroupBlockTable([4], 4, 64, 16, backend=backend))
    new = AdmittedRequests(["a", "b"], [3, 8], [3, 8], num_blocks=[1, 2], block_ids=[5, 6, 7])
    handles = batch.update(SchedulerOutput(new=new))
    batch.update(SchedulerOutput(RunningRequests(handles, [1, 1], None, [0, 1], [8])))
    table = to_numpy(batch.commit()[0].block_table_tensor)
    assert table[:, :3].tolist() == [[5, 0, 0], [6, 7, 8]]


# --- whose rows -------------------------------------------------------------------------------------


def test_rows_of_a_manager_that_was_not_given_are_refused():
    scene = scene_of("manager")
    with pytest.raises(ValueError, match="manager must be given: a KVCacheManager writes the table's mirror"):
        InputBatch(scene.table)
    other = scene_of("manager")
    with pytest.raises(ValueError, match="table must commit the manager's mirror"):
        InputBatch(scene.table, other.manager)
    table = MultiGroupBlockTable([4], 8, 64, 64, mirror=HostMirror(8, [32]), backend="numpy")
    with pytest.raises(ValueError, match="table must commit the manager's mirror"):
        InputBatch(table, scene.manager)
    with pytest.raises(ValueError, match="table must commit the manager's mirror"):
        InputBatch(table, "no manager")


@pytest.mark.parametrize("kind", KINDS)
def test_a_mirror_has_one_batch_at_a_time_whichever_table_commits_it(kind):
    scene = scene_of(kind)
    scene.step(new={"A": 5})
    options = {**scene.options, "mirror": scene.table.mirror}
    other = MultiGroupBlockTable(scene.specs, *scene.sizes, **options)
    manager = scene.batch.manager
    for table in (scene.table, other):
        with pytest.raises(
            ValueError, match="table must have one InputBatch, got a second one while another ov"
        ):
            InputBatch(table, manager)
    scene.check(["A"])
    with pytest.raises(ValueError, match="decode_threshold"):
        InputBatch(other, manager, decode_threshold=-1)
    if manager is None:
        scene.batch.remove_request("A")
    del scene.batch
    gc.collect()
    batch = InputBatch(other, manager)
    with pytest.raises(ValueError, match="table must have one InputBatch"):
        InputBatch(scene.table, manager)
    assert batch.req_ids == []


def test_a_batch_that_could_not_be_built_is_in_nobodys_way():
    table = MultiGroupBlockTable([4], 8, 64, 64, backend="numpy")
    with pytest.raises(ValueError, match="decode_threshold") as kept:
        InputBatch(table, decode_threshold=-1)
    InputBatch(table)
    del kept


def test_a_manager_of_rows_in_batch_order_is_refused():
    from pagedkv import FullAttentionSpec, KVCacheManager

    table = MultiGroupBlockTable([4], 8, 64, 64, token_alignment=None, backend="numpy")
    manager = KVCacheManager([FullAttentionSpec(4)], 9, max_num_seqs=8, max_model_len=64, mirror=table.mirror)
    with pytest.raises(ValueError, match="table must have stable rows with a manager"):
        InputBatch(table, manager)


@pytest.mark.parametrize(
    ("thresholds", "error", "message"),
    [
        ((None, 3), ValueError, "short_extend_threshold must be None without a decode_threshold"),
        ((3, 2), ValueError, r"short_extend_threshold must lie in \[3"),
        ((-1, None), ValueError, r"decode_threshold must lie in \[0"),
        ((1.0, None), TypeError, "decode_threshold must be an int"),
        ((True, None), TypeError, "decode_threshold must be an int"),
    ],
)
def test_thresholds_that_make_no_order_are_refused(thresholds, error, message):
    table = MultiGroupBlockTable([4], 8, 64, 64, backend="numpy")
    with pytest.raises(error, match=message):
        InputBatch(table, decode_threshold=thresholds[0], short_extend_threshold=thresholds[1])
