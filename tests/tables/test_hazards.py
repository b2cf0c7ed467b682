"""Ways to hurt a table from outside: copies, dropped tables, steps out of turn, names out of range."""

import copy
import gc
import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv import BackendUnavailableError, HostMirror, KVCacheGroupSpec, MultiGroupBlockTable, PagedKVError
from pagedkv.tables.encoder_slots import EncoderSlotMapping

from .models import assert_unchanged, everything, to_numpy


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_mirror_is_not_copied(duplicate):
    """Compiled code works on its arrays by address: a copy would write into the original."""
    with pytest.raises(TypeError, match="must not be copied or pickled"):
        duplicate(HostMirror(2, [4]))


def test_a_dropped_table_gives_its_place_back():
    mirror = HostMirror(2, [8])
    for _ in range(3):
        MultiGroupBlockTable([16], 2, 128, 8, mirror=mirror, backend="numpy")
        gc.collect()
    mirror.add_rows([1], [2], [7, 5])

    table = MultiGroupBlockTable([16], 2, 128, 8, mirror=mirror, backend="numpy")
    table.commit_block_table()

    assert len(mirror.state.ranges) == 1
    np.testing.assert_array_equal([[0] * 8, [7, 5, *[0] * 6]], table[0].get_device_tensor(2))


def test_a_table_that_cannot_be_built_leaves_the_mirror_alone(monkeypatch):
    monkeypatch.setattr("pagedkv.backends.why_unavailable", lambda _name: "planted")
    mirror = HostMirror(2, [8])
    groups = [KVCacheGroupSpec(16, kernel_views=(8,))]
    limit = int(mirror.layout[0, 2])

    with pytest.raises(BackendUnavailableError, match="planted"):
        MultiGroupBlockTable(groups, 2, 128, 8, mirror=mirror, backend="cupy")

    assert (limit, 0) == (int(mirror.layout[0, 2]), len(mirror.state.ranges))


@pytest.mark.parametrize("slot_dtype", [np.int16, np.uint32, np.float32])
def test_slots_of_another_dtype(slot_dtype):
    with pytest.raises(TypeError, match="slot_dtype must be int64 or int32"):
        MultiGroupBlockTable([16], 2, 128, 8, backend="numpy", slot_dtype=slot_dtype)


def test_unsigned_counts_for_one_of_two_groups():
    table = MultiGroupBlockTable([16, 16], 2, 128, 8, backend="numpy")
    table[0].append_rows([0], np.array([1], np.uint32), [5])
    assert [table[g].num_blocks_per_row.tolist() for g in (0, 1)] == [[1, 0], [0, 0]]


@pytest.mark.parametrize(
    "ask",
    [
        lambda step: step.block_table(-1),
        lambda step: step.block_table(1),
        lambda step: step.kernel_block_table(0, -1),
        lambda step: step.kernel_block_table(0, 1),
        lambda step: step.slot_mapping(-1),
        lambda step: step.slot_mapping(1),
    ],
)
def test_groups_and_views_out_of_range(backend, ask):
    table = MultiGroupBlockTable([KVCacheGroupSpec(16, kernel_views=(8,))], 2, 128, 8, backend=backend)
    step = table.commit(1, [0, 1], [0])
    with pytest.raises(ValueError, match="must lie in"):
        ask(step)
    assert (step.block_table(0).shape, step.kernel_block_table(0, 0).shape) == ((1, 8), (1, 16))


def test_no_step_between_pack_and_replay(backend):
    """The replay would overwrite it with what was packed before."""
    table = MultiGroupBlockTable([16], 2, 128, 8, backend=backend)
    captured, other = table.captured_step(1, 1), table.captured_step(1, 1)
    table.add_row(([5],), 0)
    captured.pack(1, [0, 1], [0])
    table.add_row(([9],), 0)
    for step in (
        lambda: table.commit(1, np.array([0, 1], np.int32), np.array([0], np.int32)),
        lambda: table.commit(1, [0, 1], [0]),
        table.commit_block_table,
        lambda: other.pack(1, [0, 1], [0]),
    ):
        with pytest.raises(PagedKVError, match="mark_replayed"):
            step()

    captured.enqueue()
    captured.mark_replayed()
    step = table.commit(1, [0, 1], [0])

    assert to_numpy(step.block_table(0))[:, 0].tolist() == [9]


