"""Kernel views: the table in the attention kernel's smaller blocks, kept by the same launch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import BlockTable, ContextParallel, KernelView, KVCacheGroupSpec, MultiGroupBlockTable

from .models import expand, table_of, to_numpy


@pytest.mark.parametrize(("block_size", "kernel"), [(32, 24), (16, 32), (24, 16), (1, 2)])
def test_a_kernel_block_size_that_does_not_divide(backend, block_size, kernel):
    with pytest.raises(
        ValueError, match=f"kernel_block_size must divide block_size {block_size}, got {kernel}"
    ):
        BlockTable(block_size, 2, 4, 16, kernel_views=(kernel,), backend=backend)


def test_a_stride_below_the_ratio(backend):
    with pytest.raises(ValueError, match="stride must be at least the ratio 2, got 1"):
        BlockTable(32, 2, 4, 16, kernel_views=((16, 1),), backend=backend)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (16, [[0, 0, 2, 3], [14, 15, 6, 7]]),  # NULL stays NULL, where the plain product gives 0, 1
        (32, [[0, 1], [7, 3]]),
        ((16, 5), [[0, 0, 5, 6], [35, 36, 15, 16]]),
        (KernelView(16, 2), [[0, 0, 2, 3], [14, 15, 6, 7]]),
    ],
)
def test_ids_expand_by_the_stride(backend, view, expected):
    table = BlockTable(32, 2, 2, 16, kernel_views=(view,), backend=backend)
    table.add_row([0, 1], 0)
    table.add_row([7, 3], 1)
    table.commit_block_table()
    assert to_numpy(table.get_kernel_tensor(2)).tolist() == expected
    assert table.map_to_kernel_blocks(np.array([[0, 1], [7, 3]]).ravel()).reshape(2, -1).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 10**6), max_size=9),
    ratio=st.integers(1, 5),
    more=st.integers(0, 3),
)
def test_map_to_kernel_blocks(backend, ids, ratio, more):
    views = (1, (3, ratio + more))
    table = BlockTable(3 * ratio, 1, 1, 1, kernel_views=views, backend=backend)
    expected = expand(np.array([ids], np.int32), ratio, ratio + more)[0]
    mapped = table.map_to_kernel_blocks(np.array(ids, np.int32), 1)
    np.testing.assert_array_equal(expected, to_numpy(mapped))
    assert to_numpy(mapped).dtype == np.int32


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([-1], ValueError, r"block_ids must lie in \[0, 429496728\], got -1"),
        ([429496729], ValueError, "got 429496729"),
        ([2**31], ValueError, "block_ids must lie in"),
        ([1.0], TypeError, "block_ids must hold integers"),
        ([[1, 2]], ValueError, "block_ids must have one dimension"),
    ],
)
def test_ids_that_have_no_kernel_blocks(backend, ids, error, message):
    table = BlockTable(4, 1, 1, 1, kernel_views=((1, 5),), backend=backend)
    with pytest.raises(error, match=message):
        table.map_to_kernel_blocks(ids)
    largest = table.map_to_kernel_blocks([429496728, 0]).tolist()
    assert largest == [2147483640, 2147483641, 2147483642, 2147483643, 0, 0, 0, 0]


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (2, 12), (3, 4)])
@pytest.mark.parametrize("kernel", [12, 6, 4, 1])
def test_slots_lie_in_the_kernel_block_that_the_view_names(backend, kernel, world, interleave):
    """A rank's tokens fill its blocks in order, so the k-th local token is in kernel column k // kernel."""
    seen = 0
    for rank in range(world):
        table = BlockTable(
            12, 1, 4, 160, kernel_views=(kernel,), context_parallel=ContextParallel(world, rank, interleave),
            backend=backend,
        )  # fmt: skip
        table.add_row([5, 2, 9, 7], 0)
        table.commit_block_table()
        table.compute_slot_mapping(1, [0, 48 * world], np.arange(48 * world))
        slots = to_numpy(table.slot_mapping)
        local = slots[slots >= 0]
        columns = to_numpy(table.get_kernel_tensor(1))[0].astype(np.int64)
        k = np.arange(len(local))
        np.testing.assert_array_equal(columns[k // kernel] * kernel + k % kernel, local)
        seen += len(local)
    assert seen == 48 * world


@pytest.mark.parametrize("stable_rows", [False, True])
def test_views_follow_every_change_of_a_row(backend, stable_rows):
    spec = KVCacheGroupSpec(12, (4, (6, 7), 12))
    table = MultiGroupBlockTable(
        [KVCacheGroupSpec(4, (2,)), spec], 3, 48, 16, token_alignment=None, stable_rows=stable_rows,
        backend=backend,
    )  # fmt: skip

    def check(content):
        rows = {"rows": [2, 0, 1]} if stable_rows else {}
        step = table.commit(3, [0, 0, 0, 0], [0, 0, 0], **rows)
        order = [2, 0, 1] if stable_rows else [0, 1, 2]
        expected = table_of([content[row] for row in order], 4)
        np.testing.assert_array_equal(expected, to_numpy(step.block_table(1)))
        for view, (ratio, stride) in enumerate([(3, 3), (2, 7), (1, 1)]):
            actual = to_numpy(step.kernel_block_table(1, view))
            np.testing.assert_array_equal(expand(expected, ratio, stride), actual)
        assert not to_numpy(step.kernel_block_table(0, 0)).any()

    check([[], [], []])
    for row, ids in enumerate([[1, 2, 3, 4], [5], [0, 6]]):
        table[1].add_row(ids, row)
    check([[1, 2, 3, 4], [5], [0, 6]])
    table[1].append_row([7], 1)
    table[1].clear_row(2)
    check([[1, 2, 3, 4], [5, 7], []])
    table[1].move_row(0, 2)
    table[1].null_columns([2], [0], [2])
    check([[], [5, 7], [0, 0, 3, 4]])
    table[1].swap_row(1, 2)
    check([[], [0, 0, 3, 4], [5, 7]])


def test_kernel_views_of_stable_rows_are_the_steps(backend):
    table = BlockTable(4, 2, 2, 8, kernel_views=(2,), stable_rows=True, backend=backend)
    with pytest.raises(ValueError, match="must be taken from the step"):
        table.get_kernel_tensor(1)
    with pytest.raises(ValueError, match=r"view must lie in \[0, 0\], got 1"):
        table.get_kernel_tensor(1, 1)
    with pytest.raises(ValueError, match=r"num_reqs must lie in \[0, 2\], got 3"):
        table.get_device_tensor(3)
