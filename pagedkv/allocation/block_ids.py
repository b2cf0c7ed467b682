"""Block ids as they come from callers, turned into int32 without a pass over their values."""

from typing import Any

import numpy as np

from pagedkv.checks import IntArray, as_int32, as_ready
from pagedkv.constants import MAX_INT32
from pagedkv.errors import InvalidBlockError

__all__ = ["as_block_ids"]


def as_block_ids(block_ids: Any) -> IntArray:
    """Return ids as a C-contiguous int32 array, shape [n]; int32 values are not looked at.

    Raises
    ------
    InvalidBlockError
        An id does not fit int32.
    TypeError, ValueError
        The ids are no integers, or not one-dimensional.
    """
    ids = np.asarray(block_ids)
    if ids.dtype == np.int32 and ids.ndim == 1:
        return as_ready(ids)
    if ids.size and ids.dtype.kind in "iu" and (ids.min() < -MAX_INT32 or ids.max() > MAX_INT32):
        raise InvalidBlockError(f"block_ids must lie in [0, {MAX_INT32}], got {ids.min()} to {ids.max()}")
    return as_int32("block_ids", block_ids, low=-MAX_INT32)
