"""What a batch refuses; nothing has changed then: not a row, a position, a kept block or the next handle."""

from dataclasses import dataclass

import numpy as np
import pytest

from pagedkv import CapacityError, PagedKVError, StaleSequenceError
from pagedkv.batch import AdmittedRequests, RunningRequests, SchedulerOutput
from tests.tables.models import to_numpy

from .scenes import KINDS, Scene, assert_unchanged, scene_of, state_of

WRITTEN = ("batch order", "stable")
IN_BATCH = ["A", "B", "C"]


@pytest.fixture(params=WRITTEN)
def scene(request):
    """A, B and C in the batch, D at rest with its blocks, E preempted, F finished; 8 rows, 32 tokens."""
    scene = Scene(request.param, max_num_tokens=32)
    scene.step(new={"A": 5, "B": 3, "C": 4, "D": 7, "E": 2, "F": 1})
    scene.stale = scene.batch.handle_of("F")
    scene.step(IN_BATCH, preempted=["E"], finished=["F"])
    scene.check(IN_BATCH)
    return scene


def running(scene, **changes):
    """A, B and C go on; in a change, a function of the valid value gives the wrong one."""
    fields = {
        "handles": scene.batch.handles,
        "num_scheduled_tokens": np.ones(3, np.int32),
        "num_computed_tokens": scene.batch.num_computed_tokens + 1,
        "num_new_blocks": np.array([[1, 0, 2], [0, 1, 0]], np.int32),
        "block_ids": np.array([91, 92, 93, 94], np.int32),
    }
    for name, change in changes.items():
        fields[name] = change(fields[name]) if callable(change) else change
    return RunningRequests(**fields)


def with_item(index, value):
    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


@dataclass(frozen=True)
class HandleOf:
    """A change to the second handle: that of another request."""

    req_id: str

    def __call__(self, scene):
        known = self.req_id in scene.batch
        return with_item(1, scene.batch.handle_of(self.req_id) if known else scene.stale)


def refused(batch, output, error, message):
    before = state_of(batch)
    with pytest.raises(error, match=message):
        batch.update(output)
    assert_unchanged(before, batch)


# --- running requests -------------------------------------------------------------------------------

