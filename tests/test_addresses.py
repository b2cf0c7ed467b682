"""Arrays by address: compiled code sees the arrays themselves, in their shape and order."""

import numba
import numpy as np
import pytest

from pagedkv.addresses import address_table, int32_1d, int32_2d, int32_3d, int64_1d, int64_2d


@numba.njit
def change(table):
    a, b, c = int32_1d(table, 0), int32_2d(table, 1), int32_3d(table, 2)
    d, e = int64_1d(table, 3), int64_2d(table, 4)
    a[-1] += 1
    b[0, -1] += 1
    c[-1, 0, 1] += 1
    d[0] = 2**40
    e[-1, -1] = -(2**40)
    return a.shape + b.shape + c.shape + d.shape + e.shape


def test_changes_are_seen_in_the_arrays():
    a, b, c = (np.zeros(shape, np.int32) for shape in ((3,), (2, 4), (2, 3, 2)))
    d, e = np.zeros(1, np.int64), np.zeros((2, 5), np.int64)
    shapes = change(address_table(a, b, c, d, e))
    assert shapes == (3, 2, 4, 2, 3, 2, 1, 2, 5)
    assert a.tolist() == [0, 0, 1]
    assert b.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert c[-1].tolist() == [[0, 1], [0, 0], [0, 0]]
    assert (d[0], e[-1, -1]) == (2**40, -(2**40))
    assert sum(np.count_nonzero(x) for x in (a, b, c, d, e)) == 5


def test_arrays_without_elements_keep_their_shape():
    empty = np.zeros((2, 0), np.int64)
    table = address_table(np.zeros(1, np.int32), empty)

    @numba.njit
    def shape(table):
        return int64_2d(table, 1).shape

    assert shape(table) == (2, 0)


def test_arrays_must_be_contiguous():
    with pytest.raises(ValueError, match="arrays by address must be C-contiguous, got strides"):
        address_table(np.zeros((4, 4), np.int32)[:, 1:])
