"""The order of a batch: which permutation sorts it by class, its swaps, and the rows that follow."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedkv.batch import AdmittedRequests, RunningRequests, SchedulerOutput
from pagedkv.batch.reordering import classes_of, order_by_class, swaps_of

from .scenes import Scene, scene_of

WRITTEN = ("batch order", "stable")


def num_cycles(order):
    """Cycles of a permutation, fixed places among them."""
    left, num = set(range(len(order))), 0
    while left:
        at = left.pop()
        while order[at] in left:
            at = order[at]
            left.remove(at)
        num += 1
    return num


def applied(pairs, n):
    """Who stands where after swaps, pair by pair."""
    standing = list(range(n))
    for a, b in zip(*(places.tolist() for places in pairs), strict=True):
        standing[a], standing[b] = standing[b], standing[a]
    return standing


def check_swaps(order):
    pairs = swaps_of(np.array(order, np.int64))
    assert applied(pairs, len(order)) == list(order)
    assert pairs[0].size == len(order) - num_cycles(order), "as few as there can be"
    assert all(array.dtype == np.int32 and array.flags.carray for array in pairs)


@pytest.mark.parametrize("n", range(7))
def test_swaps_of_every_small_permutation(n):
    for order in permutations(range(n)):
        check_swaps(order)


@given(st.integers(0, 60).flatmap(lambda n: st.permutations(range(n))))
def test_swaps_of_large_permutations(order):
    check_swaps(order)


def sorted_as_told(classes):
    """The order by its description: who stands in its class's region stays, the others fill the gaps."""
    wanted = sorted(classes)
    stays = [i for i, (have, want) in enumerate(zip(classes, wanted, strict=True)) if have == want]
    order = [i if i in stays else None for i in range(len(classes))]
    waiting = [i for i in range(len(classes)) if i not in stays]
    for place in range(len(classes)):
        if order[place] is None:
            order[place] = next(i for i in waiting if classes[i] == wanted[place])
            waiting.remove(order[place])
    return order


@given(st.lists(st.integers(0, 3), max_size=40))
@example([])
@example([3])
@example([3, 2, 1, 0])
@example([0, 0, 1, 3])
@example([1, 0, 3, 2, 0, 1])
def test_the_misplaced_are_sorted_and_nobody_else_moves(classes):
    order = order_by_class(np.array(classes, np.int64)).tolist()
    assert sorted(order) == list(range(len(classes)))
    assert [classes[i] for i in order] == sorted(classes)
    assert order == sorted_as_told(classes)


CASES = [  # computed, scheduled, class with thresholds 2 and 5
    (1, 1, 0),
    (9, 2, 0),
    (9, 0, 0),
    (9, 3, 1),
    (1, 5, 1),
    (9, 6, 2),
    (0, 1, 3),
    (0, 0, 3),
    (0, 9, 3),
]


@pytest.mark.parametrize(("computed", "scheduled", "expected"), CASES)
def test_classes_by_tokens_and_context(computed, scheduled, expected):
    assert classes_of(np.array([computed]), np.array([scheduled]), 2, 5).tolist() == [expected]


def test_without_short_extends_what_is_no_decode_is_long():
    assert classes_of(np.array([4, 4, 4, 0]), np.array([1, 2, 99, 1]), 1, 1).tolist() == [0, 2, 2, 3]


# --- in a batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["batch order", "stable", "manager"])
def test_a_batch_stands_as_decodes_short_extends_long_extends_prefills(kind, backend):
    scene = scene_of(kind, backend, decode_threshold=1, short_extend_threshold=3)
    scene.step(new={"long": (20, 4), "decode": 3, "short": (20, 8), "other": 2})
    scene.check(["long", "decode", "short", "other"])
    scene.step({"short": 3, "long": 4, "decode": 1, "other": 1})
    # The second stays; the others take the places left, in the order in which they stood.
    scene.check(["other", "decode", "short", "long"])
    scene.step({"short": 3, "long": 4, "decode": 1, "other": 1}, new={"new": 5})
    scene.check(["other", "decode", "short", "long", "new"])
    scene.step({"short": 1, "long": 4, "new": 1, "other": 2})
    assert scene.batch.previous_positions.tolist() == [2, 4, 0, 3]
    scene.check(["short", "new", "other", "long"])