H, S, C, N, I = ("handles", "num_scheduled_tokens", "num_computed_tokens", "num_new_blocks", "block_ids")
RUNNING_FAULTS = {
    "a handle of a finished request": (H, HandleOf("F"), StaleSequenceError, "handles must name known requ"),
    "a handle of nobody": (H, with_item(1, 4), StaleSequenceError, "got 4 at place 1"),
    "a handle below 0": (H, with_item(0, -1), StaleSequenceError, "got -1 at place 0"),
    "a handle of an earlier use": (H, lambda h: h - (1 << 32), StaleSequenceError, "handles must name known"),
    "a handle far away": (H, with_item(2, (1 << 62) + 2**31), StaleSequenceError, "handles must name known"),
    "a handle twice": (H, lambda h: h[[0, 1, 0]], ValueError, "must name each request once, got handle"),
    "handles that are floats": (H, lambda h: h.astype(float), TypeError, "handles must be int64"),
    "handles that are bools": (H, lambda h: h > 0, TypeError, r"handles must be int64 \[n\], got bool"),
    "handles in two dimensions": (H, lambda h: h[None], TypeError, r"got int64 \[1, 3\]"),
    "handles that are names": (H, ["A", "B", "C"], TypeError, "handles must be int64"),
    "one handle": (H, lambda h: int(h[0]), TypeError, r"handles must be int64 \[n\], got int"),
    "no handles": (H, None, TypeError, r"handles must be int64 \[n\], got NoneType"),
    "handles past int64": (H, [2**70, 1, 2], TypeError, "handles must be int64"),
    "a preempted request": (H, HandleOf("E"), ValueError, "'E' must come back through resumed"),
    "tokens below 0": (S, with_item(1, -1), ValueError, "num_scheduled_tokens must .*-1"),
    "too few tokens": (S, lambda s: s[:2], ValueError, r"num_scheduled_tokens must have shape \[n\] = \[3\]"),
    "too many counts of tokens": (S, np.ones(4, np.int32), ValueError, r"shape \[n\] = \[3\], got \[4\]"),
    "tokens as floats": (S, lambda s: s * 1.0, TypeError, "num_scheduled_tokens must hold integers"),
    "tokens as bools": (S, lambda s: s > 0, TypeError, "num_scheduled_tokens must hold integers"),
    "tokens in two dimensions": (S, lambda s: s[None], ValueError, "num_scheduled_tokens must have one dim"),
    "tokens past int32": (S, [1, 2**31, 1], ValueError, r"must lie in \[0, 2147483647\]"),
    "tokens as None": (S, None, TypeError, "num_scheduled_tokens must hold integers"),
    "one token for all": (S, 1, ValueError, "num_scheduled_tokens must have one dimension"),
    "more tokens than a step": (S, with_item(0, 31), CapacityError, "at most 32 tokens .* got 3[3-9]"),
    "tokens whose sum passes int32": (S, np.full(3, 2**30, np.int32), CapacityError, "got 322122547[25]"),
    "a length past int32": (S, with_item(1, 2**31 - 4), ValueError, "2147483647, got 2147483648 .*'B'"),
    "computed below 0": (C, with_item(2, -5), ValueError, "num_computed_tokens must .*-5"),
    "too few computed": (C, lambda c: c[:1], ValueError, "num_computed_tokens must have shape"),
    "none computed": (C, np.empty(0, np.int32), ValueError, "num_computed_tokens must have shape"),
    "an empty list computed": (C, [], ValueError, "num_computed_tokens must have shape"),
    "computed past int32": (C, with_item(2, 2**31 - 1), ValueError, "2147483647, got 2147483648 .*'C'"),
    "computed as floats": (C, lambda c: c * 1.0, TypeError, "num_computed_tokens must hold integers"),
    "counts of too few groups": (N, lambda n: n[:1], ValueError, r"num_new_blocks must have shape \[G, n\]"),
    "counts of too many groups": (N, lambda n: n[[0, 1, 1]], ValueError, "num_new_blocks must have shape"),
    "counts of too few requests": (N, lambda n: n[:, :2], ValueError, "num_new_blocks must have shape"),
    "counts of no request": (N, np.empty((2, 0), np.int32), ValueError, "num_new_blocks must have shape"),
    "flat counts": (N, lambda n: n[0], ValueError, "num_new_blocks must have shape"),
    "counts below 0": (N, with_item((1, 0), -1), ValueError, "num_new_blocks must lie in .*-1"),
    "counts that are floats": (N, lambda n: n * 1.0, TypeError, "num_new_blocks must hold integers"),
    "counts that are bools": (N, lambda n: n > 0, TypeError, "num_new_blocks must hold integers"),
    "ids without counts": (N, None, ValueError, "num_new_blocks must be given beside block_ids"),
    "counts without ids": (I, None, ValueError, "block_ids must hold 4 ids, the sum of the counts, got 0"),
    "too few ids": (I, lambda i: i[:3], ValueError, "block_ids must hold 4 ids, .* got 3"),
    "too many ids": (I, lambda i: i[[0, 1, 2, 3, 3]], ValueError, "block_ids must hold 4 ids, .* got 5"),
    "an id below 0": (I, with_item(2, -1), ValueError, r"block_ids must lie in \[0"),
    "an id past the limit": (I, [91, 92, 2**31, 94], ValueError, r"block_ids must lie in \[0"),
    "ids that are floats": (I, lambda i: i * 1.0, TypeError, "block_ids must hold integers"),
    "ids in two dimensions": (I, lambda i: i[None], ValueError, "block_ids must have one dimension"),
}  # fmt: skip


@pytest.mark.parametrize("comes", [False, True], ids=["short way", "long way"])
@pytest.mark.parametrize("what", RUNNING_FAULTS)
def test_running_requests_that_are_wrong(scene, what, comes):
    name, change, error, message = RUNNING_FAULTS[what]
    change = change(scene) if isinstance(change, HandleOf) else change
    new = AdmittedRequests(["X"], [3], [3], None, [[1], [1]], [81, 82]) if comes else AdmittedRequests()
    refused(scene.batch, SchedulerOutput(running(scene, **{name: change}), new), error, message)
    scene.step(["A", "B", "C", "D"], new={"X": 3})
    scene.check(["A", "B", "C", "X", "D"])


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 0], [0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0]],
        [[1, 1, 0]],
        [[1, 1, 0], [0, 0, 0], [0, 0, 0]],
        [[-1, 2, 1], [0, 0, 0]],
        [[], []],
    ],
    ids=str,
)
def test_counts_of_a_wrong_shape_or_sign_whose_sum_is_right(scene, counts):
    table = np.array(counts, np.int32)
    going_on = running(scene, num_new_blocks=table, block_ids=np.array([91, 92][: table.sum()], np.int32))
    refused(scene.batch, SchedulerOutput(going_on), ValueError, "num_new_blocks must")


