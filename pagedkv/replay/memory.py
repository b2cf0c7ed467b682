"""BlockMemory: which blocks the running sequences hold; the one place where the replay allocates.

The engine asks here what fits, for new blocks, for shared prefixes and for frees. The list of blocks of a
sequence is the tables' own mirror: what goes wrong in a row also goes wrong in what is freed, and the
pool says so.
"""

from collections.abc import Sequence

import numpy as np

from pagedkv.allocation import BlockPool
from pagedkv.checks import IntArray
from pagedkv.mirror import HostMirror
from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.layout import Layout
from pagedkv.replay.prefixes import LivePrefixes
from pagedkv.replay.requests import Int64Array, Requests
from pagedkv.replay.row_changes import NulledColumns, SharedPrefix

__all__ = ["BlockMemory"]

_NO_BLOCKS = np.empty(0, np.int32)


class BlockMemory:
    """Blocks of the running batch, over one pool that all groups share.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool, the null block included.
    layout : Layout
    mirror : HostMirror
        Read only: where the rows' block ids are found.
    batch : RunningBatch
    requests : Requests

    Attributes
    ----------
    num_held : ndarray of int64, shape [num_groups]
        Distinct blocks held.
    """

    def __init__(
        self, num_blocks: int, layout: Layout, mirror: HostMirror, batch: RunningBatch, requests: Requests
    ) -> None:
        max_num_reqs = mirror.max_num_reqs
        self._pool = BlockPool(num_blocks)
        self._layout, self._mirror, self._batch = layout, mirror, batch
        self._hashed_lens = requests.hashed_lens
        self._prefixes = LivePrefixes(requests)
        self._columns = np.zeros((layout.num_groups, max_num_reqs), np.int64)  # live columns of each row
        self._first = np.zeros_like(self._columns)  # of these, leading ones that are NULL
        self._tables = [mirror.block_table(g) for g in range(layout.num_groups)]
        self.num_held = np.zeros(layout.num_groups, np.int64)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return self._pool.num_free_blocks

    def growth(self) -> Int64Array:
        """Columns that the scheduled tokens add to each row, int64 [num_groups, num_reqs]."""
        batch = self._batch
        needed = self._layout.num_columns(batch.computed + batch.scheduled)
        growth: Int64Array = np.maximum(needed - self.num_columns(), 0)
        return growth

    def num_promised(self) -> int:
        """Blocks that the rows will need until all that they know is computed, beyond what they hold."""
        peak = self._layout.peak_blocks(self._batch.known)
        held = (self._columns - self._first)[:, : self._batch.num_reqs]
        return int(np.maximum(peak - held, 0).sum())

    def num_needed(self, known: int, shared: int) -> int:
        """Blocks that a sequence of `known` tokens takes beyond a prefix of `shared` tokens."""
        peak = self._layout.peak_blocks(np.array([known]))
        taken = np.where(self._layout.windows > known, shared // self._layout.positions_per_block, 0)
        return int((peak - taken).sum())

    def longest_prefix(self, request: int, known: int) -> tuple[int, int]:
        """Return (tokens, row of the holder) of the longest prefix that a running sequence can share.

        Whole blocks in every group, already computed, at most ``known - 1`` tokens, all of them prompt.
        """
        most = min(known - 1, int(self._hashed_lens[request]))
        unit = self._layout.share_unit

        def usable(holders: Int64Array, common: int) -> Int64Array:
            rows = self._batch.row_of[holders]
            computed = np.minimum(self._batch.computed[rows], self._hashed_lens[holders])
            tokens = np.minimum(computed, min(common, most)) // unit * unit
            is_held = (self._first[:, rows] <= self._layout.first_columns(tokens)).all(axis=0)
            return np.where(is_held, tokens, 0)

        if most < unit:
            return 0, -1
        tokens, holder = self._prefixes.longest(request, usable)
        return tokens, int(self._batch.row_of[holder]) if holder >= 0 else -1

    def share(self, prefixes: Sequence[SharedPrefix]) -> tuple[Int64Array, IntArray]:
        """Hold the blocks of shared prefixes once more.

        Returns
        -------
        counts : ndarray of int64, shape [num_groups, len(prefixes)]
        block_ids : ndarray of int32
            The rows' new leading blocks, flat over groups, then prefixes; NULL below a window.
        """
        tokens = np.array([prefix.tokens for prefix in prefixes], np.int64)
        rows = np.array([prefix.row for prefix in prefixes], np.int64)
        counts = self._layout.num_columns(tokens)
        first = self._layout.first_columns(tokens)
        pieces = []
        for group, table in enumerate(self._tables):
            for place, prefix in enumerate(prefixes):
                ids = table[prefix.holder_row, : counts[group, place]].copy()
                ids[: first[group, place]] = 0
                pieces.append(ids)
        self._columns[:, rows], self._first[:, rows] = counts, first
        block_ids = np.concatenate(pieces)
        self._pool.touch(block_ids)
        return counts, block_ids

    def admit(self, rows: Sequence[int]) -> None:
        """Let later requests find the prefixes of the sequences in these rows."""
        for row in rows:
            self._prefixes.add(int(self._batch.request[row]))

    def allocate(self, growth: Int64Array) -> IntArray:
        """Take the blocks for `growth` [num_groups, num_reqs], ids flat over groups, then rows."""
        per_group = growth.sum(axis=1)
        block_ids = self._pool.allocate(int(per_group.sum()))
        self.num_held += per_group
        self._columns[:, : growth.shape[1]] += growth
        return block_ids

    def release(self, rows: Int64Array) -> None:
        """Give back all blocks of rows, each row's last block first; the rows are empty then."""
        for request in self._batch.request[rows].tolist():
            self._prefixes.remove(request)
        for group, table in enumerate(self._tables):
            ends, starts = self._columns[group, rows], self._first[group, rows]
            pieces = [table[row, start:end][::-1] for row, start, end in zip(rows, starts, ends, strict=True)]
            self._free(group, pieces)
        self._columns[:, rows] = self._first[:, rows] = 0

    def slide(self) -> list[NulledColumns]:
        """Free the blocks that fell out of a window and return their columns, which become NULL."""
        if not self._layout.has_windows:
            return []
        first = self._layout.first_columns(self._batch.computed)
        nulled = []
        for group in np.flatnonzero((first > self._first[:, : self._batch.num_reqs]).any(axis=1)).tolist():
            old = self._first[group, : self._batch.num_reqs]
            rows = np.flatnonzero(first[group] > old)
            starts, ends = old[rows], first[group, rows]
            table = self._tables[group]
            pieces = [table[row, start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
            self._free(group, pieces)
            old[rows] = ends
            nulled.append(NulledColumns(group, rows, starts, ends))
        return nulled

    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Follow rows that moved."""
        for state in (self._columns, self._first):
            state[:, targets] = state[:, sources]
            state[:, sources] = 0

    def num_columns(self) -> Int64Array:
        """Live columns of each row, int64 [num_groups, num_reqs]."""
        return self._columns[:, : self._batch.num_reqs]

    def num_distinct_positions(self) -> int:
        """Written positions in the held blocks, each block counted once, summed over groups.

        A shared block is full, so the rows' positions exceed the distinct ones by whole blocks: as many
        as the rows hold entries beyond the distinct blocks.
        """
        size = self._layout.positions_per_block[:, 0]
        first = self._first[:, : self._batch.num_reqs]
        held_entries = (self.num_columns() - first).sum(axis=1)
        positions = self._batch.computed.sum() - first.sum(axis=1) * size
        return int((positions - (held_entries - self.num_held) * size).sum())

    def num_held_positions(self) -> int:
        """Positions that the held blocks have room for, summed over groups."""
        return int((self.num_held * self._layout.positions_per_block[:, 0]).sum())

    def _free(self, group: int, pieces: list[IntArray]) -> None:
        before = self.num_free
        self._pool.free(np.concatenate(pieces) if pieces else _NO_BLOCKS)
        self.num_held[group] -= self.num_free - before
