"""Arrays of a step that are given to the next one: read in place, while its kernels write them anew."""

import numpy as np
import pytest

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.backends import get_backend, why_unavailable
from tests.conftest import GPU_BACKENDS
from tests.gpu.pairs import arrays_of, assert_same, values_of

from .in_place import InPlaceBackend
from .models import assert_unchanged, everything, to_numpy

GROUPS = [
    KVCacheGroupSpec(4, (2,), sliding_window=6),
    KVCacheGroupSpec(4, state_mode="all", num_speculative_blocks=1),
    KVCacheGroupSpec(3),
]
INPUTS = {"query_start_loc": np.int32, "num_computed_tokens": np.int32, "positions": np.int64}
ROW_MODES = pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])


def make_backend(name, *given):
    return InPlaceBackend() if name == "in place" else get_backend(name, *given)


@pytest.fixture(params=["in place", *GPU_BACKENDS])
def device_backend(request, monkeypatch):
    """Name of a backend that takes device arrays: those of a GPU, and one on the host."""
    if request.param == "in place":
        monkeypatch.setattr("pagedkv.tables.multi_group.get_backend", make_backend)
    elif reason := why_unavailable(request.param):
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


def table_on(backend, stable_rows):
    table = MultiGroupBlockTable(
        GROUPS, 4, 48, 16, token_alignment=None, stable_rows=stable_rows, backend=backend
    )
    table.outputs(2)
    for row in range(4):
        table.add_row([range(10 * row + 100 * g + 1, 10 * row + 100 * g + 8) for g in range(3)], row)
    return table


def commit(table, out=0, num_reqs=4, **given):
    """A step of one or two tokens a request, but for what is given."""
    starts = np.array([0, 1, 3, 4, 6], np.int32)[: num_reqs + 1]
    inputs = {"query_start_loc": starts, "num_computed_tokens": np.array([9, 0, 3, 7], np.int32)[:num_reqs]}
    rows = {"rows": np.array([2, 0, 3, 1], np.int32)[:num_reqs]} if table.stable_rows else {}
    return table.commit(num_reqs, **inputs | given, **rows, num_tokens_padded=16, out=out)


def elements(array, dtype, first=0):
    """An array of a step from some element on, in one dimension and as another type."""
    flat = array.reshape(-1)
    return flat[: flat.size // 2 * 2].view(dtype)[first:]


def is_overwritten(name, output, first, stable_rows):
    """Whether the kernel that reads an input, or one before it that reads it too, writes this output."""
    kind = output.split("(")[0]
    if kind in {"state_indices", "initial_state_indices", "state_columns"}:
        return name == "num_computed_tokens"
    if kind in {"block_table", "kernel_block_table"}:
        return name == "num_computed_tokens" and stable_rows
    return (name, first) != (output, 0)  # a value is overwritten with itself


@ROW_MODES
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", INPUTS)
def test_a_step_is_given_none_of_what_it_overwrites(device_backend, name, first, stable_rows):
    """Each of its arrays as each input, of one request; where it is allowed, a copy gives the same step."""
    table, twin = table_on(device_backend, stable_rows), table_on(device_backend, stable_rows)
    for each in (table, twin):
        commit(each, out=1)
    for output in arrays_of(commit(table), table):
        own, same = (elements(arrays_of(commit(t), t)[output], INPUTS[name], first) for t in (table, twin))
        before = everything(table)
        if is_overwritten(name, output, first, stable_rows):
            with pytest.raises(ValueError, match=rf"^{name} must .*between two sets"):
                commit(table, num_reqs=1, **{name: own})
            assert_unchanged(before, table)
        else:
            step = commit(table, num_reqs=1, **{name: own})
            of_copy = commit(twin, num_reqs=1, **{name: same.copy()})
            assert_same(values_of(of_copy, twin), values_of(step, table), f"{name} from {output}")
        commit(table, out=1, num_reqs=1, **{name: own})  # another set, which leaves this one alone
        commit(twin, out=1, num_reqs=1, **{name: same.copy()})


@ROW_MODES
def test_starts_and_positions_of_the_last_step_serve_the_next(device_backend, stable_rows):
    """Both at once and again, by whatever threads: every element is written with what it holds."""
    table, host = table_on(device_backend, stable_rows), table_on("numpy", stable_rows)
    positions = np.array([9, 0, 10, 3, 40, -1], np.int64)
    expected = values_of(commit(host, positions=positions), host)
    step = commit(table, positions=positions)

    for _ in range(4):
        step = commit(table, query_start_loc=step.query_start_loc, positions=step.positions)

        assert_same(expected, values_of(step, table))


def test_lengths_of_one_set_are_what_the_other_has_computed(device_backend):
    """The kernel would overwrite num_computed_tokens while other blocks still read them."""
    table = table_on(device_backend, stable_rows=False)
    step = commit(table)
    for own in (step.seq_lens, step.seq_lens[1:], step.local_seq_lens(2)):
        with pytest.raises(
            ValueError, match=r"^num_computed_tokens must not lie in the (local_)?seq_lens that"
        ):
            commit(table, num_reqs=1, num_computed_tokens=own)

    following = commit(table, out=1, num_computed_tokens=step.seq_lens)

    assert to_numpy(following.seq_lens).tolist() == [11, 4, 5, 11]


@ROW_MODES
@pytest.mark.parametrize("name", ["query_start_loc", "positions", "rows"])
def test_slots_of_drafts_are_mapped_from_anything_but_themselves(device_backend, name, stable_rows):
    """A mapping apart from a step writes the slots of its set alone."""
    table, twin = table_on(device_backend, stable_rows), table_on(device_backend, stable_rows)
    given = {
        "query_start_loc": np.array([0, 2], np.int32),
        "positions": np.array([3, 9], np.int64),
        "rows": np.array([1], np.int32),
    }
    dtype = given[name].dtype
    for output in arrays_of(commit(table), table):
        own, same = (elements(arrays_of(commit(t), t)[output], dtype) for t in (table, twin))
        before = everything(table)
        if output.startswith("slot_mapping"):
            with pytest.raises(
                ValueError, match=f"^{name} must not lie in the slot_mapping that this call writes"
            ):
                table.compute_slot_mapping(1, **given | {name: own})
            assert_unchanged(before, table)
        else:
            slots = table.compute_slot_mapping(1, **given | {name: own})
            of_copy = twin.compute_slot_mapping(1, **given | {name: same.copy()})
            for expected, actual in zip(of_copy, slots, strict=True):
                np.testing.assert_array_equal(to_numpy(expected), to_numpy(actual), f"{name} from {output}")
        table.compute_slot_mapping(1, **given | {name: own}, out=1)


def test_host_arrays_are_sent_before_anything_is_written():
    """On the numpy backend all arrays are the host's, those of a step among them."""
    table = table_on("numpy", stable_rows=False)
    step = commit(table)
    inputs = {"query_start_loc": step.query_start_loc, "num_computed_tokens": step.seq_lens}

    step = table.commit(4, **inputs)

    assert step.seq_lens.tolist() == [11, 4, 5, 11]
    assert step.positions.tolist() == [10, 2, 3, 4, 9, 10]
    own = step.slot_mapping(2)
    expected = table.compute_slot_mapping(4, step.query_start_loc, own.copy(), out=1)
    for of_copy, slots in zip(
        expected, table.compute_slot_mapping(4, step.query_start_loc, own), strict=True
    ):
        np.testing.assert_array_equal(of_copy, slots)