def test_a_request_that_was_preempted_while_it_rested(scene):
    handle = scene.batch.handle_of("D")
    scene.step(IN_BATCH, preempted=["D"])
    output = SchedulerOutput(RunningRequests([handle], [1]))
    refused(scene.batch, output, ValueError, "'D' must come back through resumed")


@pytest.mark.parametrize("comes", [False, True], ids=["short way", "long way"])
def test_a_row_that_would_be_too_long(scene, comes):
    counts = np.array([[0, 0, 31], [0, 0, 0]], np.int32)
    new = AdmittedRequests(["X"], [3], [3]) if comes else AdmittedRequests()
    output = SchedulerOutput(running(scene, num_new_blocks=counts, block_ids=np.ones(31, np.int32)), new)
    refused(scene.batch, output, CapacityError, "'C' in group 0 must hold at most 32 blocks, got 33")


def test_a_row_that_would_be_too_long_with_what_it_kept(scene):
    handles = [scene.batch.handle_of("D")]
    output = SchedulerOutput(RunningRequests(handles, [1], None, [[31], [0]], [1] * 31))
    refused(scene.batch, output, CapacityError, "'D' in group 0 must hold at most 32 blocks, got 33")


def test_an_id_whose_kernel_blocks_pass_int32():
    scene = Scene("stable", views=True)
    scene.step(new={"A": 3})
    largest = (2**31 - 2) // 2
    for new in (AdmittedRequests(), AdmittedRequests(["X"], [3], [3])):
        output = SchedulerOutput(
            RunningRequests(scene.batch.handles, [1], None, [[0], [1]], [largest + 1]), new
        )
        refused(scene.batch, output, ValueError, f"block_ids must lie in \\[0, {largest}\\], got .* group 1")


# --- requests that start ----------------------------------------------------------------------------

