"""BlockPool: which physical block is free, and how often each of the others is held."""

from typing import Any

import numpy as np

from pagedkv.allocation import references
from pagedkv.allocation.block_ids import as_block_ids
from pagedkv.allocation.block_records import PINS, REFS, Counters
from pagedkv.allocation.events import room_for
from pagedkv.allocation.free_queue import list_free
from pagedkv.allocation.prefix_cache import PrefixCache
from pagedkv.checks import IntArray, check_int
from pagedkv.constants import NULL_BLOCK_ID
from pagedkv.errors import DoubleFreeError, InvalidBlockError, OutOfBlocksError

__all__ = ["BlockPool"]


class BlockPool(PrefixCache):
    """A pool of equal blocks with reference counts, a prefix cache and a documented order of reuse.

    Block 0 (`NULL_BLOCK_ID`) is never handed out. The others start free in ascending order. `allocate`
    takes from the head of the free queue. `free` puts the blocks that nobody holds any more back: those
    without a key before the head, so what was used last is reused first, and cached ones behind the tail,
    so they stay longest. A cached block loses its key when it is handed out; that is all that evicting
    is. `allocate(n)` succeeds exactly when n blocks are free.

    Parameters
    ----------
    num_blocks : int
        Blocks of the KV cache, the null block included; at least 1.
    enable_prefix_caching : bool
        Whether blocks can be published under keys; 40 bytes a block more.
    enable_events : bool
        Whether `take_events` tells what is cached and what is not any more.

    Examples
    --------
    >>> pool = BlockPool(num_blocks=10)
    >>> pool.allocate(3)
    array([1, 2, 3], dtype=int32)
    >>> pool.free([3, 2, 1])
    >>> pool.free_block_ids()
    array([3, 2, 1, 4, 5, 6, 7, 8, 9], dtype=int32)
    """

    def __init__(
        self, num_blocks: int, *, enable_prefix_caching: bool = False, enable_events: bool = False
    ) -> None:
        super().__init__(num_blocks, enable_prefix_caching=enable_prefix_caching, enable_events=enable_events)
        self._copies: dict[int, int] = {}  # target -> source, in the order in which they were asked for

    def __repr__(self) -> str:
        return f"BlockPool(num_blocks={self.num_blocks}, num_free_blocks={self.num_free_blocks})"

    @property
    def ref_counts(self) -> IntArray:
        """How many table cells hold each block, plus its pins: read-only view, int32 [num_blocks]."""
        return self._column(REFS)

    @property
    def pin_counts(self) -> IntArray:
        """How many copies that were not taken yet hold each block: read-only view, int32 [num_blocks]."""
        return self._column(PINS)

    def free_block_ids(self) -> IntArray:
        """Return the free blocks in the order in which they will be handed out, int32 [num_free_blocks]."""
        return list_free(self._arrays.records, self._arrays.counters)

    def allocate(self, num_blocks: int) -> IntArray:
        """Take blocks from the head of the free queue, all or none; each is then held once.

        One call serves a whole batch: take the sum, and split the ids. What the blocks hold is undefined.

        Parameters
        ----------
        num_blocks : int
            How many; 0 is fine.

        Returns
        -------
        ndarray of int32, shape [num_blocks]

        Raises
        ------
        OutOfBlocksError
            Fewer are free; nothing is taken.
        """
        if type(num_blocks) is not int or num_blocks < 0:
            num_blocks = check_int("num_blocks", num_blocks)
        if num_blocks > self.num_free_blocks:  # before the ids get memory: the number may be absurd
            raise OutOfBlocksError(needed=num_blocks, free=self.num_free_blocks)
        block_ids = np.empty(num_blocks, np.int32)
        self._arrays = room_for(self._arrays, num_blocks)
        references.take(*self._arrays, block_ids)
        return block_ids

    def free(self, block_ids: Any, *, last: bool = False) -> None:
        """Drop one reference per id; a block that nobody holds any more is free.

        Repeated ids count as often as they occur, null ids are skipped (a table row can be passed as it
        is). The freed blocks keep the given order, in one run before the head of the queue (no key) and
        one behind the tail (cached). Give a sequence's last block first: a block is of use to the cache
        only as long as all before it are there.

        Parameters
        ----------
        block_ids : array_like of int, shape [n]
        last : bool
            Put blocks without a key behind the tail too, for readers that still look at them.

        Raises
        ------
        InvalidBlockError
            An id lies outside the pool.
        DoubleFreeError
            An id occurs more often than its block is held. In both cases nothing is freed.
        """
        ids = as_block_ids(block_ids)
        place = references.release(*self._holding, ids, last)
        if place != references.OK:
            raise self._not_freeable(ids, place)

    def touch(self, block_ids: Any) -> None:
        """Add one reference per id, repeats counted; a free block leaves the queue, null ids are skipped.

        Parameters
        ----------
        block_ids : array_like of int, shape [n]

        Raises
        ------
        InvalidBlockError
            An id lies outside the pool; nothing is touched.
        """
        ids = as_block_ids(block_ids)
        place = references.share(self._arrays.records, self._arrays.counters, ids)
        if place != references.OK:
            raise self._outside(ids, place)

    def num_owners(self, block_id: int) -> int:
        """How many table cells hold the block; pins do not count.

        Raises
        ------
        ValueError
            The id lies outside the pool.
        """
        block_id = check_int("block_id", block_id, 0, self.num_blocks - 1)
        return self._arrays.records.item(block_id, REFS) - self._arrays.records.item(block_id, PINS)

    def copy_on_write(self, source: int, target: int) -> None:
        """Ask for a copy of a shared block and pass the caller's reference to `source` on to it.

        Both ends stay pinned until `take_copies`, so neither is reused before the copy is known. A source
        that is itself the target of a pending copy is replaced by where that one copies from: nothing was
        written to it yet, so the pending copies can run in any order, or all at once.

        Parameters
        ----------
        source : int
            A block that the caller shares with others.
        target : int
            A block that only the caller holds.

        Raises
        ------
        InvalidBlockError
            The source is not held, or the target not held exactly once and never read. Nothing is pinned.
        """
        if self.num_owners(source) < 1 or source == NULL_BLOCK_ID:
            raise InvalidBlockError(f"source must be held, got block {source}, which nobody holds")
        if self.ref_counts[check_int("target", target, 1, self.num_blocks - 1)] != 1 or source == target:
            raise InvalidBlockError(
                f"target must be held once, got block {target}, held {self.ref_counts[target]} times "
                "(allocate(1) gives one)"
            )
        root = self._copies.get(source, source)
        references.pin_copy(self._arrays.records, source, root, target)
        self._copies[target] = root

    def take_copies(self) -> IntArray:
        """Hand out the pending copies and unpin their blocks.

        The caller copies `target = source`, whole blocks in every layer, before anything that it enqueues
        later writes to the KV cache; on one stream, enqueueing the copies first is enough.

        Returns
        -------
        ndarray of int32, shape [n, 2]
            Pairs (source, target); no target is a source, and their order does not matter.
        """
        pairs = np.array([(s, t) for t, s in self._copies.items()], np.int32).reshape(-1, 2)
        self._copies.clear()
        references.unpin(*self._holding, pairs.ravel())
        return pairs

    def unpin(self, block_ids: Any) -> None:
        """Drop one pin per id, repeats counted; for who keeps a list of pending copies, as the manager does.

        Raises
        ------
        InvalidBlockError
            An id lies outside the pool, is not pinned so often, or belongs to a copy that `take_copies` has
            not handed out. Nothing is unpinned.
        """
        ids = as_block_ids(block_ids)
        waiting = {*self._copies, *self._copies.values()}
        early = np.flatnonzero(np.isin(ids, list(waiting))).tolist() if waiting else []
        if early:
            raise InvalidBlockError(
                f"block_ids[{early[0]}] must not be {ids[early[0]]}: take_copies unpins it"
            )
        place = references.unpin(*self._holding, ids)
        if place != references.OK:
            block = int(ids[place])
            if not NULL_BLOCK_ID <= block < self.num_blocks:
                raise self._outside(ids, place)
            times, pins = int(np.count_nonzero(ids[: place + 1] == block)), int(self.pin_counts[block])
            raise InvalidBlockError(
                f"block_ids[{place}] must be pinned: block {block} is pinned {pins} times, "
                f"got it {times} times"
            )

    def _column(self, column: int) -> IntArray:
        view = self._arrays.records[:, column]
        view.flags.writeable = False
        return view

    @property
    def _holding(self) -> tuple[IntArray, Counters, IntArray]:
        return self._arrays.records, self._arrays.counters, self._arrays.twins

    def _not_freeable(self, ids: IntArray, place: int) -> InvalidBlockError | DoubleFreeError:
        block = int(ids[place])
        if not NULL_BLOCK_ID <= block < self.num_blocks:
            return self._outside(ids, place)
        times, held = int(np.count_nonzero(ids[: place + 1] == block)), self.num_owners(block)
        return DoubleFreeError(
            f"block_ids[{place}] must be held: block {block} is held {held} times, got it {times} times "
            "(free each table's blocks once)"
        )
