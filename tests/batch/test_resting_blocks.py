"""RestingBlocks: what is kept aside of rows, by brute force; and a table that joins while requests rest."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import HostMirror, MultiGroupBlockTable
from pagedkv.batch import AdmittedRequests, InputBatch, RunningRequests, SchedulerOutput
from pagedkv.batch.resting_blocks import RestingBlocks
from tests.tables.models import to_numpy

from .scenes import assert_unchanged, state_of

WIDTHS = (3, 0, 5, 7)


def mirror_of(lists, num_groups):
    """A mirror whose row i holds ``lists[i][g]`` in group g."""
    mirror = HostMirror(max(len(lists), 1), WIDTHS[:num_groups])
    for row, own in enumerate(lists):
        if num_groups:
            mirror.add_rows([row], [[len(ids)] for ids in own], [block for ids in own for block in ids])
    return mirror


@st.composite
def rows(draw):
    num_groups, num_rows = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    ids = st.integers(0, 99)
    return num_groups, [
        [draw(st.lists(ids, max_size=width)) for width in WIDTHS[:num_groups]] for _ in range(num_rows)
    ]


@settings(max_examples=150, deadline=None)
@given(rows(), st.data())
def test_what_is_kept_comes_back_in_any_order_and_in_parts(drawn, data):
    num_groups, lists = drawn
    mirror, n = mirror_of(lists, num_groups), len(lists)
    resting = RestingBlocks(mirror)
    places = np.array(data.draw(st.permutations(range(n))), np.int32)
    slots = [100 + int(row) for row in places]
    half = data.draw(st.integers(0, n))
    for part in (slice(0, half), slice(half, n)):
        resting.keep(slots[part], places[part])
    mirror.clear()

    order = data.draw(st.permutations(slots))
    gone = order[: data.draw(st.integers(0, n))]
    resting.forget([*gone, 7])
    back = [slot for slot in order if slot not in gone]
    assert resting.among(np.array([*order, 7], np.int64)) == back
    expected = [[len(lists[slot - 100][g]) for slot in back] for g in range(num_groups)]
    assert resting.counts(back).tolist() == expected
    assert resting.past_limits(order) is None

    blocks = resting.take(back)

    assert blocks.counts.shape == (num_groups, len(back))
    assert blocks.counts.tolist() == expected
    assert blocks.ids.tolist() == [
        b for g in range(num_groups) for slot in back for b in lists[slot - 100][g]
    ]
    assert {blocks.ids.dtype, blocks.counts.dtype} == {np.dtype(np.int32)}
    assert blocks.counts.flags.carray
    assert resting.among(order) == []


def test_what_is_kept_of_one_does_not_hold_on_to_the_others():
    """A thousand requests rest and all but one come back: only that one's ids stay in memory."""
    mirror = mirror_of([[[i, i + 1]] for i in range(50)], 1)
    resting = RestingBlocks(mirror)
    resting.keep(list(range(50)), np.arange(50, dtype=np.int32))
    for slot, held in resting._held.items():
        assert held.ids.base is None
        assert held.ids.tolist() == [slot, slot + 1]


def test_what_is_kept_does_not_follow_its_row():
    mirror = mirror_of([[[1, 2]], [[3]]], 1)
    resting = RestingBlocks(mirror)
    resting.keep([5], np.array([0], np.int32))
    mirror.add_rows([0], [[1]], [9])
    assert resting.take([5]).ids.tolist() == [1, 2]


# --- a table that joins -----------------------------------------------------------------------------

FITS, TOO_LARGE = 2**27 - 1, 2**27  # with slots of int32 and blocks of 16 tokens


@pytest.fixture
def batch(backend):
    """A and B rest, B with an id that a table with int32 slots does not take; C is in the batch."""
    batch = InputBatch(MultiGroupBlockTable([8, 16], 8, 512, 64, backend=backend))
    ids = [1, 2, 3, FITS, TOO_LARGE, 4]
    new = AdmittedRequests(list("ABC"), [5] * 3, [1] * 3, None, [[1] * 3] * 2, ids)
    handles = batch.update(SchedulerOutput(new=new))
    batch.update(SchedulerOutput(RunningRequests(handles[2:], [1])))
    return batch


def join(batch):
    table = batch.table
    return MultiGroupBlockTable(
        [8, 16], 8, 512, 64, backend=table.backend, mirror=table.mirror, slot_dtype="i4"
    )


def test_a_kept_id_that_no_table_takes_any_more_is_refused_before_anything_changes(batch):
    handles = [batch.handle_of(name) for name in "ABC"]
    joined = join(batch)
    before = state_of(batch)
    output = SchedulerOutput(RunningRequests(handles, [1, 1, 1], None, [[1, 0, 0], [0, 0, 0]], [5]))
    with pytest.raises(
        ValueError, match=rf"lie in \[0, {FITS}\], got {TOO_LARGE} for request 'B' in group 1"
    ):
        batch.update(output)
    assert_unchanged(before, batch)
    batch.update(SchedulerOutput(RunningRequests(handles[::2], [1, 1])))  # A comes back all the same
    assert batch.req_ids == ["C", "A"]
    resumed = AdmittedRequests(["B"], [5], [5], None, [[1], [1]], [6, 7])
    batch.update(SchedulerOutput(RunningRequests(handles[::2], [1, 1]), resumed=resumed))
    step = joined.commit(3, [0, 1, 2, 3], [0, 0, 0])
    assert to_numpy(step.block_table(1))[:, 0].tolist() == [4, FITS, 7]


def test_without_such_a_table_large_ids_come_back(batch):
    handles = [batch.handle_of(name) for name in "ABC"]
    batch.update(SchedulerOutput(RunningRequests(handles, [1, 1, 1])))
    assert to_numpy(batch.commit()[1].block_table_tensor)[:, 0].tolist() == [4, FITS, TOO_LARGE]
