"""A commit that is refused changes nothing, and the next correct one is right."""

import numpy as np
import pytest

from pagedkv import BackendUnavailableError, CapacityError, KVCacheGroupSpec, MultiGroupBlockTable

from .models import assert_unchanged, everything, expand, table_of, to_numpy

NUM_ROWS = 6


class Foreign:
    """An array of somebody else's device."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<i4", "data": (0, False), "version": 3}


def pending_table(backend, stable_rows):
    """Three live rows, one step committed, and changes that were not sent."""
    groups = [KVCacheGroupSpec(4, (2,), sliding_window=5), KVCacheGroupSpec(3)]
    table = MultiGroupBlockTable(
        groups, NUM_ROWS, 48, 32, token_alignment=None, stable_rows=stable_rows, backend=backend
    )
    table.outputs(2)
    for row in range(4):
        table.add_row(([row + 1, row + 11], [row + 21]), row)
    rows = {"rows": [3, 1, 0, -1]} if stable_rows else {}
    table.commit(4, [0, 3, 3, 4, 9], [0, 5, 3, 1], **rows)
    table.append_row(([40], [41, 42]), 1)
    table.clear_row(3)
    table.swap_row(0, 2)
    return table


GOOD = {
    "num_reqs": 3,
    "query_start_loc": [0, 2, 3, 3],
    "num_computed_tokens": [0, 7, 5],
    "num_reqs_padded": 5,
    "num_tokens_padded": 8,
}
BAD = {
    "num_reqs below 0": ({"num_reqs": -1}, ValueError, "num_reqs"),
    "a boolean": ({"num_reqs": True}, TypeError, "num_reqs must be an int, got bool"),
    "a fraction of requests": ({"num_reqs": 3.0}, TypeError, "num_reqs must be an int"),
    "a fraction of padded requests": ({"num_reqs_padded": 5.0}, TypeError, "num_reqs_padded must be an int"),
    "a fraction of padded tokens": (
        {"num_tokens_padded": 8.5},
        TypeError,
        "num_tokens_padded must be an int",
    ),
    "too few starts": ({"query_start_loc": [0, 2, 3]}, ValueError, "query_start_loc must have shape"),
    "too many starts": ({"query_start_loc": [0, 1, 2, 3, 3]}, ValueError, "query_start_loc must have shape"),
    "no starts": ({"query_start_loc": []}, ValueError, "query_start_loc must have shape"),
    "an empty array of starts": (
        {"query_start_loc": np.empty(0, np.int32)},
        ValueError,
        "query_start_loc must have shape",
    ),
    "an empty array of computed": (
        {"num_computed_tokens": np.empty(0, np.int32)},
        ValueError,
        "num_computed_tokens must have shape",
    ),
    "a number for computed": ({"num_computed_tokens": np.int32(3)}, ValueError, "one dimension"),
    "a number for starts": ({"query_start_loc": np.array(3, np.int32)}, ValueError, "one dimension"),
    "None for computed": ({"num_computed_tokens": None}, TypeError, "must hold integers"),
    "starts of two dimensions": ({"query_start_loc": [[0, 2, 3, 3]]}, ValueError, "one dimension"),
    "floating starts": ({"query_start_loc": [0.0, 2.0, 3.0, 3.0]}, TypeError, "must hold integers"),
    "starts below 0": (
        {"query_start_loc": [0, -2, 3, 3]},
        ValueError,
        "must not decrease, got -2 at place 1",
    ),
    "strings for starts": ({"query_start_loc": ["0"] * 4}, TypeError, "must hold integers"),
    "starts past int32": ({"query_start_loc": [0, 2, 3, 2**31]}, ValueError, "must lie in"),
    "first start": ({"query_start_loc": [1, 2, 3, 3]}, ValueError, "must start with 0, got 1"),
    "starts that decrease": (
        {"query_start_loc": [0, 3, 2, 3]},
        ValueError,
        "must not decrease, got 2 at place 2",
    ),
    "tokens past the maximum": (
        {"query_start_loc": [0, 2, 3, 33], "num_tokens_padded": None},
        CapacityError,
        "max_num_batched_tokens = 32, got 33",
    ),
    "tokens past their padding": (
        {"num_tokens_padded": 2},
        ValueError,
        "at least the 3 scheduled tokens, got 2",
    ),
    "padding past the maximum": (
        {"num_tokens_padded": 33},
        CapacityError,
        "max_num_batched_tokens = 32, got 33",
    ),
    "padding below 0": (
        {"num_tokens_padded": -1},
        ValueError,
        "num_tokens_padded must be None or at least 0",
    ),
    "too few computed": ({"num_computed_tokens": [0, 7]}, ValueError, "num_computed_tokens must have shape"),
    "too many computed": ({"num_computed_tokens": [0, 7, 5, 1]}, ValueError, "num_computed_tokens must have"),
    "floating computed": ({"num_computed_tokens": [0.5, 7, 5]}, TypeError, "must hold integers"),
    "too many requests": (
        {"num_reqs": 7, "query_start_loc": [0] * 8, "num_computed_tokens": [0] * 7, "num_reqs_padded": None},
        ValueError,
        "num_reqs must lie in .* got 7|max_num_reqs = 6",
    ),
    "padded below requests": ({"num_reqs_padded": 2}, CapacityError, "num_reqs <= num_reqs_padded"),
    "padded past the rows": ({"num_reqs_padded": 7}, CapacityError, "max_num_reqs = 6"),
    "too few positions": (
        {"positions": np.arange(2)},
        ValueError,
        "positions must hold the 3 scheduled tokens",
    ),
    "positions of 32 bits": (
        {"positions": np.arange(3, dtype=np.int32)},
        TypeError,
        "positions must be int64",
    ),
    "floating positions": ({"positions": np.arange(3.0)}, TypeError, "positions must be int64"),
    "positions of two dimensions": ({"positions": np.zeros((3, 1), np.int64)}, TypeError, "one dimension"),
    "foreign positions": ({"positions": Foreign()}, TypeError, "array of the table's device"),
    "foreign starts": ({"query_start_loc": Foreign()}, TypeError, "array of the table's device"),
    "foreign computed": ({"num_computed_tokens": Foreign()}, TypeError, "array of the table's device"),
    "an output set that is not there": ({"out": 2}, ValueError, "out must name one of 2 output sets, got 2"),
    "an output set below 0": ({"out": -1}, ValueError, "out must name one of 2 output sets, got -1"),
    "a fraction of an output set": ({"out": 1.0}, TypeError, "out must be an int, got float"),
}
BAD_ROWS = {
    "a row below -1": ({"rows": [0, -2, 1]}, r"rows must lie in \[-1, 5\], got -2 at place 1"),
    "a row past the table": ({"rows": [0, 1, 6]}, r"rows must lie in \[-1, 5\], got 6 at place 2"),
    "too few rows": ({"rows": [0, 1]}, "rows must have shape"),
    "too many rows": ({"rows": [0, 1, 2, 3]}, "rows must have shape"),
    "no rows": ({"rows": None}, "rows must be given when"),
}


def commit_good(table, ready=False, **changes):
    """The good step with some changes; `ready` passes int32 arrays, which take the short way."""
    arguments = {**GOOD, **({"rows": [1, -1, 2]} if table.stable_rows else {}), **changes}
    for name in ("query_start_loc", "num_computed_tokens", "rows"):
        values = arguments.get(name)
        if (
            ready
            and isinstance(values, list)
            and np.array(values).dtype == np.int64
            and np.max(values) < 2**31
        ):
            arguments[name] = np.array(values, np.int32)
    return table.commit(**arguments)


def assert_next_commit_is_right(table, ready=False):
    mirror = [to_numpy(group.get_numpy_array()).copy() for group in table]
    step = commit_good(table, ready)
    for g, group in enumerate(table):
        np.testing.assert_array_equal(mirror[g], to_numpy(group.get_device_tensor(NUM_ROWS)))
    if table.stable_rows:
        rows = [[[2, 12, 40], [], [1, 11]], [[22, 41, 42], [], [21]]]
        slots = [[8, 9, -1], [66, 67, -1]]
    else:
        rows = [[[3, 13], [2, 12, 40], [1, 11]], [[23], [22, 41, 42], [21]]]
        slots = [[12, 13, 51], [69, 70, 127]]
    for g in range(2):
        expected = table_of([*rows[g], [], []], table.mirror.widths[g])
        np.testing.assert_array_equal(expected, to_numpy(step.block_table(g)))
        np.testing.assert_array_equal([*slots[g], *[-1] * 5], to_numpy(step.slot_mapping(g)))
    expected = expand(to_numpy(step.block_table(0)), 2, 2)
    np.testing.assert_array_equal(expected, to_numpy(step.kernel_block_table(0)))
    assert to_numpy(step.seq_lens).tolist() == [2, 8, 5, 0, 0]
    assert to_numpy(step.positions).tolist() == [0, 1, 7, 0, 0, 0, 0, 0]


@pytest.fixture(params=[False, True], ids=["batch order", "stable rows"])
def table(backend, request):
    return pending_table(backend, request.param)


@pytest.mark.parametrize("ready", [False, True], ids=["lists", "ready"])
@pytest.mark.parametrize("what", BAD)
def test_a_refused_commit(table, what, ready):
    changes, error, message = BAD[what]
    if table.stable_rows and "num_reqs" in changes:
        changes = {**changes, "rows": [0] * max(int(changes["num_reqs"]), 0)}
    before = everything(table)
    with pytest.raises(error, match=message):
        commit_good(table, ready, **changes)
    assert_unchanged(before, table)
    assert_next_commit_is_right(table, ready)


@pytest.mark.parametrize("ready", [False, True], ids=["lists", "ready"])
@pytest.mark.parametrize("what", BAD_ROWS)
def test_rows_that_are_refused(backend, what, ready):
    table = pending_table(backend, stable_rows=True)
    changes, message = BAD_ROWS[what]
    before = everything(table)
    with pytest.raises(ValueError, match=message):
        commit_good(table, ready, **changes)
    assert_unchanged(before, table)
    assert_next_commit_is_right(table, ready)


def test_rows_of_another_type(backend):
    table = pending_table(backend, stable_rows=True)
    before = everything(table)
    with pytest.raises(TypeError, match="rows must hold integers"):
        commit_good(table, rows=[0.0, 1.0, 2.0])
    assert_unchanged(before, table)
    assert_next_commit_is_right(table)


def test_rows_in_batch_order_are_not_given(backend):
    table = pending_table(backend, stable_rows=False)
    before = everything(table)
    with pytest.raises(ValueError, match="rows must be None unless the table has stable_rows"):
        commit_good(table, rows=[0, 1, 2])
    assert_unchanged(before, table)
    assert_next_commit_is_right(table)


@pytest.mark.parametrize("group", [0, 1])
def test_a_live_row_in_the_padding(backend, group):
    table = pending_table(backend, stable_rows=False)
    table[group].append_row([5], 4)
    before = everything(table)
    with pytest.raises(ValueError, match=f"must be empty, got live row 4 in group {group}"):
        commit_good(table)
    assert_unchanged(before, table)
    commit_good(table, num_reqs_padded=4)  # the live row lies past the padding
    table.clear_row(4)
    assert_next_commit_is_right(table)


def test_a_stream_where_there_are_none():
    table = pending_table("numpy", stable_rows=False)
    before = everything(table)
    for call in (commit_good, lambda table, stream: table.commit_block_table(stream=stream)):
        with pytest.raises(BackendUnavailableError, match="stream must be None on the numpy backend"):
            call(table, stream=object())
    assert_unchanged(before, table)
    assert_next_commit_is_right(table)


BAD_MAPPINGS = {
    "requests": ((7, [0] * 8, np.arange(3)), {}, ValueError, r"num_reqs must lie in \[0, 6\], got 7"),
    "starts": ((2, [0, 1], np.arange(3)), {}, ValueError, "query_start_loc must have shape"),
    "first start": ((2, [1, 1, 3], np.arange(3)), {}, ValueError, "must start with 0, got 1"),
    "order": ((2, [0, 2, 1], np.arange(3)), {}, ValueError, "must not decrease, got 1 at place 2"),
    "tokens": ((2, [0, 2, 33], np.arange(33)), {}, CapacityError, "max_num_batched_tokens = 32, got 33"),
    "positions": ((2, [0, 2, 3], np.arange(2)), {}, ValueError, "positions must hold the 3 scheduled"),
    "dtype": ((2, [0, 2, 3], np.arange(3, dtype=np.int32)), {}, TypeError, "positions must be int64"),
    "device": ((2, [0, 2, 3], Foreign()), {}, TypeError, "array of the table's device"),
    "rows": ((2, [0, 2, 3], np.arange(3)), {"rows": [0, 6]}, ValueError, r"\[-1, 5\], got 6 at place 1"),
    "row below -1": ((2, [0, 2, 3], np.arange(3)), {"rows": [-2, 0]}, ValueError, "got -2 at place 0"),
    "number of rows": ((2, [0, 2, 3], np.arange(3)), {"rows": [0]}, ValueError, "rows must have shape"),
}


@pytest.mark.parametrize("what", BAD_MAPPINGS)
def test_a_refused_mapping(table, what):
    arguments, keywords, error, message = BAD_MAPPINGS[what]
    before = everything(table)
    with pytest.raises(error, match=message):
        table.compute_slot_mapping(*arguments, **keywords)
    assert_unchanged(before, table)
    assert_next_commit_is_right(table)


@pytest.mark.parametrize("num_reqs", [-1, 7, 2.0, True])
def test_a_refused_commit_of_rows(table, num_reqs):
    before = everything(table)
    with pytest.raises((TypeError, ValueError), match="num_reqs must"):
        table.commit_block_table(num_reqs)
    assert_unchanged(before, table)
    assert_next_commit_is_right(table)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((["16"], 4, 64, 8), TypeError, "groups must hold KVCacheGroupSpec or int block sizes, got str"),
        ((16, 4, 64, 8), TypeError, "groups must be a list or tuple"),
        (([16], 0, 64, 8), ValueError, r"max_num_reqs must lie in \[1,"),
        (([16], 4, 0, 8), ValueError, r"max_model_len must lie in \[1,"),
        (([16], 4, 64, 0), ValueError, r"max_num_batched_tokens must lie in \[1,"),
        (([16], 4, 64.0, 8), TypeError, "max_model_len must be an int"),
    ],
)
def test_a_table_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        MultiGroupBlockTable(*arguments, backend="numpy")


def test_a_ring_that_cannot_be():
    with pytest.raises(ValueError, match=r"staging_depth must lie in \[1,"):
        MultiGroupBlockTable([16], 4, 64, 8, staging_depth=0, backend="numpy")
    with pytest.raises(ValueError, match=r"number of output sets must lie in \[1,"):
        MultiGroupBlockTable([16], 4, 64, 8, backend="numpy").outputs(0)
