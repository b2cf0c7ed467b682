"""What a commit costs and what it leaves in place: copies, bytes, addresses, and growth of the staging."""

import numpy as np
import pytest

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable

from .models import table_of, to_numpy

MODES = pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])


def decoding(backend, num_reqs, num_groups, context, stable_rows=False, max_model_len=None, depth=3):
    """A table of `num_reqs` requests with `context` tokens each, committed."""
    table = MultiGroupBlockTable(
        [16] * num_groups,
        num_reqs,
        max_model_len or context + 256,
        max(num_reqs, 64),
        stable_rows=stable_rows,
        staging_depth=depth,
        backend=backend,
    )
    counts = np.full((num_groups, num_reqs), context // 16, np.int32)
    ids = np.arange(1, counts.sum() + 1, dtype=np.int32)
    table.append_rows(np.arange(num_reqs, dtype=np.int32), counts, ids)
    decode(table, context)
    return table


def decode(table, context, rows=None):
    """One token for every request."""
    num = table.max_num_reqs
    starts, computed = np.arange(num + 1, dtype=np.int32), np.full(num, context, np.int32)
    order = np.arange(num, dtype=np.int32) if rows is None else rows
    return table.commit(num, starts, computed, rows=order if table.stable_rows else None)


def address(array):
    return array.data.ptr if hasattr(array, "get") else array.__array_interface__["data"][0]


# --- copies -----------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_one_copy_a_commit_for_any_number_of_groups(backend, num_groups, stable_rows):
    table = decoding(backend, 8, num_groups, 64, stable_rows)
    for step in range(10):
        if step % 3:  # every group changes, none changes, rows move
            table.append_row([[5]] * num_groups, step % 8)
        if step % 4 == 3:
            table.swap_row(step % 8, 0)
            table.null_columns([1], [0], [1], num_groups - 1)
        before = table.num_h2d_copies
        rows = np.roll(np.arange(8, dtype=np.int32), step)
        decode(table, 64 + step, rows)
        assert table.num_h2d_copies == before + 1


@MODES
def test_no_copy_where_nothing_is_dirty(backend, stable_rows):
    table = decoding(backend, 8, 2, 64, stable_rows)
    before = table.num_h2d_copies, table.num_h2d_bytes
    table.commit_block_table()
    table.commit_block_table(4)
    table[1].commit_block_table(8)
    table.append_row(([], []), 0)
    table.commit_block_table()
    assert (table.num_h2d_copies, table.num_h2d_bytes) == before
    table.append_row(([5], []), 7)
    table.commit_block_table(1)
    assert table.num_h2d_copies == before[0] + 1


def test_a_separate_mapping_stages_each_host_array_once(backend):
    table = decoding(backend, 8, 3, 64)
    before = table.num_h2d_copies
    table.compute_slot_mapping(2, [0, 1, 2], np.array([3, 4]))
    assert table.num_h2d_copies == before + 2
    table.compute_slot_mapping(2, [0, 1, 2], np.array([3, 4]), rows=[1, 0])
    assert table.num_h2d_copies == before + 5


# --- bytes ------------------------------------------------------------------------------------------


def bytes_of_a_step(table, context, rows=None):
    before = table.num_h2d_bytes
    decode(table, context, rows)
    return table.num_h2d_bytes - before


@MODES
@pytest.mark.parametrize("num_groups", [1, 4])
def test_bytes_of_a_decode_step_follow_the_changes(backend, num_groups, stable_rows):
    num_reqs = 256
    table = decoding(backend, num_reqs, num_groups, 512, stable_rows)
    for step in range(6):
        new = np.arange(step, num_reqs, 16, dtype=np.int32)
        counts = np.ones((num_groups, len(new)), np.int32)
        table.append_rows(new, counts, np.arange(1, counts.size + 1, dtype=np.int32))
        rows = np.roll(np.arange(num_reqs, dtype=np.int32), step)
        per_request = 16 if stable_rows else 12
        most = 1.25 * (per_request * num_reqs + 24 * counts.size) + 4096
        sent = bytes_of_a_step(table, 512 + step, rows)
        assert 8 * num_reqs + 4 * counts.size < sent <= most


@MODES
def test_bytes_do_not_depend_on_context_or_width(backend, stable_rows):
    def sent(context, max_model_len):
        table = decoding(backend, 32, 2, context, stable_rows, max_model_len)
        table.append_row(([7], [8]), 3)
        table.move_row(4, 4)
        return bytes_of_a_step(table, context)

    assert sent(64, 128) == sent(16384, 32768) == sent(64, 131072)


def test_clearing_a_long_row_carries_no_ids(backend):
    table = decoding(backend, 4, 1, 16, max_model_len=131072)
    table.append_row((np.arange(1, 8001),), 1)
    assert bytes_of_a_step(table, 16) > 4 * 8000
    for num in (4000, 0):
        table.mirror.truncate_rows([1], [num])
        assert bytes_of_a_step(table, 16) <= 4096
        row = [2, *range(1, 8001)][:num]
        actual = to_numpy(table[0].get_device_tensor(2))[1]
        np.testing.assert_array_equal(table_of([row], len(actual))[0], actual)


def test_clearing_blocks_below_a_window_carries_no_ids(backend):
    table = decoding(backend, 4, 1, 16, max_model_len=131072)
    table.append_row((np.arange(1, 8001),), 1)
    decode(table, 16)
    table.null_columns([1], [0], [7000])
    assert bytes_of_a_step(table, 16) <= 4096
    row = to_numpy(table[0].get_device_tensor(2))[1]
    assert not row[:7000].any()
    np.testing.assert_array_equal(np.arange(7000, 8001), row[7000:8001])


def test_unchanged_order_of_stable_rows_sends_no_order(backend):
    table = decoding(backend, 256, 1, 64, stable_rows=True)
    same = bytes_of_a_step(table, 65)
    other = bytes_of_a_step(table, 66, np.roll(np.arange(256, dtype=np.int32), 1))
    assert 0 < other - same <= 1.25 * 4 * 256 + 256


# --- addresses and growth ---------------------------------------------------------------------------


@MODES
def test_addresses_stay_over_100_steps_and_a_growth(backend, stable_rows):
    spec = KVCacheGroupSpec(16, (4, (8, 3)), sliding_window=64)
    table = MultiGroupBlockTable([spec, 8], 8, 65536, 128, stable_rows=stable_rows, backend=backend)
    table.outputs(2)
    seen = set()
    for i in range(100):
        num_reqs = i % 8 + 1
        if i == 50:
            table.add_row((np.arange(1, 4001), np.arange(1, 8001)), 0)
        else:
            table.add_row(([1 + i, 2], [3]), i % 8)
        if not stable_rows and num_reqs < 8:
            table.clear_rows(range(num_reqs, 8))
        rows = np.arange(num_reqs, dtype=np.int32)[::-1].copy() if stable_rows else None
        starts = np.arange(num_reqs + 1, dtype=np.int32)
        step = table.commit(
            num_reqs, starts, np.zeros(num_reqs, np.int32), rows=rows, num_reqs_padded=8, out=i % 2,
            num_tokens_padded=8 * (1 + i % 3),
        )  # fmt: skip
        arrays = [step.query_start_loc, step.seq_lens, step.positions]
        arrays += [step.block_table(0), step.block_table(1), step.slot_mapping(0), step.slot_mapping(1)]
        arrays += [step.kernel_block_table(0, 0), step.kernel_block_table(0, 1), table[1].slot_mapping]
        arrays += [table[0].get_device_tensor(3), table[1].get_device_tensor(8)]
        seen.add((i % 2, *map(address, arrays)))
    assert len(seen) == 2, "one set of addresses for each output set"


def test_views_of_a_step_are_made_once(backend):
    table = decoding(backend, 4, 1, 32)
    first, second = decode(table, 32), decode(table, 33)
    assert first.block_table() is second.block_table()
    assert first.slot_mapping() is second.slot_mapping()
    assert first.seq_lens is second.seq_lens


@MODES
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_huge_row_grows_the_staging_and_arrives(backend, depth, stable_rows):
    table = decoding(backend, 4, 2, 16, stable_rows, max_model_len=800_000, depth=depth)
    widths = table.mirror.widths
    expected = [[[4 * g + r + 1] for r in range(4)] for g in range(2)]
    for i in range(2 * depth):
        row = i % 4
        for g in range(2):
            expected[g][row] = list(range(7 + i, 7 + i + 30_000 + 5_000 * (i % 2) - 100 * g))
        table.add_row([expected[0][row], expected[1][row]], row)
        step = decode(table, 16)
        table.append_row(([9], []), 3)
        expected[0][3] = [*expected[0][3], 9]
        step = decode(table, 16)
        for g in range(2):
            np.testing.assert_array_equal(table_of(expected[g], widths[g]), to_numpy(step.block_table(g)))
            actual = to_numpy(table[g].get_device_tensor(4))
            np.testing.assert_array_equal(table_of(expected[g], widths[g]), actual)


def test_a_staged_array_larger_than_the_ring_grows_it(backend):
    table = MultiGroupBlockTable([4], 2, 8192, 8192, staging_depth=1, backend=backend)
    table.add_row((np.arange(1, 2049),), 0)
    table.commit_block_table()
    for num in (8192, 3, 8192):
        table.compute_slot_mapping(1, [0, num], np.arange(num))
        np.testing.assert_array_equal(np.arange(4, 4 + num), to_numpy(table[0].slot_mapping)[:num])
        assert (to_numpy(table[0].slot_mapping)[num:] == -1).all()


@pytest.mark.parametrize("num_tokens", range(356, 368))
def test_a_step_that_just_fills_the_grown_buffer(backend, num_tokens):
    """Positions alone outgrow the buffer, and 256 new blocks end at or about the next bucket's end."""
    table = MultiGroupBlockTable([1], 1, 1024, 512, staging_depth=1, backend=backend)
    table.add_row((np.arange(1, 257),), 0)
    positions = np.arange(num_tokens) % 300
    step = table.commit(1, [0, num_tokens], [0], positions=positions)
    expected = [p + 1 if p < 256 else -1 for p in positions]
    np.testing.assert_array_equal(expected, to_numpy(step.slot_mapping(0)))
    np.testing.assert_array_equal(table[0].get_numpy_array(), to_numpy(table[0].get_device_tensor(1)))


@MODES
@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_row_after_a_long_staged_array(backend, depth, stable_rows):
    """The ring has grown for the array: the device's end of the copy must hold the row all the same."""
    table = MultiGroupBlockTable(
        [1], 2, 8192, 8192, staging_depth=depth, stable_rows=stable_rows, backend=backend
    )
    table.compute_slot_mapping(1, [0, 8192], np.arange(8192))
    table.compute_slot_mapping(1, [0, 8192], np.arange(8192))
    for first in (1, 5):
        table.add_row((np.arange(first, first + 4000),), 1)
        rows = {"rows": [0, 1]} if stable_rows else {}
        step = table.commit(2, [0, 0, 2], [0, 3998], **rows)
        np.testing.assert_array_equal(table[0].get_numpy_array(), to_numpy(step.block_table(0)))
        assert to_numpy(step.slot_mapping(0)).tolist() == [first + 3998, first + 3999]
