"""Step inputs that lie on the device: read where they are, and corrected there until the step runs."""

import numpy as np
import pytest

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable

from .models import assert_unchanged, everything, to_numpy

INPUTS = {"query_start_loc": np.int32, "num_computed_tokens": np.int32, "positions": np.int64}


@pytest.fixture(params=[False, True], ids=["batch order", "stable rows"])
def table(gpu_backend, request):
    groups = [KVCacheGroupSpec(4, (2,), sliding_window=6), 3]
    table = MultiGroupBlockTable(
        groups, 4, 48, 32, token_alignment=None, stable_rows=request.param, backend=gpu_backend
    )
    for row in range(4):
        table.add_row((range(10 * row + 1, 10 * row + 8), range(row + 1, row + 9)), row)
    return table


def host_twin(table):
    """The same table on the host."""
    specs = [group._spec for group in table]
    twin = MultiGroupBlockTable(
        specs, 4, 48, 32, token_alignment=None, stable_rows=table.stable_rows, backend="numpy"
    )
    for g, group in enumerate(table):
        counts = group.num_blocks_per_row
        for row, count in enumerate(counts):
            twin[g].add_row(group.get_numpy_array()[row, :count].copy(), row)
    return twin


def assert_same_step(expected, actual, num_tokens):
    for g in range(2):
        np.testing.assert_array_equal(expected.block_table(g), to_numpy(actual.block_table(g)))
        np.testing.assert_array_equal(
            expected.slot_mapping(g)[:num_tokens], to_numpy(actual.slot_mapping(g))[:num_tokens]
        )
        assert (to_numpy(actual.slot_mapping(g))[num_tokens:] == -1).all()
    np.testing.assert_array_equal(expected.kernel_block_table(0), to_numpy(actual.kernel_block_table(0)))
    for name in ("query_start_loc", "seq_lens"):
        np.testing.assert_array_equal(getattr(expected, name), to_numpy(getattr(actual, name)))
    np.testing.assert_array_equal(expected.positions[:num_tokens], to_numpy(actual.positions)[:num_tokens])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "on_device",
    [
        {"query_start_loc"},
        {"num_computed_tokens"},
        {"positions"},
        {"query_start_loc", "num_computed_tokens"},
        {"query_start_loc", "positions"},
        {"query_start_loc", "num_computed_tokens", "positions"},
    ],
    ids=lambda names: "+".join(sorted(names)),
)
def test_device_arrays_give_the_step_of_host_arrays(table, on_device):
    cupy = pytest.importorskip("cupy")
    twin = host_twin(table)
    buffers = {name: cupy.zeros(40, dtype) for name, dtype in INPUTS.items()}
    for i in range(6):
        lengths = np.array([2, 0, i, 1], np.int32)
        inputs = {
            "query_start_loc": np.cumsum([0, *lengths]).astype(np.int32),
            "num_computed_tokens": np.array([i, 4, 2 * i, 11 - i], np.int32),
        }
        num_tokens = int(lengths.sum())
        if "positions" in on_device:
            inputs["positions"] = np.arange(num_tokens, dtype=np.int64) * 3 - 1
        rows = {"rows": np.roll([0, 1, -1, 3], i).astype(np.int32)} if table.stable_rows else {}
        padding = {"num_reqs_padded": 4, "num_tokens_padded": 32}
        expected = twin.commit(4, **inputs, **rows, **padding)
        for name in on_device:
            buffers[name][: len(inputs[name])] = cupy.asarray(inputs[name])
            inputs[name] = buffers[name]
        assert_same_step(expected, table.commit(4, **inputs, **rows, **padding), num_tokens)


@pytest.mark.gpu
def test_the_number_of_tokens_is_the_devices(table):
    cupy = pytest.importorskip("cupy")
    rows = {"rows": [0, 1]} if table.stable_rows else {}
    if not table.stable_rows:
        table.clear_rows([2, 3])
    for starts in ([0, 3, 9], [0, 1, 2], [0, 0, 0]):
        step = table.commit(2, cupy.array(starts, np.int32), [0, 0], **rows, num_tokens_padded=16)
        assert step.num_tokens is None
        slots = to_numpy(table[0].slot_mapping)
        expected = [4 + t for t in range(starts[1])] + [44 + t for t in range(starts[2] - starts[1])]
        assert slots[: starts[2]].tolist() == expected
        assert (slots[starts[2] :] == -1).all()


@pytest.mark.gpu
def test_separate_calls_take_device_arrays_without_a_copy(table):
    cupy = pytest.importorskip("cupy")
    table.commit_block_table()
    copies = table.num_h2d_copies
    starts, positions = cupy.array([0, 2, 3], np.int32), cupy.array([0, 5, 27, 0, 0], np.int64)
    table.compute_slot_mapping(2, starts, positions, rows=cupy.array([3, 0], np.int32))
    assert table.num_h2d_copies == copies
    slots = to_numpy(table[0].slot_mapping)
    assert slots[:3].tolist() == [31 * 4, 32 * 4 + 1, 7 * 4 + 3]
    assert (slots[3:] == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", INPUTS)
def test_device_arrays_of_a_wrong_dtype_or_size(table, name):
    cupy = pytest.importorskip("cupy")
    inputs = {"query_start_loc": [0, 1, 2, 3, 4], "num_computed_tokens": [0] * 4}
    rows = {"rows": [0, 1, 2, 3]} if table.stable_rows else {}
    wrong = np.int64 if INPUTS[name] == np.int32 else np.int32
    before = everything(table)
    with pytest.raises(TypeError, match=f"{name} must be {np.dtype(INPUTS[name])} on the device"):
        table.commit(4, **{**inputs, name: cupy.zeros(8, wrong)}, **rows)
    with pytest.raises(ValueError, match=f"{name} must be contiguous"):
        table.commit(4, **{**inputs, name: cupy.zeros((8, 2), INPUTS[name])[:, 0]}, **rows)
    if name != "positions":
        with pytest.raises(ValueError, match=f"{name} must be contiguous with at least"):
            table.commit(4, **{**inputs, name: cupy.zeros(3, INPUTS[name])}, **rows)
    assert_unchanged(before, table)
