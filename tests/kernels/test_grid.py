"""Launch shapes: enough threads for the work, at least one block, and no more than fill the GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.kernels._grid import (
    BLOCK_THREADS,
    MAX_BLOCKS,
    apply_writes,
    expand_blocks,
    gather_rows,
    slot_mapping,
    split_batch,
    state_indices,
)

from .world import Group, Launch, World

sizes = st.sampled_from([0, 1, 2, 7, 8, 9, 255, 256, 257, 2**20]) | st.integers(0, 2**31 - 1)


@settings(max_examples=200, deadline=None)
@given(tokens=sizes, reqs=st.integers(0, 4096), groups=st.integers(1, 2000))
def test_slot_mapping_has_a_thread_for_each_token_until_the_gpu_is_full(tokens, reqs, groups):
    x, y = slot_mapping(tokens, reqs, groups)

    assert y == groups
    assert x >= 1
    assert x * y <= max(MAX_BLOCKS, groups)
    assert x * BLOCK_THREADS >= max(tokens, reqs + 1) or (x + 1) * y > MAX_BLOCKS
    assert x == 1 or (x - 1) * BLOCK_THREADS < max(tokens, reqs + 1)


@pytest.mark.parametrize(("work", "x"), [(0, 1), (1, 1), (8, 1), (9, 2), (1024, 128), (10**9, MAX_BLOCKS)])
def test_apply_writes_has_a_warp_for_each_record(work, x):
    assert apply_writes(work) == (x, 1)


@pytest.mark.parametrize(("positions", "groups", "x"), [(0, 1, 1), (4, 1, 1), (5, 3, 2), (1024, 1, 256)])
def test_gather_rows_has_a_block_for_four_positions_of_a_group(positions, groups, x):
    assert gather_rows(positions, groups) == (x, groups)


@pytest.mark.parametrize(("reqs", "num_states", "x"), [(0, 1, 1), (256, 3, 1), (257, 3, 2), (10**9, 2, 330)])
def test_state_indices_has_a_thread_for_each_position_of_a_state_group(reqs, num_states, x):
    assert state_indices(reqs, num_states) == (x, num_states)


@pytest.mark.parametrize(("tokens", "reqs", "x"), [(0, 0, 1), (256, 0, 1), (3, 256, 2), (10**9, 5, 220)])
def test_split_batch_has_a_thread_for_each_token_and_row(tokens, reqs, x):
    assert split_batch(tokens, reqs, 3) == (x, 3)


@pytest.mark.parametrize(("ids", "x"), [(0, 1), (256, 1), (257, 2)])
def test_expand_blocks_has_a_thread_for_each_kernel_block(ids, x):
    assert expand_blocks(ids) == (x, 1)


def test_any_grid_is_right(form):
    """Kernels stride over their work: a grid captured for little work does much as well."""
    ids = np.arange(1, 5001, dtype=np.int32)
    expected = np.repeat(ids, 2) * 2 + np.tile([0, 1], 5000)

    for x in (1, 2, 40):
        out = np.zeros(10_000, np.int32)
        form.run("expand_blocks", (ids, out, 5000, 2, 2), Launch((x, 1), 256, downwards=False))
        np.testing.assert_array_equal(expected, out)


def test_one_long_prefill_among_decodes(form):
    """5,000 tokens of one request between single ones: every token finds its request."""
    lens = [1, 1, 5000, 1, 0, 1]
    world = World([Group(16, width=320)], len(lens), slot_stride=sum(lens))
    arena = np.arange(1, world.num_elements + 1, dtype=np.int32)
    counts = world.counts(320)
    request = np.repeat(np.arange(len(lens)), lens)
    positions = np.concatenate([np.arange(n) for n in lens])
    expected = (1 + request * 320 + positions // 16) * 16 + positions % 16
    starts = np.cumsum([0, *lens]).astype(np.int32)

    slots = np.zeros((1, sum(lens)), np.int64)
    none = np.zeros(0, np.int32)
    step = np.zeros(0, np.int64), none.copy(), none.copy(), none.copy(), np.zeros((1, 0), np.int32)
    args = none, world.geometry, starts, none, positions, none, arena, counts, slots, *step
    form.run("slot_mapping", (*args, len(lens), sum(lens), 0, 0), Launch((3, 1), 256, downwards=False))

    np.testing.assert_array_equal(expected, slots[0])
