"""Argument checks: what passes, what is refused, and in which words."""

import numpy as np
import pytest

from pagedkv.checks import as_int32, check_int, check_shape
from pagedkv.constants import MAX_INT32


@pytest.mark.parametrize("value", [0, 5, np.int32(5), np.uint8(5), np.int64(MAX_INT32)])
def test_integers_within_the_limits(value):
    checked = check_int("size", value)
    assert checked == value
    assert type(checked) is int


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, r"size must lie in \[0, 9\], got -1"),
        (10, ValueError, r"size must lie in \[0, 9\], got 10"),
        (2**70, ValueError, r"size must lie in \[0, 9\]"),
        (True, TypeError, "size must be an int, got bool"),
        (np.True_, TypeError, "size must be an int, got bool"),
        (1.0, TypeError, "size must be an int, got float"),
        ("1", TypeError, "size must be an int, got str"),
        (None, TypeError, "size must be an int, got NoneType"),
        (np.array([1]), TypeError, "size must be an int, got ndarray"),
    ],
)
def test_integers_outside_the_limits(value, error, message):
    with pytest.raises(error, match=message):
        check_int("size", value, 0, 9)


@pytest.mark.parametrize("values", [[], (), [3, 0], range(2), np.array([1], np.uint64), np.zeros(0, np.int8)])
def test_arrays_within_the_limits(values):
    array = as_int32("ids", values)
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    assert array.tolist() == list(values)


def test_a_ready_array_is_not_copied():
    ready = np.arange(3, dtype=np.int32)
    assert as_int32("ids", ready) is ready


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([-1], ValueError, r"ids must lie in \[0, 9\], got -1"),
        ([3, 10], ValueError, r"ids must lie in \[0, 9\], got 10"),
        ([2**31], ValueError, "got 2147483648"),
        (np.array([2**63], np.uint64), ValueError, "got 9223372036854775808"),
        ([1.0], TypeError, "ids must hold integers, got dtype float64"),
        ([True], TypeError, "ids must hold integers, got dtype bool"),
        (["1"], TypeError, "ids must hold integers"),
        (np.zeros(0), TypeError, "ids must hold integers, got dtype float64"),
        ([None], TypeError, "ids must hold integers"),
        ([[1, 2]], ValueError, r"ids must have one dimension, got shape \[1, 2\]"),
        (5, ValueError, r"ids must have one dimension, got shape \[\]"),
    ],
)
def test_arrays_outside_the_limits(values, error, message):
    with pytest.raises(error, match=message):
        as_int32("ids", values, 0, 9)


def test_shapes():
    check_shape("rows", np.zeros((2, 3)), (2, 3), "[G, n]")
    with pytest.raises(ValueError, match=r"rows must have shape \[G, n\] = \[2, 3\], got \[6\]"):
        check_shape("rows", np.zeros(6), (2, 3), "[G, n]")
