"""Mappings apart from a step: in a consumer's graph, in output sets of their own, and on several streams."""

import numpy as np
import pytest

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable, PagedKVError
from pagedkv.tables.encoder_slots import EncoderSlotMapping

from .pairs import Decoding, assert_same, copy_on_device, values_of

pytestmark = pytest.mark.gpu

NUM_REPLAYS = 30
STARTS = np.arange(9, dtype=np.int32)


def slots_of(table, out):
    return [np.asarray(table.slot_mapping(g, 64, out).get()) for g in range(table.num_groups)]


def assert_same_slots(pair, out, which=""):
    host = [pair.host.slot_mapping(g, 64, out) for g in range(2)]
    for group, (expected, actual) in enumerate(zip(host, slots_of(pair.device, out), strict=True)):
        np.testing.assert_array_equal(expected, actual, err_msg=f"{which}, group {group} of set {out}")


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
def test_drafts_inside_the_consumers_graph_and_the_target_outside(gpu_backend, cupy, stream, stable_rows):
    """Captured into set 1; every replay follows a step into set 0, and some a step into set 1 as well."""
    pair, rng = Decoding(gpu_backend, stable_rows=stable_rows), np.random.default_rng(4)
    pair.do("outputs", 2)
    starts, positions, lines = (cupy.zeros(n, d) for n, d in ((9, np.int32), (32, np.int64), (8, np.int32)))
    kept = [cupy.zeros(32, np.int64) for _ in range(2)]
    cupy.cuda.runtime.deviceSynchronize()

    def mapping():
        return pair.device.compute_slot_mapping(8, starts, positions, rows=lines, out=1, stream=stream)

    pair.device.commit_block_table(stream=stream)
    mapping()  # compiled and loaded before the capture
    copies = pair.device.num_h2d_copies
    stream.begin_capture()
    slots = mapping()
    for copy, group in zip(kept, slots, strict=True):
        copy_on_device(copy, group, stream)
    graph = stream.end_capture()
    assert copies == pair.device.num_h2d_copies
    assert [group.shape for group in slots] == [(32,), (32,)]
    for i in range(NUM_REPLAYS):
        if i % 5 == 4:  # a step into the drafts' set pads what a replay wrote there
            expected, step = pair.step(stream, out=1, num_tokens_padded=40)
            stream.synchronize()
            assert_same(expected, values_of(step, pair.device), f"step {i} into set 1")
            assert_same_slots(pair, 1, f"step {i}")
        expected, step = pair.step(stream)
        lengths = rng.integers(0, 5, 8)
        given = (
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            rng.integers(-2, 200, 32),
            rng.integers(-1, 8, 8).astype(np.int32),
        )
        pair.host.compute_slot_mapping(8, given[0], given[1], rows=given[2], out=1)
        for array, values in zip((starts, positions, lines), given, strict=True):
            array.set(values, stream=stream)
        graph.launch(stream)
        stream.synchronize()
        for group, copy in enumerate(kept):
            np.testing.assert_array_equal(
                pair.host.slot_mapping(group, 32, 1), copy.get(), err_msg=f"replay {i}, group {group}"
            )
        assert_same_slots(pair, 1, f"replay {i}")
        assert_same(expected, values_of(step, pair.device), f"the step before replay {i}")


def test_a_staged_array_is_read_before_another_sets_call_overwrites_it(gpu_backend, cupy, stall, stream):
    """Host arrays mapped into set 0 on a stalled stream, and others into set 1 on another one."""
    pair, other = Decoding(gpu_backend, staging_depth=8), cupy.cuda.Stream(non_blocking=True)
    pair.do("outputs", 2)
    pair.host.commit_block_table()
    pair.device.commit_block_table(stream=stream)
    positions = [np.full(8, p, np.int64) for p in (1, 6)]

    def both():
        for out, used in enumerate((stream, other)):
            pair.host.compute_slot_mapping(8, STARTS, positions[out], out=out)
            pair.device.compute_slot_mapping(8, STARTS, positions[out], out=out, stream=used)

    both()
    cupy.cuda.runtime.deviceSynchronize()
    stalled = stall(stream)
    positions[:] = positions[::-1]
    both()
    assert not stalled.is_released
    stalled.release()
    cupy.cuda.runtime.deviceSynchronize()
    for out in (0, 1):
        assert_same_slots(pair, out)


