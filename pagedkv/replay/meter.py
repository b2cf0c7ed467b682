"""Meter: utilisation and transfers of a step, beside what the plain ways would take."""

import numpy as np

from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.held import HeldBlocks
from pagedkv.replay.layout import Layout
from pagedkv.replay.memory import BlockMemory
from pagedkv.replay.ranks import RankTables

__all__ = ["Meter"]


class Meter:
    """Reads a step's figures once its tokens are written and before sequences leave.

    Parameters
    ----------
    layout : Layout
    batch : RunningBatch
    memory : BlockMemory
    tables : RankTables
    max_model_len : int
        What a table that reserves would reserve for each sequence.
    """

    def __init__(
        self, layout: Layout, batch: RunningBatch, memory: BlockMemory, tables: RankTables, max_model_len: int
    ) -> None:
        self._layout, self._batch, self._tables = layout, batch, tables
        self._held = HeldBlocks(layout, batch, memory)
        self._max_model_len = max_model_len
        self._transfers = tables.transfers()

    def read(self) -> dict[str, float]:
        """Return the values for `StepLog.record`."""
        return self._utilization() | self._sent()

    def _utilization(self) -> dict[str, float]:
        num_reqs, num_groups = self._batch.num_reqs, self._layout.num_groups
        written, room = self._held.num_positions()
        rounded = np.exp2(np.ceil(np.log2(self._batch.computed))).sum()
        return {
            "num_reqs": num_reqs,
            "utilization": written / room,
            "utilization_reserved": written / (num_groups * num_reqs * self._max_model_len),
            "utilization_pow2": written / (num_groups * float(rounded)),
        }

    def _sent(self) -> dict[str, float]:
        transfers = self._tables.transfers()
        copies, num_bytes = transfers - self._transfers
        self._transfers = transfers
        return {
            "h2d_copies": int(copies.max()),
            "h2d_bytes": float(num_bytes.mean()),
            "full_upload_bytes": self._tables.full_upload_bytes(self._batch.num_reqs),
        }
