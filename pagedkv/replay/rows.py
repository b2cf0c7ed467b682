"""RowKeeper: batch, memory and table rows, always changed together."""

from collections.abc import Sequence

import numpy as np

from pagedkv.checks import IntArray
from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.memory import BlockMemory
from pagedkv.replay.requests import Int64Array
from pagedkv.replay.row_changes import SharedPrefix
from pagedkv.replay.step_log import StepLog
from pagedkv.tables.multi_group import MultiGroupBlockTable

__all__ = ["RowKeeper"]


class RowKeeper:
    """Gives blocks to rows and takes them away, each change in one call for all rows of the step.

    Parameters
    ----------
    batch : RunningBatch
    memory : BlockMemory
    table : MultiGroupBlockTable
        The one whose mirror takes the row operations.
        It is handed contiguous int32 arrays, which it takes as they are.
    log : StepLog
        Its stopwatch: pool calls are "allocate", row operations "rows".
    """

    def __init__(
        self, batch: RunningBatch, memory: BlockMemory, table: MultiGroupBlockTable, log: StepLog
    ) -> None:
        self._batch, self._memory, self._table, self._log = batch, memory, table, log

    def grow(self, admitted: Sequence[SharedPrefix]) -> IntArray:
        """Give every row the blocks of its scheduled tokens; returns the ids, int32 [n]."""
        self._share([prefix for prefix in admitted if prefix.tokens])
        self._memory.admit([prefix.row for prefix in admitted])
        growth = self._memory.growth()
        block_ids = self._memory.allocate(growth)
        self._log.lap("allocate")
        if len(block_ids):
            grown = np.flatnonzero(growth.any(axis=0)).astype(np.int32)
            self._table.append_rows(grown, _as_int32(growth[:, grown]), block_ids)
            self._log.lap("rows")
        return block_ids

    def _share(self, prefixes: Sequence[SharedPrefix]) -> None:
        if not prefixes:
            return
        counts, block_ids = self._memory.share(prefixes)
        self._log.lap("allocate")
        rows = np.array([prefix.row for prefix in prefixes], np.int32)
        self._table.add_rows(rows, _as_int32(counts), block_ids)
        self._log.lap("rows")

    def remove(self, removed: Int64Array) -> None:
        """Free the blocks of rows, clear them, and move the last rows into the holes."""
        self._memory.release(removed)
        sources, targets = self._batch.remove(removed)
        self._memory.move(sources, targets)
        self._log.lap("allocate")
        self._table.clear_rows(removed)
        if len(sources):
            self._table.move_rows(sources, targets)
        self._log.lap("rows")

    def slide(self) -> None:
        """Free what fell out of sliding windows; its columns become NULL."""
        for nulled in self._memory.slide():
            self._log.lap("allocate")
            self._table.null_columns(nulled.rows, nulled.starts, nulled.ends, group=nulled.group)
            self._log.lap("rows")


def _as_int32(counts: Int64Array) -> IntArray:
    return np.ascontiguousarray(counts, dtype=np.int32)  # indexing columns leaves Fortran order behind
