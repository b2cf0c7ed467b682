"""RankTables: the block tables of every context-parallel rank, all committing one mirror."""

from dataclasses import replace
from typing import Any

import numpy as np

from pagedkv.replay.host_step import HostStep
from pagedkv.replay.layout import Layout
from pagedkv.tables.multi_group import MultiGroupBlockTable

__all__ = ["RankTables"]


class RankTables:
    """One `MultiGroupBlockTable` per rank, with stable rows; the manager writes the first one's mirror.

    Parameters
    ----------
    layout : Layout
    max_num_reqs, max_model_len, max_num_batched_tokens : int
        Limits of the tables.
    backend : str
    """

    def __init__(
        self, layout: Layout, max_num_reqs: int, max_model_len: int, max_num_batched_tokens: int, backend: str
    ) -> None:
        self.tables: list[MultiGroupBlockTable] = []
        for rank in range(layout.context_parallel.world_size):
            table = MultiGroupBlockTable(
                layout.specs,
                max_num_reqs,
                max_model_len,
                max_num_batched_tokens,
                context_parallel=replace(layout.context_parallel, rank=rank),
                stable_rows=True,
                backend=backend,
                mirror=self.tables[0].mirror if self.tables else None,
            )
            self.tables.append(table)
        self.mirror = self.tables[0].mirror
        self._row_bytes: int = 4 * sum(self.mirror.widths)

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return str(self.tables[0].backend)

    def commit(self, query_start_loc: Any, num_computed_tokens: Any, rows: Any) -> list[HostStep]:
        """Commit on every rank, `rows` in batch order; returns their steps."""
        num_reqs = len(num_computed_tokens)
        steps = [
            table.commit(num_reqs, query_start_loc, num_computed_tokens, rows=rows) for table in self.tables
        ]
        return [HostStep(step) for step in steps]

    def transfers(self) -> Any:
        """Copies and bytes sent to the device so far by each rank, int64 [2, world_size]."""
        return np.array([[t.num_h2d_copies for t in self.tables], [t.num_h2d_bytes for t in self.tables]])

    def full_upload_bytes(self, num_reqs: int) -> int:
        """Bytes that sending the batch's rows whole would take, all groups."""
        return num_reqs * self._row_bytes
