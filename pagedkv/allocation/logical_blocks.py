"""LogicalBlocks: an ordered list of physical blocks, read by logical block or by position."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.allocation.translation import slots_of, translate_blocks
from pagedkv.checks import IntArray, as_ready, check_int

__all__ = ["LogicalBlocks", "as_int64"]

_INITIAL_CAPACITY = 8


class LogicalBlocks:
    """Which physical block holds which logical block; who owns them is not known here.

    Parameters
    ----------
    block_size : int
        Tokens a block, at least 1.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = check_int("block_size", block_size, low=1)
        self._ids: IntArray = np.empty(_INITIAL_CAPACITY, np.int32)
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Logical blocks, freed ones included."""
        return self._num_blocks

    @property
    def block_ids(self) -> IntArray:
        """Physical block of each logical block, NULL where freed: read-only view, int32 [num_blocks]."""
        view = self._ids[: self._num_blocks]
        view.flags.writeable = False
        return view

    def translate(self, logical_block: int) -> int:
        """Return the physical block of one logical block, NULL if it was freed.

        Raises
        ------
        IndexError
            The logical block is below 0 or not held.
        """
        if not 0 <= logical_block < self._num_blocks:
            raise self._out_of_range("logical_block", logical_block, self._num_blocks)
        return int(self._ids[logical_block])

    def translate_batch(self, logical_blocks: Any) -> IntArray:
        """Return the physical blocks of many logical blocks in one compiled call.

        Parameters
        ----------
        logical_blocks : array_like of int, shape [n]
            In any order, repeats allowed.

        Returns
        -------
        ndarray of int32, shape [n]
            NULL where a block was freed.

        Raises
        ------
        IndexError
            One of them is below 0 or not held.
        """
        logical = as_int64("logical_blocks", logical_blocks)
        out = np.empty(logical.size, np.int32)
        place = translate_blocks(self._ids, self._num_blocks, logical, out)
        if place >= 0:
            raise self._out_of_range(f"logical_blocks[{place}]", logical[place], self._num_blocks)
        return out

    def slots(self, positions: Any) -> npt.NDArray[np.int64]:
        """Return where in the KV cache each position lies: `block_id * block_size + offset`.

        Parameters
        ----------
        positions : array_like of int, shape [n]
            Token positions of the sequence, each in a block that is held.

        Returns
        -------
        ndarray of int64, shape [n]
            PAD_SLOT_ID where the block was freed.

        Raises
        ------
        IndexError
            A position is below 0 or past the blocks held.
        """
        wanted = as_int64("positions", positions)
        out = np.empty(wanted.size, np.int64)
        place = slots_of(self._ids, self._num_blocks, self.block_size, wanted, out)
        if place >= 0:
            limit = self._num_blocks * self.block_size
            raise self._out_of_range(f"positions[{place}]", wanted[place], limit)
        return out

    def _extend(self, block_ids: IntArray) -> None:
        end = self._num_blocks + block_ids.size
        if end > self._ids.size:
            grown = np.empty(max(end, 2 * self._ids.size), np.int32)
            grown[: self._num_blocks] = self._ids[: self._num_blocks]
            self._ids = grown
        self._ids[self._num_blocks : end] = block_ids
        self._num_blocks = end

    @staticmethod
    def _out_of_range(name: str, value: int, limit: int) -> IndexError:
        return IndexError(f"{name} must lie in [0, {limit}), got {value}")


def as_int64(name: str, values: Any) -> npt.NDArray[np.int64]:
    """Return positions or logical blocks as int64, shape [n], or raise TypeError or ValueError."""
    array = np.asarray(values)
    if array.size == 0 and not isinstance(values, np.ndarray):
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(array.shape)}")
    return as_ready(np.ascontiguousarray(array, dtype=np.int64))
