"""EncoderSlotMapping: the encoder's tokens of a cross-attention group, against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import (
    CapacityError,
    ContextParallel,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheManager,
    MultiGroupBlockTable,
)
from pagedkv.tables.encoder_slots import EncoderSlotMapping

from .models import assert_unchanged, everything, slot_of, to_numpy
from .strategies import group_specs, worlds
from .test_groups_without_slots import address

NAMES = ("slot_mapping", "positions", "query_start_loc", "seq_lens")


@pytest.fixture(params=[False, True], ids=["batch order", "stable rows"])
def stable_rows(request):
    return request.param


def cross_table(backend, *rows, stable_rows=False, num_rows=4, **options):
    """Two groups, the second of encoder tokens in blocks of 4, at most 10 a request; rows are committed."""
    groups = [KVCacheGroupSpec(16), KVCacheGroupSpec(4, (2,), max_num_encoder_tokens=10)]
    table = MultiGroupBlockTable(
        groups, num_rows, 64, 32, token_alignment=None, stable_rows=stable_rows, backend=backend, **options
    )
    for row, ids in enumerate(rows):
        table.add_row(([40 + row], ids), row)
    table.commit_block_table()
    return table


def whole(mapping):
    """All that a mapping keeps."""
    return {name: to_numpy(getattr(mapping, name)).copy() for name in NAMES}


def expected_of(mapping, lens, slots):
    """What it should keep after a call: PAD and 0 past the last token, and its requests padded."""
    num_tokens, num_reqs = sum(lens), len(lens)
    tail, rest = mapping.max_num_tokens - num_tokens, len(mapping.seq_lens) - num_reqs
    starts = np.cumsum([0, *lens]).tolist()
    return {
        "slot_mapping": slots + [-1] * tail,
        "positions": [p for n in lens for p in range(n)] + [0] * tail,
        "query_start_loc": starts + starts[-1:] * rest,
        "seq_lens": list(lens) + [0] * rest,
    }


def check(mapping, given, lens, slots):
    """Compare what a call has returned, and all that is kept."""
    expected, kept = expected_of(mapping, lens, slots), whole(mapping)
    assert {name: array.tolist() for name, array in kept.items()} == expected
    sizes = {"slot_mapping": sum(lens), "positions": sum(lens), "query_start_loc": len(lens) + 1}
    assert (given.num_reqs, given.num_tokens) == (len(lens), sum(lens))
    for name in NAMES:
        array = to_numpy(getattr(given, name))
        size = sizes.get(name, len(lens))
        assert array.shape == (size,)
        assert array.tolist() == expected[name][:size], name
        assert array.dtype == kept[name].dtype == (np.int64 if name in NAMES[:2] else np.int32)


# --- slots ------------------------------------------------------------------------------------------


def test_encoder_tokens_fill_their_rows_from_the_first_position_on(backend):
    table = cross_table(backend, [3, 8, 2], [9], [7, 6])
    mapping = EncoderSlotMapping(table, 1, 24)
    given = mapping.compute([10, 0, 5])
    row_0 = [12, 13, 14, 15, 32, 33, 34, 35, 8, 9]
    check(mapping, given, [10, 0, 5], [*row_0, 28, 29, 30, 31, 24])
    given = mapping.compute([0, 3])
    check(mapping, given, [0, 3], [36, 37, 38])
    check(mapping, mapping.compute([]), [], [])
    check(mapping, mapping.compute([0, 0, 0, 0]), [0, 0, 0, 0], [])


def test_with_stable_rows_each_request_names_its_row(backend):
    table = cross_table(backend, [3, 8, 2], [9], [7, 6], [50], stable_rows=True)
    mapping = EncoderSlotMapping(table, 1, 24)
    given = mapping.compute([2, 3, 1, 0, 2][:4], rows=[2, -1, 1, 0])
    check(mapping, given, [2, 3, 1, 0], [28, 29, -1, -1, -1, 36])
    given = mapping.compute(np.array([1, 1], np.int32), rows=np.array([0, 0], np.int32))
    check(mapping, given, [1, 1], [12, 12])


def test_tokens_outside_the_committed_blocks_have_no_slot(backend, stable_rows):
    table = cross_table(backend, [3], [9, 0, 5], stable_rows=stable_rows)
    mapping = EncoderSlotMapping(table, 1, 32)
    rows = [0, 1] if stable_rows else None
    slots = [12, 13, 14, 15, -1, -1, 36, 37, 38, 39, -1, -1, -1, -1, 20]
    check(mapping, mapping.compute([6, 9], rows), [6, 9], slots)
    table[1].append_row([8], 0)
    check(mapping, mapping.compute([6, 9], rows), [6, 9], slots)
    table.commit_block_table()
    slots[4:6] = [32, 33]
    check(mapping, mapping.compute([6, 9], rows), [6, 9], slots)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_encoder_slots_equal_brute_force(backend, data):
    """Any place among the groups, block size, world and row mode; short rows, NULLs and dummies too."""
    interleave = data.draw(st.sampled_from([1, 2, 3]), "interleave")
    world = data.draw(worlds(interleave), "rank")[0]
    most = data.draw(st.sampled_from([1, 7, 30]), "max_num_encoder_tokens")
    drawn = data.draw(group_specs(interleave), "cross group")
    spec = KVCacheGroupSpec(
        drawn.block_size,
        drawn.kernel_views,
        cp_sharded=drawn.cp_sharded,
        max_num_blocks_per_req=drawn.max_num_blocks_per_req,
        max_num_encoder_tokens=most,
    )
    groups = data.draw(st.lists(group_specs(interleave), max_size=2), "others")
    group = data.draw(st.integers(0, len(groups)), "group")
    groups.insert(group, spec)
    num_rows, stable = data.draw(st.integers(1, 4), "rows"), data.draw(st.booleans(), "stable_rows")
    table = MultiGroupBlockTable(
        groups, num_rows, 20, 16, context_parallel=world, stable_rows=stable, backend=backend,
        token_alignment=data.draw(st.sampled_from([None, 16]), "token_alignment"),
    )  # fmt: skip
    width = table.mirror.widths[group]
    ids = st.lists(st.sampled_from([0, 1, 2, 3, 30]), max_size=min(width, 12))
    content = [data.draw(ids, "ids") for _ in range(num_rows)]
    for row, blocks in enumerate(content):
        lists = [[row + 7] for _ in groups]
        lists[group] = blocks
        table.add_row(lists, row)
    table.commit_block_table()
    mapping = EncoderSlotMapping(table, group, num_rows * most)
    for _ in range(data.draw(st.integers(1, 3), "calls")):
        num_reqs = data.draw(st.integers(0, num_rows), "num_reqs")
        lens = data.draw(
            st.lists(st.sampled_from([0, 1, most // 2, most]), min_size=num_reqs, max_size=num_reqs), "lens"
        )
        rows = None
        if stable:
            lines = st.lists(st.integers(-1, num_rows - 1), min_size=num_reqs, max_size=num_reqs)
            rows = data.draw(lines, "rows")

        given_slots = mapping.compute(lens, rows)

        which = range(num_reqs) if rows is None else rows
        slots = [
            slot_of(p, content[row] if row >= 0 else [], spec, world, most)
            for row, length in zip(which, lens, strict=True)
            for p in range(length)
        ]
        check(mapping, given_slots, lens, slots)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_group_keeps_its_ranks_share_and_a_replicated_one_all(backend, rank):
    groups = [KVCacheGroupSpec(4, cp_sharded=s, max_num_encoder_tokens=10) for s in (True, False)]
    world = ContextParallel(2, rank, 2)
    table = MultiGroupBlockTable(
        groups, 1, 64, 8, context_parallel=world, token_alignment=None, backend=backend
    )
    assert table.mirror.widths == (2, 3)
    table.add_row(([6, 9], [3, 8, 2]), 0)
    table.commit_block_table()
    mine = [[24, 25, -1, -1, 26, 27, -1, -1, 36, 37], [-1, -1, 24, 25, -1, -1, 26, 27, -1, -1]]
    shares = [mine[rank], [12, 13, 14, 15, 32, 33, 34, 35, 8, 9]]
    for group, slots in enumerate(shares):
        mapping = EncoderSlotMapping(table, group, 16)
        check(mapping, mapping.compute([10]), [10], slots)


def test_slots_are_formed_in_64_bits_and_in_32_on_request(backend):
    for dtype, block in ((np.int64, 2**29 + 3), (np.int32, 2**29 - 1)):
        table = cross_table(backend, [block], slot_dtype=dtype)
        slots = EncoderSlotMapping(table, 1, 8).compute([2]).slot_mapping
        assert to_numpy(slots).tolist() == [4 * block, 4 * block + 1]
        assert slots.dtype == dtype


def test_encoder_tokens_of_many_blocks(backend):
    """More tokens than one block of threads: 37 requests of up to 1,500 tokens, as an audio encoder has."""
    rng, most, num = np.random.default_rng(5), 1500, 37
    groups = [KVCacheGroupSpec(12, max_num_encoder_tokens=most)]
    table = MultiGroupBlockTable(groups, num, 64, 8, stable_rows=True, backend=backend)
    blocks = rng.permutation(np.arange(1, num * 125 + 1, dtype=np.int32)).reshape(num, 125)
    table.add_rows(np.arange(num), np.full((1, num), 125, np.int32), blocks.ravel())
    table.commit_block_table()
    mapping = EncoderSlotMapping(table, 0, num * most)
    for share in (1.0, 0.3):
        lens = rng.integers(0, most + 1, num) * (rng.random(num) < share)
        rows = rng.permutation(num)
        positions = np.concatenate([np.arange(n) for n in lens])
        expected = blocks[np.repeat(rows, lens), positions // 12].astype(np.int64) * 12 + positions % 12
        slots = to_numpy(mapping.compute(lens, rows).slot_mapping)
        np.testing.assert_array_equal(expected, slots)
        assert len(set(slots.tolist())) == len(slots), "no two tokens share a slot"
        assert (to_numpy(mapping.slot_mapping)[len(slots) :] == -1).all()


# --- beside a table's steps -------------------------------------------------------------------------


def test_a_mapping_leaves_the_tables_steps_alone_and_they_leave_it(backend, stable_rows):
    table = cross_table(backend, [3, 8, 2], [9], stable_rows=stable_rows)
    mapping = EncoderSlotMapping(table, 1, 16)
    rows = [1, 0] if stable_rows else None
    table.commit(2, [0, 1, 3], [4, 0], rows=rows)
    before = everything(table)
    mapping.compute([3, 2], rows)
    *_, counters = everything(table)
    assert counters[0] == before[-1][0] + 1
    assert_unchanged([*before[:-1], counters], table)
    kept = whole(mapping)
    table.commit(1, [0, 9], [0], rows=[0] if stable_rows else None)
    table.compute_slot_mapping(1, [0, 1], np.array([0]))
    for name, array in whole(mapping).items():
        np.testing.assert_array_equal(kept[name], array)


def test_mappings_of_two_groups_keep_their_own(backend):
    groups = [KVCacheGroupSpec(size, max_num_encoder_tokens=10) for size in (4, 3)]
    table = MultiGroupBlockTable(groups, 2, 64, 8, token_alignment=None, backend=backend)
    table.add_row(([3, 8], [5]), 0)
    table.add_row(([9], [6, 7]), 1)
    table.commit_block_table()
    first, second = (EncoderSlotMapping(table, g, 16) for g in (0, 1))
    given = first.compute([5, 1]), second.compute([1, 4])
    check(first, given[0], [5, 1], [12, 13, 14, 15, 32, 36])
    check(second, given[1], [1, 4], [15, 18, 19, 20, 21])


def test_arrays_keep_their_addresses_and_a_call_is_one_copy(backend, stable_rows):
    table = cross_table(backend, [3, 8, 2], [9], stable_rows=stable_rows)
    mapping = EncoderSlotMapping(table, 1, 32)
    addresses, sizes = set(), set()
    for i in range(20):
        num_reqs = i % 5
        lens = [(i * (k + 1)) % 9 for k in range(num_reqs)]
        copies, num_bytes = table.num_h2d_copies, table.num_h2d_bytes
        given = mapping.compute(lens, [k % 2 for k in range(num_reqs)] if stable_rows else None)
        assert table.num_h2d_copies == copies + 1
        sizes.add(table.num_h2d_bytes - num_bytes)
        addresses.add(tuple(address(getattr(mapping, name)) for name in NAMES))
        if sum(lens):
            assert tuple(address(getattr(given, name)) for name in NAMES) in addresses
    assert len(addresses) == 1
    assert sizes == {1024}, "the bytes follow the requests, not their tokens"
    given.ready.synchronize()


def test_buffers_are_used_in_turn_and_waited_for_before_they_are_written(backend, monkeypatch):
    table = cross_table(backend, [3, 8, 2], staging_depth=3)
    mapping, place = EncoderSlotMapping(table, 1, 16), table._committer.backend
    wait_for, seen = place.wait_for, []

    def watched(event_id):
        buffer = mapping._ring.buffer
        assert event_id == buffer.event_id
        seen.append((id(buffer), buffer.words.copy()))
        wait_for(event_id)

    monkeypatch.setattr(place, "wait_for", watched)
    written = []
    for length in range(1, 8):
        buffer = mapping._ring.buffer
        assert mapping.compute([length]).ready is buffer.event, "used again after staging_depth calls"
        written.append(buffer.words.copy())
    ids = [buffer for buffer, _ in seen]
    assert len(set(ids)) == 3
    assert ids == ids[:3] * 2 + ids[:1]
    for before, (_, at_wait) in zip(written, seen[3:], strict=False):
        np.testing.assert_array_equal(before, at_wait)


def test_a_managers_encoder_tokens_are_mapped_when_they_come_and_read_later(backend):
    """Requests come one after another; each one's slots are made in the step that takes its blocks."""
    manager = KVCacheManager(
        [FullAttentionSpec(4), CrossAttentionSpec(4, 10)],
        64,
        max_num_seqs=4,
        max_model_len=32,
        enable_prefix_caching=False,
    )
    table = MultiGroupBlockTable(
        manager.table_groups, 4, 32, 32, stable_rows=True, mirror=manager.mirror, backend=backend
    )
    mapping = EncoderSlotMapping(table, 1, 32)
    batch, encoder_lens, written = [], {}, {}
    for prompt, num_encoder_tokens in ((5, 10), (3, 1), (2, 7), (1, 4)):
        for seq in batch:
            manager.append([seq], [1])
        batch.insert(len(batch) // 2, manager.add(range(prompt), num_encoder_tokens=num_encoder_tokens))
        new_seq = batch[(len(batch) - 1) // 2]
        encoder_lens[new_seq] = num_encoder_tokens
        new = (manager.num_tokens(batch) - manager.num_computed_tokens(batch)).astype(np.int32)
        computed = manager.allocate_slots(batch, new).num_computed_tokens.astype(np.int32)
        rows = manager.rows(batch)
        starts = np.cumsum([0, *new]).astype(np.int32)
        step = table.commit(len(batch), starts, computed, rows=rows)
        assert (to_numpy(step.slot_mapping(1)) == -1).all()

        lens = [0 if seq in written else encoder_lens[seq] for seq in batch]
        given = mapping.compute(lens, rows)

        positions = np.concatenate([np.arange(n) for n in lens])
        slots = manager.translate(np.repeat(batch, lens), positions, 1)
        check(mapping, given, lens, slots.tolist())
        written[new_seq] = slots.tolist()
        for i, seq in enumerate(batch):  # what a decoder token reads is what was written
            blocks = to_numpy(step.block_table(1))[i]
            read = [4 * int(blocks[p // 4]) + p % 4 for p in range(encoder_lens[seq])]
            assert read == written[seq]
        manager.commit(batch, computed + new)
    flat = [slot for slots in written.values() for slot in slots]
    assert len(flat) == len(set(flat)) == 22


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lens", "rows", "error", "message"),
    [
        ([3, 11], [0, 1], ValueError, r"encoder_lens must lie in \[0, 10\], got 11"),
        ([3, -1], [0, 1], ValueError, r"encoder_lens must lie in \[0, 10\], got -1"),
        ([3, 2**40], [0, 1], ValueError, "encoder_lens must lie in"),
        ([3.0, 1.0], [0, 1], TypeError, "encoder_lens must hold integers"),
        ([[3, 1]], [0, 1], ValueError, "encoder_lens must have one dimension"),
        ([10, 7], [0, 1], CapacityError, r"add up to at most max_num_tokens = 16, got 17 \("),
        ([1] * 5, [0] * 5, CapacityError, "must hold at most max_num_reqs = 4 lengths, got 5"),
        ([3, 1], [0, 4], ValueError, r"rows must lie in \[-1, 3\], got 4"),
        ([3, 1], [0, -2], ValueError, r"rows must lie in \[-1, 3\], got -2"),
        ([3, 1], [0], ValueError, "rows must have shape"),
        ([3, 1], None, ValueError, "rows must be given when the table has stable_rows, got NoneType"),
    ],
)
def test_a_call_that_is_refused_changes_nothing(backend, lens, rows, error, message):
    table = cross_table(backend, [3, 8, 2], [9], stable_rows=True)
    mapping = EncoderSlotMapping(table, 1, 16)
    mapping.compute([9, 1], [0, 1])
    table[1].append_row([5], 1)
    before, kept = everything(table), whole(mapping)
    with pytest.raises(error, match=message):
        mapping.compute(lens, rows)
    assert_unchanged(before, table)
    for name, array in whole(mapping).items():
        np.testing.assert_array_equal(kept[name], array)
    check(mapping, mapping.compute([1], [1]), [1], [36])


def test_rows_in_batch_order_are_not_named(backend):
    mapping = EncoderSlotMapping(cross_table(backend, [3]), 1, 16)
    with pytest.raises(ValueError, match="rows must be None unless the table has stable_rows, got list"):
        mapping.compute([1], [0])


@pytest.mark.parametrize(
    ("group", "max_num_tokens", "error", "message"),
    [
        (0, 16, ValueError, r"group must be one that holds encoder tokens, got group 0 \("),
        (2, 16, ValueError, r"group must lie in \[0, 1\], got 2"),
        (-1, 16, ValueError, r"group must lie in \[0, 1\], got -1"),
        (1.0, 16, TypeError, "group must be an int"),
        (1, 0, ValueError, "max_num_tokens must lie in"),
    ],
)
def test_a_mapping_that_cannot_be(backend, group, max_num_tokens, error, message):
    with pytest.raises(error, match=message):
        EncoderSlotMapping(cross_table(backend, [3]), group, max_num_tokens)