ADMISSION_FAULTS = {
    "an id twice": ({"req_ids": ["X", "Y", "X"]}, ValueError, "must name each request once, got 'X' twice"),
    "an id that has no hash": ({"req_ids": ["X", [], "Z"]}, TypeError, "unhashable"),
    "too few prompts": ({"num_prefill_tokens": [3, 3]}, ValueError, "num_prefill_tokens must have shape"),
    "prompts below 0": ({"num_prefill_tokens": [3, -3, 3]}, ValueError, "num_prefill_tokens must lie"),
    "too few tokens": ({"num_scheduled_tokens": [3]}, ValueError, "num_scheduled_tokens must have shape"),
    "tokens below 0": ({"num_scheduled_tokens": [3, -1, 3]}, ValueError, "num_scheduled_tokens must lie"),
    "tokens as floats": ({"num_scheduled_tokens": [3.0, 1.0, 3.0]}, TypeError, "must hold integers"),
    "tokens as bools": ({"num_scheduled_tokens": [True, True, False]}, TypeError, "must hold integers"),
    "computed below 0": ({"num_computed_tokens": [0, 0, -2]}, ValueError, "num_computed_tokens must lie"),
    "a length past int32": (
        {"num_computed_tokens": [0, 2**31 - 3, 2**31 - 4]},
        ValueError,
        "must be at most 2147483647, got 2147483648 for request 'Y'",
    ),
    "too many computed": ({"num_computed_tokens": [0] * 4}, ValueError, "num_computed_tokens must have sh"),
    "more tokens than a step": ({"num_scheduled_tokens": [30, 2, 1]}, CapacityError, "at most 32 tokens"),
    "counts of too few groups": ({"num_blocks": [[1, 1, 1]]}, ValueError, "num_blocks must have shape"),
    "counts of too few requests": ({"num_blocks": [[2, 1], [1, 2]]}, ValueError, "num_blocks must have sh"),
    "flat counts": ({"num_blocks": [2, 1, 3]}, ValueError, "num_blocks must have shape"),
    "counts below 0": ({"num_blocks": [[-1, 1, 1], [1, 1, 1]]}, ValueError, "num_blocks must lie in"),
    "counts as floats": ({"num_blocks": [[1.0] * 3] * 2}, TypeError, "num_blocks must hold integers"),
    "ids without counts": ({"num_blocks": None}, ValueError, "num_blocks must be given beside block_ids"),
    "counts without ids": ({"block_ids": None}, ValueError, "block_ids must hold 6 ids, .* got 0"),
    "too few ids": ({"block_ids": [81] * 5}, ValueError, "block_ids must hold 6 ids, .* got 5"),
    "an id below 0": ({"block_ids": [81] * 5 + [-1]}, ValueError, "block_ids must lie in"),
    "a row too long": (
        {"num_blocks": [[1, 33, 1], [1, 1, 1]], "block_ids": [81] * 38},
        CapacityError,
        "'Y' in group 0 must hold at most 32 blocks, got 33",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ADMISSION_FAULTS)
@pytest.mark.parametrize("kind_of_start", ["new", "resumed"])
def test_requests_that_start_and_are_wrong(scene, what, kind_of_start):
    changes, error, message = ADMISSION_FAULTS[what]
    names = {"X": "E", "Y": "D", "Z": "B"} if kind_of_start == "resumed" else {}
    fields = {
        "req_ids": ["X", "Y", "Z"],
        "num_prefill_tokens": [3, 3, 3],
        "num_scheduled_tokens": [3, 3, 3],
        "num_blocks": [[1, 1, 1], [1, 1, 1]],
        "block_ids": [81, 82, 83, 84, 85, 86],
        **changes,
    }
    fields["req_ids"] = [
        names.get(name, name) if isinstance(name, str) else name for name in fields["req_ids"]
    ]
    for name, renamed in names.items():
        message = message.replace(f"'{name}'", f"'{renamed}'")
    going_on = RunningRequests(scene.batch.handles[[0, 2]], [0, 0])
    output = SchedulerOutput(going_on, **{kind_of_start: AdmittedRequests(**fields)})
    refused(scene.batch, output, error, message)


def test_handles_where_there_is_no_manager(scene):
    output = SchedulerOutput(new=AdmittedRequests(["X"], [3], [3], handles=[5]))
    refused(scene.batch, output, ValueError, "handles must be None without a manager")


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        ({"resumed": ["unknown"]}, LookupError, "resumed must name known requests that go on, got 'unknown'"),
        ({"resumed": ["F"]}, LookupError, "resumed must name known requests that go on, got 'F'"),
        ({"resumed": ["E"], "finished": ["E"]}, LookupError, "resumed must name known requests that go on"),
        ({"resumed": ["E"], "new": ["E"]}, LookupError, "resumed must name known requests that go on"),
        ({"preempted": ["A", "unknown"]}, LookupError, "preempted must name known requests .* got 'unknown'"),
        ({"finished": ["B"]}, ValueError, "'B' must be named once, got it running and finished or new"),
        ({"new": ["C"]}, ValueError, "'C' must be named once, got it running and finished or new"),
        ({"preempted": ["B"]}, ValueError, "'B' must be named once, got it running and preempted"),
        ({"resumed": ["A"]}, ValueError, "'A' must be named once, got it running and resumed"),
        ({"finished": [[]]}, TypeError, "unhashable"),
    ],
    ids=str,
)
def test_lists_that_contradict_each_other(scene, lists, error, message):
    fields = {
        name: AdmittedRequests(ids, [3] * len(ids), [3] * len(ids)) if name in ("new", "resumed") else ids
        for name, ids in lists.items()
    }
    refused(scene.batch, SchedulerOutput(running(scene), **fields), error, message)


def test_one_that_is_over_may_be_preempted_as_well(scene):
    scene.batch.update(SchedulerOutput(finished=["A"], preempted=["A", "B", "B"]))
    assert ("A" in scene.batch, "B" in scene.batch) == (False, True)