def test_without_the_wait_an_encoder_mapping_would_run_ahead_of_its_rows(gpu_backend, cupy, stall, stream):
    """Rows are sent on a stalled stream, and mapped on another: with the wait they are there, without not."""

    def no_wait(backend):
        backend.wait = lambda _stream, _event: None

    for tamper, expected in ((None, [12, 13, 14, 15, 32]), (no_wait, [12, 13, 14, 15, -1])):
        groups = [KVCacheGroupSpec(4, max_num_encoder_tokens=10)]
        table = MultiGroupBlockTable(groups, 2, 64, 8, token_alignment=None, backend=gpu_backend)
        mapping = EncoderSlotMapping(table, 0, 16)
        other = cupy.cuda.Stream(non_blocking=True)
        table.add_row(([3],), 0)
        for used in (stream, other):  # compiled and loaded ahead
            table.append_row([[7]], 1)
            table.commit_block_table(stream=used)
            mapping.compute([5, 1], stream=used)
        cupy.cuda.runtime.deviceSynchronize()
        if tamper:
            tamper(table._committer.backend)
        stalled = stall(stream)
        table.append_row(([8],), 0)
        table.commit_block_table(stream=stream)
        slots = mapping.compute([5], stream=other).slot_mapping
        if tamper:
            other.synchronize()
        stalled.release()
        cupy.cuda.runtime.deviceSynchronize()
        assert slots.get().tolist() == expected


def test_encoder_mappings_in_flight_do_not_share_a_buffer(gpu_backend, cupy, stall, stream):
    """As many calls as the ring is deep, all behind a stalled stream; each one's slots are copied away."""
    groups = [KVCacheGroupSpec(4, max_num_encoder_tokens=10)]
    table = MultiGroupBlockTable(
        groups, 4, 64, 8, stable_rows=True, token_alignment=None, staging_depth=3, backend=gpu_backend
    )
    mapping = EncoderSlotMapping(table, 0, 16)
    for row in range(4):
        table.add_row(([3 + row, 20 + row],), row)
    table.commit_block_table(stream=stream)
    kept = [cupy.zeros(16, np.int64) for _ in range(3)]
    calls = [([5, 1], [0, 3]), ([2], [1]), ([1, 0, 6], [2, 1, -1])]
    expected = [
        [12, 13, 14, 15, 80, 24],
        [16, 17],
        [20, *[-1] * 6],
    ]

    def all_calls():
        for (lens, rows), copy in zip(calls, kept, strict=True):
            mapping.compute(lens, rows, stream=stream)
            copy_on_device(copy, mapping.slot_mapping, stream)

    all_calls()
    stream.synchronize()
    for copy in kept:
        copy.fill(7)
    cupy.cuda.runtime.deviceSynchronize()
    stalled = stall(stream)
    all_calls()
    stalled.release()
    stream.synchronize()
    for slots, copy in zip(expected, kept, strict=True):
        assert copy.get().tolist() == slots + [-1] * (16 - len(slots))


def test_an_encoder_mapping_must_not_be_captured(gpu_backend, cupy, stream):
    """It raises, and the consumer's capture goes on."""
    groups = [KVCacheGroupSpec(4, max_num_encoder_tokens=10)]
    table = MultiGroupBlockTable(groups, 2, 64, 8, backend=gpu_backend)
    mapping = EncoderSlotMapping(table, 0, 16)
    table.add_row(([3],), 0)
    table.commit_block_table(stream=stream)
    mapping.compute([2], stream=stream)
    copied, copies = cupy.zeros(16, np.int64), table.num_h2d_copies
    cupy.cuda.runtime.deviceSynchronize()
    stream.begin_capture()
    try:
        with pytest.raises(PagedKVError, match="must not be captured"):
            mapping.compute([1], stream=stream)
        copy_on_device(copied, mapping.slot_mapping, stream)
    finally:
        graph = stream.end_capture()
    assert table.num_h2d_copies == copies
    graph.launch(stream)
    stream.synchronize()
    assert copied.get().tolist() == [12, 13, *[-1] * 14]
