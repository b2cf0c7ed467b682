"""Widths, kernel views, context-parallel worlds and block id limits."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import BlockTable, ContextParallel, KernelView, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.constants import MAX_INT32
from pagedkv.specs import cdiv, max_block_id, table_width

SINGLE = ContextParallel()
STATE = {"block_size": 16, "state_mode": "align"}


def width(block_size, num_blocks, alignment=128):
    return table_width(KVCacheGroupSpec(block_size), block_size * num_blocks, SINGLE, alignment)


# --- widths -----------------------------------------------------------------------------------------


def test_width_of_a_model_length_that_is_no_multiple():
    """A vLLM report: 9,416 tokens in blocks of 32 are 295 blocks, and 296 columns."""
    assert table_width(KVCacheGroupSpec(32), 9416, SINGLE) == 296
    assert table_width(KVCacheGroupSpec(32), 9416, SINGLE, None) == 295


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "columns"),
    [
        (5, 48, 8), (7, 96, 8), (3, 192, 4), (3, 256, 3), (1, 16, 8), (9, 1, 128),
        (1, 96, 4), (1, 48, 8), (1, 192, 2), (1, 528, 8), (295, 32, 296),
        *[(1, size, 128 // size) for size in (1, 2, 4, 8, 16, 32, 64, 128)],
        *[(1, size, 1) for size in (256, 384, 512, 640, 768, 1024, 1152)],
    ],
)  # fmt: skip
def test_width_is_whole_tokens_of_the_alignment(num_blocks, block_size, columns):
    assert width(block_size, num_blocks) == columns


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 400))
def test_width_is_the_smallest_that_holds_and_aligns(block_size, num_blocks, alignment):
    columns = width(block_size, num_blocks, alignment)
    assert columns >= num_blocks
    assert columns * block_size % alignment == 0
    assert columns - num_blocks < alignment // gcd(alignment, block_size)
    assert width(block_size, num_blocks, None) == num_blocks


@pytest.mark.parametrize("alignment", [0, -128])
def test_an_alignment_that_is_none(alignment):
    with pytest.raises(ValueError, match=r"token_alignment must lie in \[1, "):
        width(16, 3, alignment)


@pytest.mark.parametrize(
    ("max_len", "world", "columns"), [(1_048_576, 1, 16384), (1_048_576, 2, 8192), (480_000, 4, 1876)]
)
def test_width_is_divided_by_the_world_of_sharded_groups_alone(max_len, world, columns):
    context_parallel = ContextParallel(world, world - 1)
    assert table_width(KVCacheGroupSpec(64), max_len, context_parallel) == columns
    replicated = table_width(KVCacheGroupSpec(64, cp_sharded=False), max_len, context_parallel)
    assert replicated == cdiv(max_len, 128) * 2


def test_width_of_a_stated_capacity():
    spec = KVCacheGroupSpec(16, max_num_blocks_per_req=5)
    assert table_width(spec, 10**6, ContextParallel(2, 0)) == 8, "no context-parallel division"
    assert table_width(spec, 1, SINGLE, None) == 5


def test_groups_that_are_not_written_by_slot_are_not_aligned():
    spec = KVCacheGroupSpec(16, slot_mapping=False, max_num_blocks_per_req=3)
    assert table_width(spec, 10**6, SINGLE) == 3


@pytest.mark.parametrize(
    ("block_size", "most", "columns", "aligned"),
    [
        (16, 1500, 94, 96),
        (16, 1, 1, 8),
        (48, 448, 10, 16),
        (96, 97, 2, 4),
        (256, 1500, 6, 6),
        (1, 129, 129, 256),
    ],
)
def test_width_of_encoder_tokens_follows_them_and_not_the_model_length(block_size, most, columns, aligned):
    spec = KVCacheGroupSpec(block_size, max_num_encoder_tokens=most)
    for max_model_len in (1, 448, 10**6):
        assert table_width(spec, max_model_len, SINGLE, None) == columns
        assert table_width(spec, max_model_len, SINGLE) == aligned


@pytest.mark.parametrize(("world", "columns", "aligned"), [(1, 94, 96), (2, 47, 48), (4, 24, 24)])
def test_width_of_encoder_tokens_is_divided_by_the_world_of_sharded_groups_alone(world, columns, aligned):
    context_parallel = ContextParallel(world, world - 1)
    sharded = KVCacheGroupSpec(16, max_num_encoder_tokens=1500)
    assert table_width(sharded, 448, context_parallel, None) == columns
    assert table_width(sharded, 448, context_parallel) == aligned
    replicated = KVCacheGroupSpec(16, cp_sharded=False, max_num_encoder_tokens=1500)
    assert table_width(replicated, 448, context_parallel, None) == 94
    assert table_width(replicated, 448, context_parallel) == 96
    stated = KVCacheGroupSpec(16, max_num_blocks_per_req=5, max_num_encoder_tokens=1500)
    assert table_width(stated, 448, context_parallel, None) == 5


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("mode", "drafts", "columns"),
    [("none", 0, 1), ("none", 2, 3), ("align", 0, 32), ("align", 2, 34), ("all", 0, 32), ("all", 3, 35)],
)
def test_states_are_on_every_rank_and_have_columns_for_drafts(world, mode, drafts, columns):
    """512 tokens in blocks of 16: no context-parallel division, and no alignment."""
    spec = KVCacheGroupSpec(16, state_mode=mode, num_speculative_blocks=drafts)
    for rank in range(world):
        assert table_width(spec, 512, ContextParallel(world, rank, 16)) == columns
    assert table_width(spec, 512, SINGLE, None) == columns
    longer = 1 if mode == "none" else 33
    assert table_width(spec, 513, ContextParallel(world, 0)) == longer + drafts


def test_a_stated_capacity_holds_the_drafts_of_states_as_well():
    spec = KVCacheGroupSpec(16, state_mode="align", num_speculative_blocks=2, max_num_blocks_per_req=5)
    assert table_width(spec, 10**6, ContextParallel(2, 0)) == 5


@pytest.mark.parametrize("alignment", [128, None])
def test_tables_have_those_widths(alignment):
    groups = [16, KVCacheGroupSpec(48), KVCacheGroupSpec(64, cp_sharded=False), KVCacheGroupSpec(3)]
    world = ContextParallel(3, 1)
    table = MultiGroupBlockTable(
        groups, 2, 1000, 8, context_parallel=world, token_alignment=alignment, backend="numpy"
    )
    expected = (24, 8, 16, 128) if alignment else (21, 7, 16, 112)
    assert table.mirror.widths == expected
    for group, columns in enumerate(expected):
        assert table[group].get_device_tensor(2).shape == (2, columns)
        assert table[group].get_numpy_array().shape == (2, columns)


def test_a_single_table_has_the_columns_that_were_asked_for():
    table = BlockTable(16, 2, 5, 8, kernel_views=(4,), backend="numpy")
    assert table.get_numpy_array().shape == (2, 5)
    assert table.get_kernel_tensor(2).shape == (2, 20)
    assert table.block_size == 16


# --- specs ------------------------------------------------------------------------------------------


def test_views_resolve_to_ratio_and_stride():
    spec = KVCacheGroupSpec(32, (16, (8, 6), KernelView(32), KernelView(4, 8)))
    assert spec.views() == [(2, 2), (4, 6), (1, 1), (8, 8)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block_size": 0}, ValueError, r"block_size must lie in \[1, "),
        ({"block_size": 16.0}, TypeError, "block_size must be an int, got float"),
        ({"block_size": True}, TypeError, "block_size must be an int, got bool"),
        ({"block_size": 16, "kernel_views": (5,)}, ValueError, "must divide block_size 16, got 5"),
        ({"block_size": 16, "kernel_views": (0,)}, ValueError, "kernel_block_size must lie in"),
        ({"block_size": 16, "kernel_views": ((8, 1),)}, ValueError, "at least the ratio 2, got 1"),
        ({"block_size": 16, "max_num_blocks_per_req": 0}, ValueError, "max_num_blocks_per_req must lie"),
        ({"block_size": 16, "sliding_window": 0}, ValueError, "sliding_window must lie in"),
        ({"block_size": 16, "state_mode": "some"}, LookupError, "state_mode must be one of .*got 'some'"),
        ({"block_size": 16, "state_mode": True}, LookupError, "state_mode must be one of .*got True"),
        (
            {"block_size": 16, "num_speculative_blocks": 1},
            ValueError,
            "must be 0 without a state_mode, got 1",
        ),
        (STATE | {"num_speculative_blocks": -1}, ValueError, "num_speculative_blocks must lie in"),
        (STATE | {"num_speculative_blocks": 1.0}, TypeError, "num_speculative_blocks must be an int, got fl"),
        (STATE | {"sliding_window": 4}, ValueError, "at most one of .*got 'align', None and 4"),
        (STATE | {"max_num_encoder_tokens": 4}, ValueError, "at most one of .*got 'align', 4 and None"),
        ({"block_size": 16, "max_num_encoder_tokens": 0}, ValueError, "max_num_encoder_tokens must lie in"),
        (
            {"block_size": 16, "max_num_encoder_tokens": 8.0},
            TypeError,
            "max_num_encoder_tokens must be an int",
        ),
        (
            {"block_size": 16, "max_num_encoder_tokens": 8, "sliding_window": 4},
            ValueError,
            "at most one of .* got None, 8 and 4",
        ),
    ],
)
def test_a_spec_that_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        KVCacheGroupSpec(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "world_size must lie"),
        ((2, 2), r"rank must lie in \[0, 1\], got 2"),
        ((2, -1), "rank must lie"),
        ((2, 0, 0), "interleave must lie"),
    ],
)
def test_a_world_that_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        ContextParallel(*arguments)


def test_interleave_must_divide_sharded_block_sizes_alone():
    world = ContextParallel(2, 0, 4)
    with pytest.raises(ValueError, match="interleave must divide block_size 6, got 4"):
        KVCacheGroupSpec(6).shard(world)
    assert KVCacheGroupSpec(6, cp_sharded=False).shard(world) == SINGLE
    assert KVCacheGroupSpec(6).shard(ContextParallel(1, 0, 4)) == SINGLE
    assert KVCacheGroupSpec(8).shard(world) == world


@pytest.mark.parametrize(
    ("arguments", "written"),
    [({}, True), ({"slot_mapping": False}, False), ({"max_num_encoder_tokens": 9}, False)]
    + [({"state_mode": mode}, False) for mode in ("none", "align", "all")],
)
def test_steps_write_by_slot_what_is_attended_to_and_grows(arguments, written):
    assert KVCacheGroupSpec(16, **arguments).written_by_slot == written


def test_states_live_in_a_world_of_one():
    assert KVCacheGroupSpec(6, state_mode="align").shard(ContextParallel(2, 1, 4)) == SINGLE


# --- block ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        (KVCacheGroupSpec(16), 64),
        (KVCacheGroupSpec(16, (8,)), 64),
        (KVCacheGroupSpec(12, (4, (6, 7))), 64),
        (KVCacheGroupSpec(16), 32),
        (KVCacheGroupSpec(1, (1,)), 32),
        (KVCacheGroupSpec(16, max_num_encoder_tokens=9), 32),
        (KVCacheGroupSpec(16, slot_mapping=False, max_num_encoder_tokens=9), 32),
        (KVCacheGroupSpec(131072, state_mode="none"), 32),
        (KVCacheGroupSpec(12, ((6, 7),), state_mode="align"), 32),
        (KVCacheGroupSpec(16, slot_mapping=False), 32),
    ],
)
def test_largest_block_id(spec, bits):
    """Slots of 32 bits limit it where there are any: not for states, nor for an encoder-only group."""
    largest = max_block_id(spec, bits)

    def fits(block):
        views = all(block * stride + ratio - 1 <= MAX_INT32 for ratio, stride in spec.views())
        has_slots = spec.written_by_slot or spec.max_num_encoder_tokens is not None
        slots = bits == 64 or not has_slots or (block + 1) * spec.block_size - 1 <= MAX_INT32
        return views and slots and block <= MAX_INT32

    assert fits(largest)
    assert not fits(largest + 1)


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (2, 4), (3, 2), (4, 16)])
def test_local_lengths_count_the_positions_of_a_rank(world, interleave):
    lengths = np.arange(200, dtype=np.int32)
    for rank in range(world):
        expected = [sum((p // interleave) % world == rank for p in range(length)) for length in lengths]

        local = ContextParallel(world, rank, interleave).local_lengths(lengths)

        assert (local.tolist(), local.dtype) == (expected, np.int32)


def test_local_lengths_of_the_longest_sequence():
    longest = np.array([MAX_INT32], np.int32)

    shares = [int(ContextParallel(3, rank, 7).local_lengths(longest)[0]) for rank in range(3)]

    assert sum(shares) == MAX_INT32