@pytest.mark.parametrize("kind", KINDS)
def test_more_requests_than_the_batch_has_positions(kind):
    scene = scene_of(kind, max_num_reqs=3)
    scene.step(new={"A": 1, "B": 2})
    names = ["X", "Y"]
    handles = [scene.manager.add(range(3)) for _ in names] if kind == "manager" else None
    new = AdmittedRequests(names, [3, 3], [3, 3], handles=handles)
    output = SchedulerOutput(RunningRequests(scene.batch.handles, [1, 1]), new)
    refused(scene.batch, output, CapacityError, "a step must have at most 3 requests .* got 4")


def test_more_requests_than_there_are_stable_rows():
    """Who rests keeps its row, so the rows can be fewer than the positions."""
    scene = Scene("stable", max_num_reqs=3)
    scene.step(new={"A": 1, "B": 2, "C": 3})
    new = AdmittedRequests(["X"], [3], [3])
    output = SchedulerOutput(RunningRequests(scene.batch.handles[:2], [1, 1]), new)
    refused(scene.batch, output, CapacityError, "0 of 3 are free, got 1 that start")
    refused(scene.batch, SchedulerOutput(new=new), CapacityError, "0 of 3 are free, got 1 that start")
    scene.step(["A", "B"], new={"X": 3}, preempted=["C"])
    scene.check(["A", "B", "X"])
    output = SchedulerOutput(resumed=AdmittedRequests(["C"], [3], [3]))
    refused(scene.batch, output, CapacityError, "0 of 3 are free, got 1 that start")


def test_a_row_that_is_given_up_is_needed_again_by_who_resumes_at_once():
    scene = Scene("stable", max_num_reqs=3)
    scene.step(new={"A": 1, "B": 2, "C": 3})
    scene.step(["A", "C"])  # B keeps its row
    going_on = RunningRequests([scene.batch.handle_of("C")], [1])
    one = ([3], [3])
    output = SchedulerOutput(
        going_on, AdmittedRequests(["X"], *one), AdmittedRequests(["A"], *one), preempted=["A"]
    )
    refused(scene.batch, output, CapacityError, "1 of 3 are free, got 2 that start")
    scene.step(["C"], resumed={"A": 3}, preempted=["A"])
    scene.check(["A", "C"])


# --- with a manager ---------------------------------------------------------------------------------


@pytest.fixture
def managed():
    scene = scene_of("manager", max_num_tokens=32)
    scene.step(new={"A": 5, "B": 3})
    scene.check(["A", "B"])
    return scene


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"num_blocks": [[1], [1]], "block_ids": [5, 6]},
            ValueError,
            "num_blocks must be None with a manager",
        ),
        ({"block_ids": []}, ValueError, "num_blocks must be None with a manager"),
        ({"handles": None}, ValueError, "handles must be given with a manager"),
        ({"handles": [1.5]}, TypeError, r"handles must be int64 \[n\], got float64"),
        ({"handles": [True]}, TypeError, r"handles must be int64 \[n\], got bool"),
        ({"handles": [7, 8]}, ValueError, r"handles must have shape \[n\] = \[1\]"),
        ({"handles": [2**31]}, StaleSequenceError, "must be a live sequence, got 2147483648"),
        ({"handles": [-1]}, StaleSequenceError, "must be a live sequence, got -1"),
    ],
    ids=str,
)
def test_new_requests_of_a_manager_that_are_wrong(managed, fields, error, message):
    good = {"req_ids": ["X"], "num_prefill_tokens": [3], "num_scheduled_tokens": [3], "handles": [5]}
    refused(managed.batch, SchedulerOutput(new=AdmittedRequests(**(good | fields))), error, message)


def test_handles_of_a_manager_that_are_taken(managed):
    a, free = managed.batch.handle_of("A"), managed.manager.add(range(3))
    two = ([3, 3], [3, 3])
    new = AdmittedRequests(["X", "Y"], *two, handles=[free, free])
    refused(managed.batch, SchedulerOutput(new=new), ValueError, "handles must be the manager's, each once")
    new = AdmittedRequests(["X", "Y"], *two, handles=[free, a])
    refused(managed.batch, SchedulerOutput(new=new), ValueError, "'Y' must be free, got that of 'A'")
    managed.manager.free([a])
    reused = managed.manager.add(range(4))
    assert reused & 0xFFFFFFFF == a & 0xFFFFFFFF
    new = AdmittedRequests(["X", "Y"], *two, handles=[free, reused])
    refused(managed.batch, SchedulerOutput(new=new), ValueError, "'Y' must be free, got that of 'A'")
    managed.batch.update(SchedulerOutput(new=new, finished=["A"]))
    assert managed.batch.req_ids == ["X", "Y"]


