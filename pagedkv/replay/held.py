"""Held blocks: how many positions they have room for, and how many of these are written."""

from typing import Any

from pagedkv.compiled import compiled
from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.layout import Layout
from pagedkv.replay.memory import BlockMemory

__all__ = ["HeldBlocks"]


class HeldBlocks:
    """Distinct positions in the blocks of the running batch, each shared block counted once.

    Parameters
    ----------
    layout : Layout
    batch : RunningBatch
    memory : BlockMemory
    """

    def __init__(self, layout: Layout, batch: RunningBatch, memory: BlockMemory) -> None:
        self._layout, self._batch, self._memory = layout, batch, memory
        self._sizes = layout.positions_per_block[:, 0]
        self._is_uniform = len(set(self._sizes.tolist())) == 1

    def num_positions(self) -> tuple[int, int]:
        """Return (written positions, positions with room), summed over groups; before the step is settled.

        A shared block is full, so the rows' positions exceed the distinct ones by whole blocks: by as many
        positions as their entries exceed the distinct blocks.
        """
        batch, room = self._batch, self._num_held_positions()
        first = self._layout.first_columns(batch.computed - batch.scheduled)
        entries = (self._memory.num_columns() - first).sum(axis=1)
        positions = batch.computed.sum() - first.sum(axis=1) * self._sizes
        return int((positions - entries * self._sizes).sum()) + room, room

    def _num_held_positions(self) -> int:
        memory = self._memory
        if self._is_uniform:  # it does not matter which group holds a block
            return int(self._sizes[0]) * (memory.num_blocks - 1 - memory.num_free)
        manager, rows = memory.manager, self._batch.row
        ref_counts = manager.pool.ref_counts
        room = 0
        for group, size in enumerate(self._sizes.tolist()):
            table, counts = manager.block_table(group), manager.num_blocks_held(group)
            room += size * round(_num_distinct(table, rows, counts, ref_counts))
        return room


@compiled
def _num_distinct(
    table: Any,  # int32 [max_num_reqs, width]
    rows: Any,  # int64 [num_reqs]
    counts: Any,  # int32 [max_num_reqs]
    ref_counts: Any,  # int32 [num_blocks], how often a block occurs in all rows
) -> float:
    """Count the distinct blocks of rows, each occurrence as its share of the block."""
    total = 0.0
    for row in rows:
        for block in table[row, : counts[row]]:
            if block != 0:
                total += 1.0 / max(ref_counts[block], 1)
    return total