def packed_table(backend, stable_rows=False):
    """A row of encoder tokens whose new block was packed for a captured step, and not yet replayed."""
    groups = [KVCacheGroupSpec(16), KVCacheGroupSpec(4, max_num_encoder_tokens=10)]
    table = MultiGroupBlockTable(groups, 2, 128, 16, stable_rows=stable_rows, backend=backend)
    table.add_row(([5], [3, 5, 6]), 0)
    rows = {"rows": [0]} if stable_rows else {}
    table.commit(1, [0, 1], [0], **rows)
    table.compute_slot_mapping(1, [0, 1], np.array([0]))  # loaded ahead, as a capture wants it
    captured = table.captured_step(1, 1)
    table.add_row(([7], [9, 8, 2]), 0)
    captured.pack(1, [0, 1], [0], **rows)
    return table, captured


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
def test_no_slots_are_mapped_between_pack_and_replay(backend, stable_rows):
    """They would be those of the rows before the packed step."""
    table, captured = packed_table(backend, stable_rows)
    mapping = EncoderSlotMapping(table, 1, 16)
    device = table._committer.backend.asarray
    rows = [0] if stable_rows else None
    starts, positions = np.array([0, 1], np.int32), np.array([3])
    calls = {
        "host arrays": lambda: table.compute_slot_mapping(1, [0, 1], positions, rows=rows),
        "device arrays": lambda: table.compute_slot_mapping(1, device(starts), device(positions)),
        "of one group": lambda: table[0].compute_slot_mapping(1, [0, 1], positions, rows=rows),
        "encoder tokens": lambda: mapping.compute([10], rows),
    }
    before, kept = everything(table), to_numpy(mapping.slot_mapping).copy()
    for call in calls.values():
        with pytest.raises(PagedKVError, match="a captured step was packed: replay its graph and call mark"):
            call()
    assert_unchanged(before, table)
    np.testing.assert_array_equal(kept, to_numpy(mapping.slot_mapping))

    captured.enqueue()
    captured.mark_replayed()

    assert [to_numpy(slots).tolist() for slots in calls["host arrays"]()] == [[115], [-1]]
    expected = [36, 37, 38, 39, 32, 33, 34, 35, 8, 9]
    assert to_numpy(calls["encoder tokens"]().slot_mapping).tolist() == expected


def test_a_mapping_is_captured_between_pack_and_replay(monkeypatch):
    """It is in somebody's graph: what it maps is what the tables hold when that runs."""
    table, _ = packed_table("numpy")
    committer, stream = table._committer, SimpleNamespace(ptr=1)
    monkeypatch.setattr(committer.backend, "stream", lambda _stream: stream)
    monkeypatch.setattr(committer.backend, "is_capturing", lambda stream_id: stream_id == 1)
    monkeypatch.setattr(committer, "stage", lambda _name, array, _room, _stream: array)

    slots = table.compute_slot_mapping(1, [0, 1], np.array([3]))

    assert slots[0].tolist() == [83]


@contextmanager
def capture_on(stream):
    """A capture that ends whatever happens; yields a list that holds the graph afterwards."""
    graphs = []
    stream.begin_capture()
    try:
        yield graphs
    finally:
        graphs.append(stream.end_capture())


@pytest.mark.gpu
def test_a_mapping_that_is_captured_before_the_replay_reads_the_rows_of_its_own(gpu_backend):
    import cupy

    table, captured = packed_table(gpu_backend)
    stream = cupy.cuda.Stream(non_blocking=True)
    starts, positions = cupy.array([0, 1], np.int32), cupy.array([3])
    cupy.cuda.runtime.deviceSynchronize()
    with capture_on(stream) as graphs:
        (slots, _) = table.compute_slot_mapping(1, starts, positions, stream=stream)
    captured.enqueue(stream)
    captured.mark_replayed(stream)

    graphs[0].launch(stream)
    stream.synchronize()

    assert slots.get().tolist() == [115]


