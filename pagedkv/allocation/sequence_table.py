"""SequenceBlockTable: one sequence's logical blocks, over the counts of a shared pool."""

from typing import Any, Self

import numpy as np

from pagedkv.allocation.block_pool import BlockPool
from pagedkv.allocation.logical_blocks import LogicalBlocks
from pagedkv.checks import IntArray, as_int32, check_int
from pagedkv.constants import NULL_BLOCK_ID
from pagedkv.errors import DoubleFreeError, InvalidBlockError, StaleSequenceError

__all__ = ["SequenceBlockTable"]

_NO_BLOCKS = np.empty(0, np.int32)
_NO_BLOCKS.flags.writeable = False


class SequenceBlockTable(LogicalBlocks):
    """The block table of one sequence: which physical block holds which logical block.

    Tables of one pool may share blocks; the pool counts the holders, so freeing one sequence leaves the
    others' data alone.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
        Tokens a block, at least 1.

    Examples
    --------
    >>> table = SequenceBlockTable(BlockPool(num_blocks=8), block_size=16)
    >>> table.append(32)
    array([1, 2], dtype=int32)
    >>> table.append(1)
    array([3], dtype=int32)
    >>> table.translate(2)
    3
    >>> table.slots([0, 31, 32])
    array([16, 47, 48])
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        super().__init__(block_size)
        self._pool = pool
        self._num_tokens = 0
        self._freed = False

    def __repr__(self) -> str:
        return f"SequenceBlockTable(num_tokens={self._num_tokens}, block_ids={self.block_ids.tolist()})"

    @property
    def num_tokens(self) -> int:
        """Tokens that the sequence has, appended or adopted."""
        return self._num_tokens

    def allocate(self, num_blocks: int) -> IntArray:
        """Reserve logical blocks at the end; `append` fills them before it takes others.

        Returns
        -------
        ndarray of int32, shape [num_blocks]

        Raises
        ------
        OutOfBlocksError
            The pool has fewer; nothing has changed.
        """
        self._check_live()
        block_ids = self._pool.allocate(num_blocks)
        self._extend(block_ids)
        return block_ids

    def append(self, num_tokens: int) -> IntArray:
        """Append tokens, and take the blocks that they need beyond those held.

        Where the first of them falls into a block that another table holds too, or that is cached, that
        block is replaced by a copy of its own first; `pool.take_copies()` says what to copy. 0 tokens do
        nothing.

        Returns
        -------
        ndarray of int32, shape [n]
            The blocks added at the end (not the copy's target, which replaces one).

        Raises
        ------
        OutOfBlocksError
            The pool has fewer than needed, the copy included; table and pool are unchanged.
        InvalidBlockError
            The block that the first token falls into was freed with `free_logical`.
        """
        if self._freed or type(num_tokens) is not int or num_tokens < 0:
            self._check_live()
            num_tokens = check_int("num_tokens", num_tokens)
        if num_tokens == 0:
            return _NO_BLOCKS
        tail = self._num_tokens // self.block_size
        copied = tail < self._num_blocks and self._needs_copy(tail)
        new = -(-(self._num_tokens + num_tokens) // self.block_size) - self._num_blocks
        block_ids = self._take(max(new, 0), tail if copied else None)
        self._num_tokens += num_tokens
        return block_ids

    def adopt(self, block_ids: Any, num_tokens: int) -> None:
        """Append blocks that others hold or held, as a prefix hit does: one reference more on each.

        Parameters
        ----------
        block_ids : array_like of int, shape [n]
            Physical blocks in sequence order, no NULL.
        num_tokens : int
            Tokens in them; the last block may be part filled, the others are full.

        Raises
        ------
        ValueError
            `num_tokens` does not fit n blocks, or the table holds blocks that are not full.
        InvalidBlockError
            An id is NULL or lies outside the pool. In all cases nothing changes.
        """
        self._check_live()
        ids = as_int32("block_ids", block_ids)
        most = ids.size * self.block_size
        num_tokens = check_int("num_tokens", num_tokens, low=max(most - self.block_size + 1, 0), high=most)
        if self._num_tokens != self._num_blocks * self.block_size:
            raise ValueError(
                f"adopt must follow full blocks: {self._num_blocks} blocks of {self.block_size} are held "
                f"for {self._num_tokens} tokens"
            )
        if ids.size and ids.min() == NULL_BLOCK_ID:
            raise InvalidBlockError(f"block_ids[{int(ids.argmin())}] must not be NULL ({NULL_BLOCK_ID})")
        self._pool.touch(ids)
        self._extend(ids)
        self._num_tokens += num_tokens

    def fork(self) -> Self:
        """Return a table that shares every block with tokens; reserved blocks beyond are not shared.

        The first of the sharers to append into a part-filled last block gets a copy of it.
        """
        self._check_live()
        child = type(self)(self._pool, self.block_size)
        shared = self._ids[: -(-self._num_tokens // self.block_size)]
        self._pool.touch(shared)
        child._extend(shared)  # noqa: SLF001 - of the same class
        child._num_tokens = self._num_tokens  # noqa: SLF001
        return child

    def free_logical(self, logical_block: int) -> None:
        """Give one block back; its entry becomes NULL and the others keep their places.

        Raises
        ------
        IndexError
            The logical block is below 0 or not held.
        DoubleFreeError
            It was freed before.
        """
        self._check_live()
        block = self.translate(logical_block)
        if block == NULL_BLOCK_ID:
            raise DoubleFreeError(f"logical_block {logical_block} is freed already: its entry is NULL")
        self._pool.free(self._ids[logical_block : logical_block + 1])
        self._ids[logical_block] = NULL_BLOCK_ID

    def free(self) -> None:
        """Give every block back, the last first, and end the table.

        A table that was freed refuses everything with StaleSequenceError.
        """
        self._check_live()
        self._pool.free(self._ids[: self._num_blocks][::-1])
        self._num_blocks = self._num_tokens = 0
        self._freed = True

    def _needs_copy(self, logical_block: int) -> bool:
        """Whether a write to the block would reach other holders, now or by its key."""
        block = int(self._ids[logical_block])
        if block == NULL_BLOCK_ID:
            raise InvalidBlockError(
                f"logical_block {logical_block} was freed: tokens cannot be appended into it "
                "(free only blocks before the last token)"
            )
        return not self._pool.is_writable_block(block)

    def _take(self, num_blocks: int, copied: int | None) -> IntArray:
        """Take new blocks, and one more that replaces the logical block `copied`."""
        if copied is None:
            return self.allocate(num_blocks) if num_blocks else _NO_BLOCKS
        block_ids = self._pool.allocate(num_blocks + 1)
        self._pool.copy_on_write(int(self._ids[copied]), int(block_ids[0]))
        self._ids[copied] = block_ids[0]
        self._extend(block_ids[1:])
        return block_ids[1:]

    def _check_live(self) -> None:
        if self._freed:
            raise StaleSequenceError("the table was freed: make a new SequenceBlockTable")
