"""PrefixCache: which blocks can be found by the key of the prefix that ends in them."""

from typing import Any

import numpy as np

from pagedkv.allocation import publishing, references
from pagedkv.allocation.block_ids import as_block_ids
from pagedkv.allocation.block_records import NUM_CACHED, NUM_EVICTED, NUM_KEYS, PINS, REFS, UNCACHED, Keys
from pagedkv.allocation.events import AllBlocksCleared, Event, fetch_log, plain_events, room_for
from pagedkv.allocation.pool_state import PoolState
from pagedkv.checks import IntArray, as_ready, check_int, check_shape
from pagedkv.constants import NULL_BLOCK_ID
from pagedkv.errors import InvalidBlockError

__all__ = ["PrefixCache"]


class PrefixCache(PoolState):
    """The blocks of a pool and their keys; who holds the blocks is the business of `BlockPool`."""

    def longest_prefix(self, keys: Any, group: int = 0) -> IntArray:
        """Return the blocks of the leading keys that are all cached, oldest block first where several are.

        It neither pins nor touches: the blocks are good until the next call that allocates.

        Parameters
        ----------
        keys : array_like of uint64, shape [n, 2]
            Keys in chain order, as `BlockHasher` makes them; their last byte is ignored.
        group : int
            KV-cache group, 0 to 255; groups do not see each other's blocks.

        Returns
        -------
        ndarray of int32, shape [h], h <= n
        """
        wanted = self._as_keys(keys, group)
        return publishing.longest_prefix(self._arrays.keys, self._arrays.entries, wanted, group)

    def publish(self, block_ids: Any, keys: Any, group: int = 0, mask: Any = None) -> None:
        """Make held blocks reachable under their keys; call it when their content is there.

        Where a key is cached already, both blocks keep it, and the older one is found.

        Parameters
        ----------
        block_ids : array_like of int, shape [n]
            Blocks that are held; null ids are skipped.
        keys : array_like of uint64, shape [n, 2]
            Their keys.
        group : int
            KV-cache group, 0 to 255.
        mask : array_like of bool, shape [n], optional
            False skips a block.

        Raises
        ------
        InvalidBlockError
            An id lies outside the pool, is not held, or is cached under another key. Nothing is published.
        """
        ids, wanted = as_block_ids(block_ids), self._as_keys(keys, group)
        check_shape("keys", wanted, (ids.size, 2), "[len(block_ids), 2]")
        chosen = np.ones(ids.size, np.bool_) if mask is None else as_ready(np.asarray(mask, np.bool_))
        check_shape("mask", chosen, (ids.size,), "[len(block_ids)]")
        self._arrays = room_for(self._arrays, ids.size)
        place = publishing.publish(*self._arrays, ids, wanted, group, chosen)
        if place != references.OK:
            raise self._not_publishable(ids, place)

    def evict(self, block_ids: Any) -> int:
        """Take the keys of blocks; who holds them and where they stand in the queue stays as it is.

        Returns
        -------
        int
            How many of them had a key.

        Raises
        ------
        InvalidBlockError
            An id lies outside the pool; nothing is evicted.
        """
        ids = as_block_ids(block_ids)
        self._arrays = room_for(self._arrays, ids.size)
        place, num_evicted = publishing.evict_ids(*self._arrays, ids)
        if place != references.OK:
            raise self._outside(ids, place)
        return int(num_evicted)

    def reset_prefix_cache(self) -> bool:
        """Forget every key, if nobody holds a block; the order of the free queue stays.

        Returns
        -------
        bool
            False where a block is held: nothing has changed then.
        """
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        self._arrays.twins[:] = UNCACHED
        self._arrays.entries[:] = 0
        self._arrays.counters[[NUM_CACHED, NUM_KEYS, NUM_EVICTED]] = 0
        if len(self._arrays.log):
            self._events += [*plain_events(fetch_log(self._arrays)), AllBlocksCleared()]
        return True

    def is_writable(self, block_ids: Any) -> Any:
        """Whether each block has one holder and no key, so that tokens may be written into it.

        Returns
        -------
        ndarray of bool, shape [n]
            False for NULL.

        Raises
        ------
        InvalidBlockError
            An id lies outside the pool.
        """
        ids = as_block_ids(block_ids)
        outside = (ids < 0) | (ids >= self.num_blocks)
        if outside.any():
            raise self._outside(ids, int(outside.argmax()))
        records = self._arrays.records[ids]
        writable = (records[:, REFS] - records[:, PINS] == 1) & (ids != NULL_BLOCK_ID)
        return writable & (self._arrays.twins[ids, 0] == UNCACHED) if self.enable_prefix_caching else writable

    def is_writable_block(self, block_id: int) -> bool:
        """Whether one block of the pool has one holder and no key, and is not NULL; `is_writable` of many."""
        records, twins = self._arrays.records, self._arrays.twins
        if block_id == NULL_BLOCK_ID or records.item(block_id, REFS) - records.item(block_id, PINS) != 1:
            return False
        return not len(twins) or twins.item(block_id, 0) == UNCACHED

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order, and forget them; none where events are off."""
        events = self._events + plain_events(fetch_log(self._arrays))
        self._events = []
        return events

    def _as_keys(self, keys: Any, group: int) -> Keys:
        check_int("group", group, 0, 255)
        if not self.enable_prefix_caching:
            raise ValueError("the pool has no prefix cache (make it with enable_prefix_caching=True)")
        wanted = np.empty((0, 2), np.uint64)
        if np.size(keys):
            wanted = as_ready(np.ascontiguousarray(keys, np.uint64))
        check_shape("keys", wanted, (len(wanted), 2), "[n, 2]")
        return wanted

    def _outside(self, ids: IntArray, place: int) -> InvalidBlockError:
        limit = self.num_blocks - 1
        return InvalidBlockError(f"block_ids[{place}] must lie in [0, {limit}], got {ids[place]}")

    def _not_publishable(self, ids: IntArray, place: int) -> InvalidBlockError:
        block = int(ids[place])
        if not NULL_BLOCK_ID <= block < self.num_blocks:
            return self._outside(ids, place)
        if self._arrays.records[block, REFS] == 0:
            return InvalidBlockError(f"block_ids[{place}] must be held: block {block} is free")
        return InvalidBlockError(
            f"block_ids[{place}] must keep its key: block {block} is cached under another (evict it first)"
        )
