"""Compiled translation of one sequence's logical blocks and positions.

Each returns the place of the first argument that is out of range, or -1.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.checks import IntArray
from pagedkv.compiled import compiled
from pagedkv.constants import NULL_BLOCK_ID, PAD_SLOT_ID

__all__ = ["slots_of", "translate_blocks"]

Int64Array = npt.NDArray[np.int64]


@compiled
def translate_blocks(block_ids: IntArray, num_blocks: int, logical_blocks: Int64Array, out: IntArray) -> int:
    """out[i] = block_ids[logical_blocks[i]]."""
    for i in range(logical_blocks.size):
        logical = logical_blocks[i]
        if logical < 0 or logical >= num_blocks:
            return i
        out[i] = block_ids[logical]
    return -1


@compiled
def slots_of(
    block_ids: IntArray, num_blocks: int, block_size: int, positions: Int64Array, out: Int64Array
) -> int:
    """out[i] = block_ids[p // block_size] * block_size + p % block_size, with p = positions[i]."""
    for i in range(positions.size):
        position = positions[i]
        if position < 0 or position >= num_blocks * block_size:
            return i
        logical = position // block_size
        block = np.int64(block_ids[logical])
        offset = position - logical * block_size
        out[i] = PAD_SLOT_ID if block == NULL_BLOCK_ID else block * block_size + offset
    return -1
