"""The host mirror: its state for compiled code, its dirty ranges, and tables that join later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import CapacityError, HostMirror, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.constants import MAX_INT32
from pagedkv.mirror import mark_dirty


def ranges_of(mirror, subscriber=0):
    """{(group, row): set of columns} that a subscriber has not sent."""
    ranges, dirty = mirror.state.ranges[subscriber], mirror.state.dirty[subscriber]
    targets = dirty[1 : 1 + dirty[0]].tolist()
    assert len(targets) == len(set(targets)), "a row stands once in the list of dirty rows"
    found = {}
    for target in targets:
        a, b, c, d = ranges[target].tolist()
        found[divmod(target, mirror.max_num_reqs)] = set(range(a, b)) | set(range(c, d))
    clean = np.delete(ranges, targets, axis=0)
    assert not clean.any(), "what is not listed has no range"
    return found


# --- dirty ranges -----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=8), st.integers(1, 3))
def test_ranges_hold_every_changed_column(changes, num_subscribers):
    ranges = np.zeros((num_subscribers, 2, 4), np.int32)
    dirty = np.zeros((num_subscribers, 3), np.int32)
    columns = set()
    for start, length in changes:
        mark_dirty(ranges, dirty, 1, start, start + length)
        columns |= set(range(start, start + length))
    for s in range(num_subscribers):
        a, b, c, d = ranges[s, 1].tolist()
        assert columns <= set(range(a, b)) | set(range(c, d))
        assert dirty[s].tolist() == ([1, 1, 0] if columns else [0, 0, 0])
        assert not ranges[s, 0].any()
        if columns:
            assert a < b
            assert {a, max(b, d) - 1} <= columns | {min(columns)}
            assert (c, d) == (0, 0) or c < d
            assert d == 0 or d < a or b < c, "two ranges of a row neither meet nor overlap"
            assert min(columns) == min(a, c if d else a)
            assert max(columns) == max(b, d) - 1


def test_front_and_tail_stay_apart():
    mirror = HostMirror(2, [100])
    mirror.subscribe()
    mirror.append_rows([1], [50], list(range(1, 51)))
    assert ranges_of(mirror) == {(0, 1): set(range(50))}
    mirror.state.ranges[:], mirror.state.dirty[:] = 0, 0
    for step in range(5):  # a window moves on while blocks are appended
        mirror.null_columns([1], [step], [step + 1])
        mirror.append_rows([1], [1], [7])
    assert ranges_of(mirror) == {(0, 1): {0, 1, 2, 3, 4, 50, 51, 52, 53, 54}}


def test_calls_that_change_nothing_mark_nothing():
    mirror = HostMirror(3, [4, 5])
    mirror.subscribe()
    mirror.append_rows([0], [[0], [-1]], [])
    mirror.add_rows([0], [[0], [-1]], [])
    mirror.clear_rows([0, 1])
    mirror.move_rows([0, 1], [0, 2])
    mirror.swap_rows([0], [0])
    mirror.swap_rows([0], [1])
    mirror.truncate_rows([0], [3])
    mirror.null_columns([0], [0], [0])
    mirror.set_blocks([], [], [])
    assert ranges_of(mirror) == {}


def test_each_operation_marks_the_columns_that_it_changes():
    mirror = HostMirror(3, [6])
    mirror.subscribe()

    def marked(call, *arguments):
        mirror.state.ranges[:], mirror.state.dirty[:] = 0, 0
        call(*arguments)
        return {row: sorted(columns) for (_, row), columns in ranges_of(mirror).items()}

    assert marked(mirror.append_rows, [0], [2], [1, 2]) == {0: [0, 1]}
    assert marked(mirror.append_rows, [0], [2], [3, 4]) == {0: [2, 3]}
    assert marked(mirror.add_rows, [0], [1], [9]) == {0: [0, 1, 2, 3]}
    assert marked(mirror.append_rows, [0, 0, 1], [1, 1, 1], [5, 6, 7]) == {0: [1, 2], 1: [0]}
    assert marked(mirror.set_blocks, [0], [1], [8]) == {0: [1]}
    assert marked(mirror.truncate_rows, [0, 1], [2, 5]) == {0: [2]}
    assert marked(mirror.move_rows, [0], [1]) == {0: [0, 1], 1: [0, 1]}
    assert marked(mirror.swap_rows, [1], [2]) == {1: [0, 1], 2: [0, 1]}
    assert marked(mirror.clear_rows, [2]) == {2: [0, 1]}


# --- subscribers ------------------------------------------------------------------------------------


def test_each_subscriber_has_its_own_ranges():
    mirror = HostMirror(3, [4, 4])
    assert mirror.subscribe() == 0
    mirror.append_rows([0], [[1], [2]], [1, 2, 3])
    mirror.state.ranges[0], mirror.state.dirty[0] = 0, 0  # as a commit leaves it
    assert mirror.subscribe() == 1
    assert ranges_of(mirror, 0) == {}
    assert ranges_of(mirror, 1) == {(0, 0): {0}, (1, 0): {0, 1}}
    mirror.append_rows([2], [[1], [-1]], [5])
    assert ranges_of(mirror, 0) == {(0, 2): {0}}
    assert ranges_of(mirror, 1) == {(0, 0): {0}, (1, 0): {0, 1}, (0, 2): {0}}


def test_a_table_that_joins_late_shows_everything(backend):
    first = MultiGroupBlockTable([4, 8], 3, 32, 16, backend=backend)
    first.add_row(([1, 2, 3], [4]), 1)
    first.commit_block_table()
    second = MultiGroupBlockTable([4, 8], 3, 32, 16, backend=backend, mirror=first.mirror)
    second.commit_block_table()
    first.append_row(([5], []), 1)
    second.commit_block_table()
    for group in range(2):
        expected = second[group].get_numpy_array()
        actual = second[group].get_device_tensor(3)
        np.testing.assert_array_equal(expected, actual.get() if hasattr(actual, "get") else actual)
    assert first.mirror.state.dirty[:, 0].tolist() == [1, 0]


def test_a_table_that_joins_lowers_the_largest_block_id():
    mirror = HostMirror(3, [4])
    mirror.append_rows([0], [1], [MAX_INT32 // 2])
    groups = [KVCacheGroupSpec(4, (2,))]
    MultiGroupBlockTable(groups, 3, 16, 8, token_alignment=None, backend="numpy", mirror=mirror)
    with pytest.raises(ValueError, match=f"block_ids must lie in \\[0, {(MAX_INT32 - 1) // 2}\\]"):
        mirror.append_rows([0], [1], [(MAX_INT32 - 1) // 2 + 1])
    groups = [KVCacheGroupSpec(4, ((2, 5),))]
    with pytest.raises(
        ValueError, match=f"block ids of group 0 must lie in .* got {MAX_INT32 // 2} in the mir"
    ):
        MultiGroupBlockTable(groups, 3, 16, 8, token_alignment=None, backend="numpy", mirror=mirror)
    assert len(mirror.state.ranges) == 1, "the refused table has not subscribed"


# --- construction and views -------------------------------------------------------------------------


def test_state_describes_the_groups():
    mirror = HostMirror(3, [5, 0, 7], [100, 200, 300])
    blocks, layout, counts, ranges, dirty = mirror.state
    assert layout[:, 1:].tolist() == [[5, 100], [0, 200], [7, 300]]
    assert (mirror.num_groups, counts.shape) == (3, (3, 3))
    assert (ranges.shape, dirty.shape) == ((0, 9, 4), (0, 10))
    assert blocks.ctypes.data % 256 == 0
    for group, (offset, width, _) in enumerate(layout.tolist()):
        assert offset % 64 == 0
        table = mirror.block_table(group)
        assert table.shape == (3, width)
        assert not table.flags.writeable
        if width:
            assert table.ctypes.data == blocks.ctypes.data + 4 * offset
    with pytest.raises(ValueError, match=r"block_ids must lie in \[0, 100\], got 101"):
        mirror.append_rows([0], [[1], [0], [0]], [101])
    mirror.append_rows([0], [[-1], [0], [1]], [300])
    assert mirror.num_blocks(2).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, [4]), ValueError, r"max_num_reqs must lie in \[1, "),
        ((2, [-1]), ValueError, r"table width must lie in \[0, "),
        ((2.0, [4]), TypeError, "max_num_reqs must be an int"),
        ((2**30, [1, 1, 1]), CapacityError, "groups x max_num_reqs must fit int32"),
        ((2, [4, 4], [9]), ValueError, "one limit for each of 2 groups, got 1"),
    ],
)
def test_a_mirror_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        HostMirror(*arguments)


def test_groups_are_told_apart_by_number():
    mirror = HostMirror(2, [4, 4])
    mirror.append_rows([0, 1], [[1, 1], [2, 2]], [1, 2, 3, 4, 5, 6])
    mirror.clear_rows([0], 1)
    mirror.move_rows([1], [0], 0)
    mirror.truncate_rows([1], [1], 1)
    assert mirror.counts.tolist() == [[1, 0], [0, 1]]
    for call in (
        lambda group: mirror.clear_rows([0], group),
        lambda group: mirror.move_rows([0], [1], group),
        lambda group: mirror.swap_rows([0], [1], group),
        lambda group: mirror.truncate_rows([0], [0], group),
        lambda group: mirror.set_blocks([0], [0], [1], group),
    ):
        for group in (-1, 2):
            with pytest.raises(ValueError, match=r"group must lie in \[0, 1\]"):
                call(group)
    assert mirror.counts.tolist() == [[1, 0], [0, 1]]


def test_single_group_counts_may_be_flat():
    mirror = HostMirror(2, [4])
    mirror.append_rows([0, 1], [1, 2], [7, 8, 9])
    mirror.append_rows([0], np.array([1], np.int64), (5,))
    mirror.add_rows(range(1), np.array([[1]], np.uint8), [MAX_INT32])
    assert mirror.block_table().tolist() == [[MAX_INT32, 0, 0, 0], [8, 9, 0, 0]]


@pytest.mark.parametrize(
    "as_array",
    [
        lambda values: np.array(values, np.int32)[::1],
        lambda values: np.repeat(np.array(values, np.int32), 2)[::2],
        lambda values: np.array(values, np.uint64),
        lambda values: np.frombuffer(np.array(values, np.int32).tobytes(), np.int32),
    ],
    ids=["ready", "strided", "unsigned", "read-only"],
)
def test_arrays_of_any_kind_are_taken(as_array):
    mirror = HostMirror(3, [4])
    mirror.append_rows(as_array([0, 2]), as_array([1, 2]), as_array([7, 8, 9]))
    mirror.move_rows(as_array([2]), as_array([1]))
    mirror.null_columns(as_array([1]), as_array([0]), as_array([1]))
    mirror.set_blocks(as_array([0]), as_array([0]), as_array([3]))
    mirror.clear_rows(as_array([2]))
    assert mirror.block_table().tolist() == [[3, 0, 0, 0], [0, 9, 0, 0], [0, 0, 0, 0]]