@pytest.mark.parametrize("comes", [False, True])
def test_running_requests_of_a_manager_take_no_blocks(managed, comes):
    new = (
        AdmittedRequests(["X"], [3], [3], handles=[managed.manager.add(range(3))])
        if comes
        else AdmittedRequests()
    )
    ready = (np.array([[1, 0], [0, 0]], np.int32), np.array([7], np.int32))
    for blocks in (([[1, 0], [0, 0]], [7]), ready, (np.zeros((2, 2), np.int32), None), (None, [7])):
        going_on = RunningRequests(managed.batch.handles, np.ones(2, np.int32), None, *blocks)
        output = SchedulerOutput(going_on, new)
        refused(managed.batch, output, ValueError, "num_new_blocks must be None with a manager")


def test_a_request_of_a_manager_without_blocks_is_not_committed(managed):
    batch, handle = managed.batch, managed.manager.add(range(3))
    batch.update(SchedulerOutput(new=AdmittedRequests(["X"], [3], [3], handles=[handle])))
    before = state_of(batch)
    for call in (batch.commit, lambda: batch.pack(managed.table.captured_step(4, 8))):
        with pytest.raises(PagedKVError, match=f"must have blocks, got none for handle {handle}"):
            call()
    assert_unchanged(before, batch)
    managed.manager.free([handle])
    with pytest.raises(StaleSequenceError):
        batch.commit()
    assert_unchanged(before, batch)


# --- one request at a time --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("A", 3, 3), ValueError, "'A' must be unknown, got one that is"),
        (("D", 3, 3), ValueError, "'D' must be unknown, got one that is"),
        (("X", 3, 40), CapacityError, "at most 32 tokens .* got 4"),
        (("E", 3, 3), ValueError, "'E' must be unknown, got one that is"),
        (("X", 3, 30), CapacityError, "at most 32 tokens .* got 33"),
        (("X", 3, 1, 2**31 - 1), ValueError, "must be at most 2147483647, got 2147483648 for request 'X'"),
        (("X", -1), ValueError, "num_prefill_tokens must lie in"),
        (("X", 3.0), TypeError, "num_prefill_tokens must hold integers"),
        (("X", 3, 1, 0, [[1]]), ValueError, "one list for each of 2 groups, got 1"),
        (("X", 3, 1, 0, [[1], [-1]]), ValueError, "block_ids must lie in"),
        (("X", 3, 1, 0, [[1], [True]]), TypeError, "block_ids must hold integers"),
        (("X", 3, 1, 0, [[1], [1] * 70]), CapacityError, "'X' in group 1 must hold at most 64 blocks"),
        (("X", 3, 1, 0, None, 5), ValueError, "handles must be None without a manager"),
        (([], 3, 1), TypeError, "unhashable"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_added(scene, arguments, error, message):
    before = state_of(scene.batch)
    with pytest.raises(error, match=message):
        scene.batch.add_request(*arguments)
    assert_unchanged(before, scene.batch)


def test_a_request_that_cannot_be_added_beside_others():
    scene = Scene("batch order", max_num_reqs=2)
    scene.step(new={"A": 1, "B": 2})
    before = state_of(scene.batch)
    with pytest.raises(CapacityError, match="at most 2 requests"):
        scene.batch.add_request("C", 3)
    assert_unchanged(before, scene.batch)
    scene.batch.remove_request("A")
    scene.batch.add_request("C", 3)
    assert scene.batch.req_ids == ["C", "B"]


def test_unknown_requests(scene):
    before = state_of(scene.batch)
    for call in (scene.batch.handle_of, scene.batch.position_of):
        with pytest.raises(LookupError, match="'F' must be known"):
            call("F")
    assert scene.batch.remove_request("F") is None
    assert "F" not in scene.batch
    assert_unchanged(before, scene.batch)


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ([0, 1], ValueError, r"order must have shape \[num_reqs\] = \[3\], got \[2\]"),
        ([0, 1, 1], ValueError, "order must name each of 3 positions once"),
        ([0, 1, 3], ValueError, "order must name each of 3 positions once"),
        ([0, 1, -1], ValueError, "order must lie in"),
        ([0.0, 1.0, 2.0], TypeError, "order must hold integers"),
        ([True, False, True], TypeError, "order must hold integers"),
        ([[0, 1, 2]], ValueError, "order must have one dimension"),
    ],
    ids=str,
)
def test_orders_that_are_no_permutation(scene, order, error, message):
    before = state_of(scene.batch)
    with pytest.raises(error, match=message):
        scene.batch.reorder(order)
    assert_unchanged(before, scene.batch)


