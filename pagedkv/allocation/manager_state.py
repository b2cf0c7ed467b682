"""What a manager is made of: pool, mirror, token store and the arrays that compiled calls take."""

from collections.abc import Sequence
from itertools import count
from math import gcd, lcm
from typing import Any

import numpy as np

from pagedkv.allocation import group_rules, growth
from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.block_pool import BlockPool
from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.group_specs import FullAttentionSpec, GroupSpec
from pagedkv.allocation.hashing import BlockHasher
from pagedkv.allocation.token_store import TokenStore
from pagedkv.allocation.unpacking import pack
from pagedkv.checks import IntArray
from pagedkv.mirror import HostMirror
from pagedkv.specs import ContextParallel

__all__ = ["ManagerState"]

_NO_EXTRAS = np.empty((0, 2), np.uint64)
_MANAGERS = count(1)
_RECENT = 1000
"""Sequences over which the recent hit rate is taken."""


class ManagerState:
    """The arrays of a manager, and how they grow."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pool: BlockPool,
        hasher: BlockHasher | None,
        mirror: HostMirror,
        limits: Sequence[int],
        world: ContextParallel,
    ) -> None:
        self.pool = pool
        self.hasher = hasher
        self.mirror = mirror
        self.store = TokenStore(0 if hasher is None else hasher.block_size)
        self.extra_keys: dict[int, ExtraKeys] = {}
        self._generation = (
            next(_MANAGERS) * 0x5851F42D % 0x7FFFFFFF + 1
        )  # far apart: no handle is two managers'
        self._places: list[int] = []
        num_rows = mirror.max_num_reqs
        self.arrays = s.ManagerArrays(
            groups=_group_rows(groups, world, self.store.page_size),
            sequences=np.zeros((0, s.NUM_COLUMNS), np.int32),
            cursors=np.zeros((0, len(groups), 2), np.int32),
            tokens=self.store.tokens,
            keys=self.store.keys,
            extras=np.zeros((0, 4), np.uint64),
            rows=np.array([num_rows, *range(num_rows - 1, -1, -1)], np.int32),
            copies=np.zeros((64, 2), np.int32),
            limits=np.array(limits, np.int64),
            recent=np.zeros((_RECENT, 2), np.int64),
            batch_handles=np.empty(0, np.int64),
            batch_places=np.empty(0, np.int32),
            totals=np.zeros(s.NUM_TOTALS, np.int64),
        )
        self.grow_sequences(64)

    def compiled_state(self) -> Any:
        """Return what compiled calls take; made anew where an array was replaced."""
        pool, mirror, own = self._sources
        if pool is not self.pool.arrays or mirror is not self.mirror.state or own is not self.arrays:
            self._sources = (self.pool.arrays, self.mirror.state, self.arrays)
            self._compiled = pack(*self._sources)
        return self._compiled

    _sources: tuple[Any, Any, Any] = (None, None, None)
    _compiled: Any = None

    def replace(self, **arrays: Any) -> None:
        """Replace arrays of the manager."""
        self.arrays = self.arrays._replace(**arrays)

    def grow_sequences(self, num: int) -> None:
        """Make room for `num` more sequences."""
        old = len(self.arrays.sequences)
        sequences, cursors, extras = (
            np.concatenate([array, np.zeros((num, *array.shape[1:]), array.dtype)])
            for array in (self.arrays.sequences, self.arrays.cursors, self.arrays.extras)
        )
        sequences[old:, s.GENERATION] = self._generation
        self._places += range(old + num - 1, old - 1, -1)
        self.replace(
            sequences=sequences,
            cursors=cursors,
            extras=extras,
            batch_handles=np.empty(old + num, np.int64),
            batch_places=np.empty(old + num, np.int32),
        )
        self.arrays.totals[s.BATCH_SIZE] = -1

    def grow_copies(self, num: int) -> None:
        """Make room for `num` more pending copies."""
        used = int(self.arrays.totals[s.NUM_COPIES])
        if used + num > len(self.arrays.copies):
            copies = np.zeros((2 * (used + num), 2), np.int32)
            copies[:used] = self.arrays.copies[:used]
            self.replace(copies=copies)

    def sync_store(self) -> None:
        """Take the store's arrays over where it has grown."""
        if self.arrays.tokens is not self.store.tokens:
            self.replace(tokens=self.store.tokens, keys=self.store.keys)

    def open_place(self, num_encoder_tokens: int = 0) -> int:
        """Take a place for a new sequence; nothing of the one before is left there."""
        if not self._places:
            self.grow_sequences(len(self.arrays.sequences))
        at = self._places.pop()
        growth.open_line(
            self.arrays.sequences, self.arrays.cursors, self.arrays.extras, at, num_encoder_tokens
        )
        self.arrays.totals[s.NUM_SEQUENCES] += 1
        return at

    def close_place(self, at: int) -> None:
        """Give a place back; the sequence there has ended."""
        self.store.take_back(self.arrays.sequences[at])
        self.extra_keys.pop(at, None)
        self._places.append(at)

    def handle(self, at: int) -> int:
        """Return the handle of the sequence at a place."""
        return int(self.arrays.sequences[at, s.GENERATION]) << 32 | at

    def write_tokens(self, at: int, tokens: IntArray, extra_keys: ExtraKeys | None) -> None:
        """Write and hash the first tokens of a new sequence."""
        line = self.arrays.sequences[at]
        if self.hasher is None:
            line[s.NUM_TOKENS] = tokens.size
            return
        self.store.give(line, tokens.size)
        self.sync_store()
        extras, size = _NO_EXTRAS, self.store.page_size
        if extra_keys is not None:
            self.extra_keys[at] = extra_keys
            extras = extra_keys.digests(0, tokens.size // size, size)
            self.set_later_extras(at, tokens.size // size)
        hasher = self.hasher
        growth.hash_new(self.compiled_state(), at, tokens, hasher.secret, hasher.start, extras)

    def share_tokens(self, at: int, child: int) -> None:
        """Copy a sequence's tokens, keys and extras to a new one."""
        sequences = self.arrays.sequences
        source, target = sequences[at], sequences[child]
        for column in (s.NUM_TOKENS, s.NUM_HASHED, s.HASHED_AT_ADD, s.NUM_ENCODER):
            target[column] = source[column]
        self.arrays.extras[child] = self.arrays.extras[at]
        if at in self.extra_keys:
            self.extra_keys[child] = self.extra_keys[at]
        if self.hasher is not None:
            self.store.give(target, int(source[s.NUM_TOKENS]))
            num_pages = min(int(source[s.NUM_PAGES]), int(target[s.NUM_PAGES]))
            self.store.copy(int(source[s.EXTENT]), int(target[s.EXTENT]), num_pages)
            self.sync_store()

    def cut_extras(self, at: int, num_tokens: int) -> None:
        """Forget the extras of tokens that a truncation took away."""
        size = self.store.page_size
        if at in self.extra_keys:
            self.extra_keys[at] = self.extra_keys[at].clipped(num_tokens)
        if size and num_tokens // size <= self.arrays.sequences[at, s.HASHED_AT_ADD]:
            self.set_later_extras(at, num_tokens // size)

    def set_later_extras(self, at: int, block: int) -> None:
        """Note what extras the block at the end of the sequence has, and those after it."""
        keys, size = self.extra_keys.get(at), self.store.page_size
        if keys is not None:
            self.arrays.extras[at, :2] = keys.digests(block, 1, size)[0]
            self.arrays.extras[at, 2:] = ExtraKeys(adapter=keys.adapter).digests(block + 1, 1, size)[0]
        self.arrays.sequences[at, s.HASHED_AT_ADD] = block


def _group_rows(groups: Sequence[GroupSpec], world: ContextParallel, page_size: int) -> Any:
    rows = np.zeros((len(groups), group_rules.NUM_COLUMNS), np.int64)
    for row, group in zip(rows, groups, strict=True):
        sharded = isinstance(group, FullAttentionSpec) and group.cp_sharded
        kind, span, spare = group.rule()
        num_ranks = world.world_size if sharded else 1
        size = group.block_size * num_ranks
        cached = page_size and kind != group_rules.ENCODER_ONLY
        row[:5] = kind, size, span, spare, size // page_size if cached else 0
        row[5:] = num_ranks, world.rank if sharded else 0, world.interleave if sharded else 1
    return rows


def block_sizes(groups: Sequence[GroupSpec], world_size: int) -> tuple[int, int]:
    """Return the hash block (greatest common divisor) and the hits' alignment (least common multiple)."""
    rows = _group_rows(groups, ContextParallel(world_size), 0)
    sizes = [int(row[group_rules.BLOCK_SIZE]) for row in rows if row[group_rules.KIND] < group_rules.STATE]
    sizes += [
        int(row[group_rules.BLOCK_SIZE]) for row in rows if row[group_rules.KIND] == group_rules.STATE_ALIGNED
    ]
    return (gcd(*sizes), lcm(*sizes)) if sizes else (1, 1)