@pytest.mark.parametrize("kind", ["batch order", "stable", "manager"])
def test_a_new_decode_goes_before_the_prefills(kind, backend):
    scene = scene_of(kind, backend, decode_threshold=1)
    scene.step(new={"A": 3, "B": 4})
    scene.step({"A": 1}, new={"C": 6, "D": 2})  # B rests
    scene.check(["A", "C", "D"])
    scene.step({"A": 1, "B": 1, "D": 0}, new={"E": 6})  # C rests, E takes its place
    scene.check(["A", "B", "D", "E"])


@pytest.mark.parametrize("kind", WRITTEN)
def test_drafts_are_part_of_a_decode(kind):
    scene = Scene(kind, decode_threshold=4)
    scene.step(new={"A": 9, "B": 3})
    scene.step({"A": 5, "B": 4})
    scene.check(["B", "A"])
    scene.step({"A": 4, "B": 4})
    scene.check(["B", "A"])


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_batch_that_is_in_order_is_not_touched(kind):
    scene = Scene(kind, decode_threshold=1)
    scene.step(new={"A": 4, "B": 4, "C": 4})
    scene.check(["A", "B", "C"])
    for _ in range(3):
        scene.step(["C", "A", "B"])
        assert dirty_rows(scene.table) == sum(scene.requests["A"].length % size == 1 for size in (4, 6)) * 3
        scene.check(["A", "B", "C"])


def dirty_rows(table):
    return int(table.mirror.state.dirty[0, 0])


@pytest.mark.parametrize(("kind", "num_dirty"), [("batch order", 6), ("stable", 0)])
def test_rows_in_batch_order_follow_and_stable_ones_stay(kind, num_dirty, backend):
    scene = Scene(kind, backend, decode_threshold=1)
    scene.step(new={"A": (30, 13), "B": 3, "C": 5})
    scene.check(["A", "B", "C"])
    rows = scene.table.mirror.counts.copy()
    scene.step({"A": 3, "B": 1, "C": 1})
    scene.batch.table.commit_block_table()  # blocks that the step took
    scene.batch.reorder([2, 0, 1])
    assert dirty_rows(scene.table) == num_dirty  # three rows in each of two groups, or none
    order = ["A", "C", "B"]
    scene.check(order)
    counts = scene.table.mirror.counts[:, scene.batch.rows].T.tolist()
    assert counts == [[len(ids) for ids in scene.requests[req_id].blocks] for req_id in order]
    if kind == "stable":
        assert scene.batch.rows.tolist() == [0, 2, 1]
        assert (scene.table.mirror.counts[:, :3] >= rows[:, :3]).all()


@pytest.mark.parametrize(("kind", "num_dirty"), [("batch order", 4), ("stable", 1)])
def test_only_the_misplaced_are_swapped(kind, num_dirty):
    """Of eight requests one turns into an extend: it changes places with the last decode, and that is all."""
    scene = Scene(kind, decode_threshold=1)
    scene.step(new=dict.fromkeys("ABCDEFGH", 3))
    scene.check(list("ABCDEFGH"))
    scene.step(dict.fromkeys("ABCDEFGH", 1) | {"C": 3})  # its third token takes a block in one group
    assert dirty_rows(scene.table) == num_dirty
    scene.check(list("ABHDEFGC"))


@pytest.mark.parametrize("kind", WRITTEN)
def test_one_added_alone_is_put_in_order_by_the_next_step(kind):
    scene = Scene(kind, decode_threshold=1)
    scene.step(new={"A": 3, "B": 4})
    scene.step({"A": 1, "B": 2})
    handle = scene.batch.add_request("C", 3, 1, 2, block_ids=[[91], [92]])
    assert scene.batch.req_ids == ["A", "B", "C"]
    handles = [*scene.batch.handles[:2].tolist(), handle]
    scene.batch.update(SchedulerOutput(RunningRequests(handles, [1, 2, 1])))
    assert scene.batch.req_ids == ["A", "C", "B"]


def test_the_order_holds_whatever_is_known_of_a_step():
    """Given counts of computed tokens decide as well, though they are no news otherwise."""
    scene = Scene("batch order", decode_threshold=1)
    new = AdmittedRequests(["A", "B"], [9, 9], [0, 1], [0, 4])
    scene.batch.update(SchedulerOutput(new=new))
    assert scene.batch.req_ids == ["B", "A"]
    scene.batch.update(SchedulerOutput(RunningRequests(scene.batch.handles, [1, 1], [0, 1])))
    assert scene.batch.req_ids == ["A", "B"]