@pytest.mark.parametrize(
    ("pair", "error"), [((0, 3), ValueError), ((-1, 0), ValueError), ((0, 1.0), TypeError)]
)
def test_swaps_of_positions_that_are_none(scene, pair, error):
    before = state_of(scene.batch)
    with pytest.raises(error, match="position must"):
        scene.batch.swap(*pair)
    assert_unchanged(before, scene.batch)


def test_a_batch_with_holes_is_neither_committed_nor_ordered(scene):
    batch, captured = scene.batch, scene.table.captured_step(4, 8)
    batch.remove_request("B")
    before = state_of(batch)
    calls = (
        batch.commit,
        lambda: batch.pack(captured),
        lambda: batch.swap(0, 2),
        lambda: batch.reorder([0, 1, 2]),
    )
    for call in calls:
        with pytest.raises(PagedKVError, match=r"must have no holes, got \[1\] \(call condense\(\)\)"):
            call()
    assert_unchanged(before, batch)


# --- commits ----------------------------------------------------------------------------------------

COMMIT_FAULTS = [
    ({"num_reqs_padded": 2}, CapacityError, "num_reqs_padded must lie in"),
    ({"num_reqs_padded": 9}, CapacityError, "num_reqs_padded must lie in"),
    ({"num_reqs_padded": 2**31 - 1}, CapacityError, "num_reqs_padded must lie in"),
    ({"num_reqs_padded": 2**40}, ValueError, "num_reqs_padded must lie in"),
    ({"num_reqs_padded": -1}, ValueError, "num_reqs_padded must lie in"),
    ({"num_reqs_padded": 4.0}, TypeError, "num_reqs_padded must be an int"),
    ({"num_tokens_padded": 2}, ValueError, "num_tokens_padded must be at least"),
    ({"num_tokens_padded": 33}, CapacityError, "num_tokens_padded must be at most"),
    ({"max_seq_len": 4.0}, TypeError, "max_seq_len must be an int"),
    ({"max_seq_len": -1}, ValueError, "max_seq_len must lie in"),
    ({"max_seq_len": 5}, ValueError, r"max_seq_len must lie in \[6, 2147483647\], got 5"),
    ({"out": 1}, ValueError, "out must name one of 1 output sets"),
    ({"positions": np.zeros(2, np.int64)}, ValueError, "positions must hold the 3"),
    ({"positions": np.zeros(3, np.int32)}, TypeError, "positions must be int64"),
    ({"num_computed_tokens": np.zeros(2, np.int32)}, ValueError, "num_computed_tokens must have shape"),
    (
        {"num_computed_tokens": np.zeros((1, 3), np.int32)},
        ValueError,
        "num_computed_tokens must have one dim",
    ),
    ({"num_computed_tokens": [0, 0, -1]}, ValueError, "num_computed_tokens must lie in"),
    ({"num_computed_tokens": np.zeros(3)}, TypeError, "num_computed_tokens must hold integers"),
    (
        {"num_computed_tokens": np.array([5, 3, 5], np.int32)},
        ValueError,
        "num_computed_tokens must be at most the batch's, .* 4 at position 2, got 5 .give it to update",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), COMMIT_FAULTS, ids=str)
def test_commits_that_are_wrong(scene, options, error, message):
    before = state_of(scene.batch)
    with pytest.raises(error, match=message):
        scene.batch.commit(**options)
    assert_unchanged(before, scene.batch)