@pytest.mark.parametrize(("num_reqs", "num_blocks"), [(25, 24), (29, 22), (1, 1), (64, 64)])
@pytest.mark.parametrize("stable_rows", [False, True])
def test_a_captured_step_holds_the_blocks_it_was_made_for(backend, num_reqs, num_blocks, stable_rows):
    table = MultiGroupBlockTable([16], num_reqs, 256, 64, backend=backend, stable_rows=stable_rows)
    captured = table.captured_step(num_reqs, 64, max_new_blocks=num_blocks)
    for _ in range(3):
        rows = np.arange(num_blocks)
        table.append_rows(rows, np.ones(num_blocks, np.int32), rows + 1)
        order = {"rows": np.arange(num_reqs)} if stable_rows else {}
        captured.pack(num_reqs, np.arange(num_reqs + 1), np.zeros(num_reqs, np.int32), **order)
        captured.enqueue()
        captured.mark_replayed()
    np.testing.assert_array_equal(table[0].get_numpy_array(), to_numpy(table[0].get_device_tensor(num_reqs)))


@pytest.mark.gpu
def test_warmup_where_no_graph_can_be_captured(gpu_backend, monkeypatch):
    table = MultiGroupBlockTable([16], 2, 128, 8, backend=gpu_backend)

    def refuse(_run):
        raise RuntimeError("no capture here")

    monkeypatch.setattr(table._committer.backend, "capture", refuse)
    with pytest.warns(UserWarning, match="no capture here"):
        assert table.warmup() == 0
    assert to_numpy(table.commit(1, [0, 1], [0]).seq_lens).tolist() == [1]


def test_a_mirror_that_somebody_else_writes():
    """Its rows are stable and its blocks have a size of their own; the table's row calls leave it alone."""
    mirror = HostMirror(2, [8])
    mirror.claim("a KVCacheManager", [16])
    make = {"mirror": mirror, "backend": "numpy"}
    with pytest.raises(ValueError, match="pass stable_rows=True"):
        MultiGroupBlockTable([16], 2, 128, 8, **make)
    with pytest.raises(ValueError, match=r"must hold blocks of \[8\] tokens, got \[16\]"):
        MultiGroupBlockTable([8], 2, 64, 8, token_alignment=64, stable_rows=True, **make)
    with pytest.raises(
        TypeError, match=r"mirror must be a HostMirror, got SimpleNamespace \(pass its .mirror\)"
    ):
        MultiGroupBlockTable([16], 2, 128, 8, mirror=SimpleNamespace(mirror=mirror), backend="numpy")

    table = MultiGroupBlockTable([16], 2, 128, 8, stable_rows=True, **make)
    for call in (lambda: table.add_row(([5],), 0), lambda: table[0].clear_row(0), table.clear):
        with pytest.raises(PagedKVError, match="a KVCacheManager writes its mirror"):
            call()
    mirror.add_rows([1], [1], [5])

    step = table.commit(1, [0, 1], [3], rows=[1])

    assert step.slot_mapping(0).tolist() == [83]


def test_a_group_that_is_not_there():
    table = MultiGroupBlockTable([16], 2, 128, 8, backend="numpy")
    assert list(table) == [table[0]]
    for group in (-1, 1):
        with pytest.raises(IndexError, match=rf"group must lie in \[0, 0\], got {group}"):
            table[group]
    with pytest.raises(ValueError, match="group 0 has no kernel views"):
        table.commit(1, [0, 1], [0]).kernel_block_table(0)
    with pytest.raises(TypeError, match="block_ids must hold one list a group, got int"):
        table.add_row(0, [[1]])


def test_views_that_are_no_tuple():
    with pytest.raises(TypeError, match="kernel_views must be a tuple of views, got int"):
        KVCacheGroupSpec(32, kernel_views=8)


def test_a_device_without_one():
    with pytest.raises(BackendUnavailableError, match="device must be None on the numpy backend, got 3"):
        MultiGroupBlockTable([16], 2, 128, 8, backend="numpy", device=3)
