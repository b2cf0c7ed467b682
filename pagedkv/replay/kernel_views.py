"""Kernel views: whether an attention kernel's block tables expand the manager's."""

from typing import Any

import numpy as np

from pagedkv.checks import IntArray
from pagedkv.constants import NULL_BLOCK_ID

__all__ = ["num_wrong_entries"]


def num_wrong_entries(block_ids: IntArray, kernel_block_ids: Any, stride: int) -> int:
    """Count entries that are not ``block_id * stride + j``, NULL for a NULL block.

    Parameters
    ----------
    block_ids : ndarray of int32, shape [n]
    kernel_block_ids : ndarray of int32, shape [n, ratio]
    stride : int
    """
    blocks = block_ids.astype(np.int64)[:, None]
    expected = blocks * stride + np.arange(kernel_block_ids.shape[1])
    return int(
        np.count_nonzero(np.where(blocks == NULL_BLOCK_ID, NULL_BLOCK_ID, expected) != kernel_block_ids)
    )