def test_a_length_past_int32_that_a_batch_counts_by_itself(scene):
    """Tokens of the last step count as computed, be it that the request rested since."""
    largest = 2**31 - 1
    scene.batch.update(SchedulerOutput(RunningRequests(scene.batch.handles[:1], [1], [largest - 1])))
    handle = scene.batch.handles[:1]
    for output in (
        SchedulerOutput(RunningRequests(handle, [1])),
        SchedulerOutput(RunningRequests(handle, np.ones(1, np.int32))),
        SchedulerOutput(RunningRequests(handle, [1]), AdmittedRequests(["X"], [1], [1])),
    ):
        refused(
            scene.batch, output, ValueError, f"must be at most {largest}, got {largest + 1} for request 'A'"
        )
    scene.batch.update(SchedulerOutput())
    output = SchedulerOutput(RunningRequests(handle, [1]))
    refused(scene.batch, output, ValueError, f"must be at most {largest}, got {largest + 1} for request 'A'")
    scene.batch.update(SchedulerOutput(RunningRequests(handle, [0])))
    step = scene.batch.commit()
    assert step.batch.seq_lens_cpu_upper_bound.tolist() == [largest]
    assert to_numpy(step.batch.seq_lens).tolist() == [largest]
    assert step.batch.max_seq_len == largest


def test_a_captured_step_of_another_table(scene):
    other = Scene("stable" if scene.is_stable else "batch order", max_num_tokens=32)
    captured = other.table.captured_step(4, 8)
    before, others = state_of(scene.batch), state_of(other.batch)
    with pytest.raises(ValueError, match="captured must be a step of the batch's table, got another's"):
        scene.batch.pack(captured)
    assert_unchanged(before, scene.batch)
    assert_unchanged(others, other.batch)
    other.batch.pack(captured)


def test_a_step_that_does_not_fit_a_captured_one(scene):
    captured = scene.table.captured_step(2, 8)
    before = state_of(scene.batch)
    with pytest.raises(CapacityError, match="num_reqs must be at most the captured 2, got 3"):
        scene.batch.pack(captured)
    with pytest.raises(TypeError, match="max_seq_len must be an int"):
        scene.batch.pack(scene.table.captured_step(4, 8), max_seq_len="all")
    assert_unchanged(before, scene.batch)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((9, 9), {}, ValueError, r"num_reqs must lie in \[0, 8\], got 9"),
        ((-1, 0), {}, ValueError, "num_reqs must lie in"),
        ((2.0, 2), {}, TypeError, "num_reqs must be an int"),
        ((2, 33), {}, ValueError, r"num_tokens must lie in \[0, 32\], got 33"),
        ((0, 1), {}, ValueError, r"num_tokens must lie in \[0, 0\], got 1"),
        ((2, True), {}, TypeError, "num_tokens must be an int"),
        ((2, 7), {"seq_len": 3}, ValueError, r"seq_len must lie in \[4"),
        ((2, 7), {"max_seq_len": 1.5}, TypeError, "max_seq_len must be an int"),
        ((2, 7), {"out": 3}, ValueError, "out must name one of 1 output sets"),
    ],
    ids=str,
)
def test_dummy_steps_that_are_wrong_leave_the_batch_standing(scene, arguments, options, error, message):
    numbers, _, order, kept, free, names, _ = state_of(scene.batch)
    before = [to_numpy(group.block_table_tensor).copy() for group in scene.batch.commit()]
    with pytest.raises(error, match=message):
        scene.batch.dummy(*arguments, **options)
    after = state_of(scene.batch)
    np.testing.assert_array_equal(numbers, after[0])
    np.testing.assert_array_equal(order, after[2])
    assert (free, names) == after[4:6]
    assert list(kept) == list(after[3])
    for table, group in zip(before, scene.batch.commit(), strict=True):
        np.testing.assert_array_equal(table, to_numpy(group.block_table_tensor))
    scene.step([*IN_BATCH, "D"])
    scene.check([*IN_BATCH, "D"])


def test_a_refused_dummy_step_leaves_holes_where_they_were(scene):
    scene.batch.remove_request("B")
    with pytest.raises(ValueError, match="out must name"):
        scene.batch.dummy(2, 2, out=1)
    assert scene.batch.req_ids == ["A", None, "C"]
    del scene.requests["B"]
    scene.batch.condense()
    scene.check(["A", "C"])
