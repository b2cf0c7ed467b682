"""previous_positions: where each request stood in the step committed last, whatever moved since."""

import numpy as np
import pytest

from pagedkv.batch import AdmittedRequests, InputBatch, SchedulerOutput
from tests.tables.models import everything

from .scenes import KINDS, scene_of

FIVE = {"A": 5, "B": 9, "C": 4, "D": 13, "E": 1}


@pytest.fixture(params=KINDS)
def scene(request, backend):
    """Five requests in a committed step."""
    scene = scene_of(request.param, backend, max_num_reqs=5)
    scene.step(new=FIVE)
    assert scene.batch.previous_positions.tolist() == [-1] * 5
    scene.check(list(FIVE))
    return scene


def previous(scene):
    """{id: where it stood}, as the batch tells it."""
    found = scene.batch.previous_positions
    assert found.dtype == np.int32
    return dict(zip(scene.batch.req_ids, found.tolist(), strict=True))


def remove(scene, req_id):
    if scene.batch.manager is not None:
        scene.manager.free(scene.handles([req_id]))
    scene.batch.remove_request(req_id)
    del scene.requests[req_id]


def test_a_step_that_changes_nothing(scene):
    scene.step(list(FIVE))
    assert previous(scene) == {"A": 0, "B": 1, "C": 2, "D": 3, "E": 4}


def test_some_go_some_rest_and_one_comes(scene):
    scene.step(["A", "C", "E"], new={"X": 7}, finished=["B"])  # D rests
    assert previous(scene) == {"A": 0, "X": -1, "C": 2, "E": 4}
    scene.check(["A", "X", "C", "E"])
    scene.step(["A", "X", "C", "E", "D"])
    assert previous(scene) == {"A": 0, "X": 1, "C": 2, "E": 3, "D": -1}


def test_removals_that_are_condensed(scene):
    remove(scene, "A")
    assert scene.batch.previous_positions.tolist() == [-1, 1, 2, 3, 4]  # a hole, though all slots are known
    scene.batch.condense()
    assert previous(scene) == {"E": 4, "B": 1, "C": 2, "D": 3}
    scene.step(["B", "C", "D", "E"])
    assert previous(scene) == {"E": 4, "B": 1, "C": 2, "D": 3}


def test_swaps_and_orders(scene):
    scene.batch.swap(0, 3)
    assert scene.batch.previous_positions.tolist() == [3, 1, 2, 0, 4]
    scene.batch.reorder([4, 3, 2, 1, 0])
    scene.step(list(FIVE))
    assert previous(scene) == {"A": 0, "B": 1, "C": 2, "D": 3, "E": 4}


def test_several_updates_between_commits(scene):
    scene.step(["A", "C", "D", "E"], finished=["B"])
    scene.step(["D", "E"])
    scene.step(["A", "D", "E"], new={"X": 3})
    assert previous(scene) == {"E": 4, "D": 3, "A": 0, "X": -1}


def test_a_commit_makes_it_the_last_step(scene):
    scene.batch.swap(0, 4)
    scene.batch.commit()
    assert scene.batch.previous_positions.tolist() == [0, 1, 2, 3, 4]
    scene.batch.swap(0, 4)
    assert scene.batch.previous_positions.tolist() == [4, 1, 2, 3, 0]


def test_a_packed_step_counts(scene):
    captured = scene.table.captured_step(5, 40)
    scene.step(list("BCDE"))
    scene.batch.pack(captured)
    captured.enqueue()
    captured.mark_replayed()
    scene.step(list("ABCDE"))
    assert previous(scene) == {"E": 0, "B": 1, "C": 2, "D": 3, "A": -1}


def test_a_dummy_step_is_none(scene):
    scene.step(list("BCDE"))
    scene.batch.commit()
    scene.batch.dummy(3, 3)
    scene.batch.dummy(5, 5)
    scene.step(list("ECBA"))
    assert {name: place for name, place in previous(scene).items() if name != "A"} == {"E": 0, "C": 2, "B": 1}
    assert previous(scene)["A"] == -1


def test_a_refused_commit_is_none(scene):
    captured = scene.table.captured_step(2, 4)
    scene.batch.swap(0, 1)
    for call in (
        lambda: scene.batch.commit(num_tokens_padded=1),
        lambda: scene.batch.commit(out=9),
        lambda: scene.batch.commit(max_seq_len=1),
        lambda: scene.batch.pack(captured),
    ):
        with pytest.raises(ValueError, match="must"):
            call()
    assert scene.batch.previous_positions.tolist() == [1, 0, 2, 3, 4]


def test_a_resumed_request_stood_where_it_stood(scene):
    scene.step(list("ACDE"), resumed={"B": 10}, preempted=["B"])
    assert previous(scene) == {"A": 0, "B": 1, "C": 2, "D": 3, "E": 4}
    scene.step(list("ACDE"), preempted=["B"])
    scene.step(list("ACDE"), resumed={"B": 10})
    assert previous(scene)["B"] == 1
    scene.step(list("ACDE"), preempted=["B"])
    scene.batch.commit()
    scene.step(list("ACDE"), resumed={"B": 10})
    assert previous(scene)["B"] == -1


def test_an_id_that_starts_anew_was_in_no_step_whoever_has_its_slot(scene):
    """One handle is one life of a request; slots are used again."""
    scene.step(list("ABDE"), new={"C": 11}, finished=["C"])
    assert previous(scene) == {"A": 0, "B": 1, "C": -1, "D": 3, "E": 4}
    scene.step(list("ABDE"), new={"X": 2}, finished=["C"])
    assert previous(scene)["X"] == -1


def test_a_read_changes_nothing(scene):
    before = everything(scene.table)
    scene.batch.previous_positions[:] = 77
    assert scene.batch.previous_positions.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_equal(before, everything(scene.table))


def test_more_requests_are_known_later_than_when_the_step_was_committed(backend):
    scene = scene_of("batch order", backend, max_num_reqs=2)
    scene.step(new={"A": 2, "B": 3})
    scene.batch.commit()
    for i in range(8):  # slots beyond those that there were
        scene.step(new={f"{i}": 2, f"{i} too": 2})
        assert scene.batch.previous_positions.tolist() == [-1, -1]
    scene.step(["B", "A"])
    assert scene.batch.previous_positions.tolist() == [1, 0]


def test_without_a_step_nobody_stood_anywhere(backend):
    batch = InputBatch(scene_of("batch order", backend).make()[0])
    assert batch.previous_positions.tolist() == []
    batch.update(SchedulerOutput(new=AdmittedRequests(["A"], [1], [1])))
    assert batch.previous_positions.tolist() == [-1]
