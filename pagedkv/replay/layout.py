"""Layout: how many blocks a sequence takes in each KV-cache group, for many sequences at once."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from pagedkv.constants import MAX_INT32
from pagedkv.replay.requests import Int64Array
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

__all__ = ["Layout"]


class Layout:
    """Block arithmetic of the groups under one context-parallel world.

    Parameters
    ----------
    specs : sequence of KVCacheGroupSpec
    context_parallel : ContextParallel
        Its rank does not matter here.
    max_num_batched_tokens : int
        Most tokens that one step adds to a sequence.

    Attributes
    ----------
    positions_per_block : ndarray of int64, shape [num_groups, 1]
        Positions that one table column stands for: block size, times the world where it is sharded.
    specs : tuple of KVCacheGroupSpec
        The groups; window groups are never sharded, as the manager has it.
    alignment : int
        Prefix hits are multiples of it, in tokens: whole blocks in every group.
    windows : ndarray of int64, shape [num_groups, 1]
        Sliding window in tokens; past any length where there is none.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheGroupSpec],
        context_parallel: ContextParallel,
        max_num_batched_tokens: int,
    ) -> None:
        self.specs = tuple(_as_managed(spec) for spec in specs)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.context_parallel = context_parallel
        self.worlds = [spec.shard(context_parallel).world_size for spec in self.specs]
        positions = [spec.block_size * world for spec, world in zip(self.specs, self.worlds, strict=True)]
        self.positions_per_block = np.array(positions, np.int64).reshape(-1, 1)
        self.windows = np.array([spec.sliding_window or MAX_INT32 for spec in specs], np.int64).reshape(-1, 1)
        self.has_windows = any(spec.sliding_window for spec in specs)
        self.alignment = lcm(*positions)
        in_flight = -(-(self.windows - 1 + max_num_batched_tokens) // self.positions_per_block) + 1
        self._most_blocks = np.where(self.windows < MAX_INT32, in_flight, MAX_INT32)

    @property
    def num_groups(self) -> int:
        """KV-cache groups."""
        return len(self.specs)

    def num_columns(self, lengths: Int64Array) -> Int64Array:
        """Table columns that sequences of `lengths` tokens [n] reach, int64 [num_groups, n]."""
        columns: Int64Array = -(-lengths // self.positions_per_block)
        return columns

    def first_positions(self, computed: Int64Array) -> Int64Array:
        """First position that the next token still attends to, int64 [num_groups, n].

        A token at position q attends to ``q - window < p <= q``; the next one is at q = computed.
        """
        first: Int64Array = np.maximum(computed - self.windows + 1, 0)
        return first

    def first_columns(self, computed: Int64Array) -> Int64Array:
        """First column that is still needed, int64 [num_groups, n]; those before lie below the window."""
        columns: Int64Array = self.first_positions(computed) // self.positions_per_block
        return columns

    def peak_blocks(self, lengths: Int64Array) -> Int64Array:
        """Most blocks held at once while `lengths` tokens [n] are computed, int64 [num_groups, n]."""
        return np.minimum(self.num_columns(lengths), self._most_blocks)


def _as_managed(spec: KVCacheGroupSpec) -> KVCacheGroupSpec:
    return replace(spec, cp_sharded=spec.cp_sharded and spec.sliding_window is None)
