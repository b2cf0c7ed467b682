"""What changed in the prefix index, for whoever keeps a copy of it (a router, another cache tier)."""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pagedkv.allocation.block_records import NUM_LOGGED, Keys, PoolArrays
from pagedkv.allocation.prefix_index import REMOVED
from pagedkv.checks import IntArray

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "fetch_log",
    "key_bytes",
    "plain_events",
    "room_for",
]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Keys that were not cached before; further blocks with a cached key are no event.

    Attributes
    ----------
    block_hashes : tuple of bytes
        Keys in chain order, 16 bytes each.
    group : int
        KV-cache group.
    parent_block_hash : bytes or None
        Key of the block before the first, where it is known.
    token_ids : ndarray of int32, shape [len(block_hashes) * block_size]
        The blocks' tokens; empty where the pool alone was used, which does not know them.
    block_size : int or None
        Tokens a block, where it is known.
    """

    block_hashes: tuple[bytes, ...]
    group: int
    parent_block_hash: bytes | None = None
    token_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32), compare=False)
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A key that is not cached any more: its last block was handed out or evicted."""

    block_hash: bytes
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No key is cached any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def key_bytes(k0: int, k1: int) -> tuple[bytes, int]:
    """Split a key with its group: the 16 bytes of the hash, and the group."""
    group = int(k1) & 0xFF
    return int(k0).to_bytes(8, "little") + (int(k1) - group).to_bytes(8, "little"), group


def room_for(arrays: PoolArrays, num_events: int) -> PoolArrays:
    """Return the arrays with a log that takes so many events more; as they are where events are off."""
    log, used = arrays.log, int(arrays.counters[NUM_LOGGED])
    if len(log) == 0 or used + num_events <= len(log):
        return arrays
    grown = np.zeros((max(used + num_events, 2 * len(log)), 4), np.uint64)
    grown[:used] = log[:used]
    return arrays._replace(log=grown)


def fetch_log(arrays: PoolArrays) -> Keys:
    """Take the logged rows (kind, key, tag) out, uint64 [n, 4]."""
    rows = arrays.log[: arrays.counters[NUM_LOGGED]].copy()
    arrays.counters[NUM_LOGGED] = 0
    return rows


def plain_events(rows: Keys) -> list[Event]:
    """Turn logged rows into events without tokens."""
    return [_plain_event(kind, *key_bytes(k0, k1)) for kind, k0, k1, _ in rows.tolist()]


def _plain_event(kind: int, block_hash: bytes, group: int) -> Event:
    return BlockRemoved(block_hash, group) if kind == REMOVED else BlockStored((block_hash,), group)
