"""ContentOracle: a simulated KV cache that is written through slot mappings and read through block tables."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from pagedkv.checks import IntArray
from pagedkv.replay.contents import Contents
from pagedkv.replay.findings import Findings
from pagedkv.replay.host_step import HostStep
from pagedkv.replay.kernel_views import num_wrong_entries
from pagedkv.replay.layout import Layout
from pagedkv.replay.requests import Int64Array
from pagedkv.replay.tags import EMPTY, read_back, write_through_slots

__all__ = ["ContentOracle"]


class ContentOracle:
    """Writes every scheduled token's tag where the step says, and reads live positions back.

    One array per rank stands for the KV cache of all groups, block by block: a block that two groups or
    two sequences were both given shows as a wrong tag.

    Parameters
    ----------
    layout : Layout
    contents : Contents
    num_blocks : int
    findings : Findings
        Where mismatches are counted.
    num_samples : int
        Positions read back in each group at every step.
    seed : int
    """

    def __init__(
        self,
        layout: Layout,
        contents: Contents,
        num_blocks: int,
        findings: Findings,
        num_samples: int,
        seed: int,
    ) -> None:
        self._layout, self._contents, self._findings = layout, contents, findings
        self._num_samples, self._rng = num_samples, np.random.default_rng(seed)
        self._world = layout.context_parallel.world_size
        self._stride = max(spec.block_size for spec in layout.specs)
        # zeros are EMPTY, and take no memory before they are touched
        self._kv = np.zeros((self._world, num_blocks, self._stride), np.int64)

    def forget(self, block_ids: IntArray) -> None:
        """Empty blocks that were just handed out, whatever they held before."""
        self._kv[:, block_ids] = EMPTY

    def write(
        self, steps: list[HostStep], requests: Int64Array, computed: Int64Array, scheduled: Int64Array
    ) -> None:
        """Write the step's tokens, and check its positions, lengths and owners."""
        positions, tags = self._contents.runs(requests, computed, scheduled)
        for step in steps:
            self._findings.compare("seq_lens", computed + scheduled, step.seq_lens)
            self._findings.compare("positions", positions, step.positions[: len(positions)])
        for group, world in enumerate(self._layout.worlds):
            owners = np.zeros(len(tags), np.int32)
            for rank, step in enumerate(steps):
                slots = step.slot_mapping(group)[: len(tags)]
                size, kv = self._layout.specs[group].block_size, self._kv[rank].reshape(-1)
                write_through_slots(
                    kv, slots, tags, owners, size, self._stride, self._contents.num_groups, group
                )
            self._check_owners(group, owners, 1 if world == self._world else self._world, requests, scheduled)

    def sample(
        self, steps: list[HostStep], requests: Int64Array, computed: Int64Array, scheduled: Int64Array
    ) -> None:
        """Read random positions that the rows' last scheduled tokens attend to, in every group.

        `computed` counts this step's tokens. A row without any this step is not sampled: its window may
        have left its last token behind.
        """
        active = np.flatnonzero(scheduled)
        rows = active[self._rng.integers(0, len(active), self._num_samples)]
        where = self._rng.random(self._num_samples)
        first = self._layout.first_positions(computed[rows] - 1)
        ones = np.ones_like(rows)
        for group in range(self._layout.num_groups):
            starts = first[group] + (where * (computed[rows] - first[group])).astype(np.int64)
            positions, tags = self._contents.runs(requests[rows], starts, ones)
            columns = positions // self._layout.positions_per_block[group, 0]
            for rank, step in enumerate(steps):
                block_ids = step.block_table(group)[rows, columns]
                self._read(group, rank, requests[rows], rows, block_ids, positions, tags)
                self._check_views(step, group, rows, columns, block_ids)

    def check_rows(
        self,
        steps: list[HostStep],
        rows: Iterable[int],
        requests: Int64Array,
        computed: Int64Array,
        num_columns: Int64Array,
    ) -> None:
        """Read back all live positions of sequences, in a window group those inside the window.

        Parameters
        ----------
        steps : list of HostStep
            The last commit's step on every rank.
        rows : iterable of int
            Rows of the sequences in that step.
        requests, computed : ndarray of int64, shape [n]
            The sequences and the tokens in their cache.
        num_columns : ndarray of int64, shape [num_groups, n]
            Columns that are live; all further ones must be NULL.
        """
        first = self._layout.first_positions(computed)
        for i, row in enumerate(rows):
            for group in range(self._layout.num_groups):
                for rank, step in enumerate(steps):
                    table_row = step.block_table(group)[row]
                    self._check_row(
                        group, rank, row, requests[i : i + 1], first[group, i], computed[i], table_row
                    )
                    self._findings.expect_null(table_row[num_columns[group, i] :], group, rank, row)
                    self._check_view_row(step, group, row, table_row)

    def _check_row(
        self, group: int, rank: int, row: int, request: Int64Array, start: Any, end: Any, table_row: IntArray
    ) -> None:
        positions, tags = self._contents.runs(request, np.array([start]), np.array([end - start]))
        block_ids = table_row[positions // self._layout.positions_per_block[group, 0]]
        self._read(group, rank, request, np.array([row]), block_ids, positions, tags)

    def _read(
        self,
        group: int,
        rank: int,
        requests: Int64Array,
        rows: Int64Array,
        block_ids: IntArray,
        positions: Int64Array,
        tags: Int64Array,
    ) -> None:
        world, num_groups = self._layout.worlds[group], self._contents.num_groups
        found = np.empty_like(tags)
        num_read, num_wrong, i = read_back(
            self._kv[rank].reshape(-1),
            block_ids,
            positions,
            tags,
            found,
            self._layout.specs[group].block_size,
            self._stride,
            world,
            self._layout.context_parallel.interleave if world > 1 else 1,
            rank if world > 1 else 0,
            num_groups,
            group,
        )
        self._findings.num_verified += num_read
        if num_wrong:
            expected = self._contents.describe(int(tags[i]) * num_groups + group)
            actual = self._contents.describe(int(found[i]))
            self._findings.add(
                num_wrong,
                f"row {rows[i % len(rows)]} (request {requests[i % len(requests)]}), group {group}, "
                f"rank {rank}, block {block_ids[i]}: expected {expected}, found {actual}",
            )

    def _check_owners(
        self, group: int, owners: Any, expected: int, requests: Int64Array, scheduled: Int64Array
    ) -> None:
        wrong = np.flatnonzero(owners != expected)
        if len(wrong):
            row = int(np.searchsorted(np.cumsum(scheduled), wrong[0], side="right"))
            self._findings.add(
                len(wrong),
                f"row {row} (request {requests[row]}), group {group}: token {wrong[0]} of the step is owned "
                f"by {owners[wrong[0]]} ranks, expected {expected}",
            )

    def _check_views(self, step: HostStep, group: int, rows: Any, columns: Any, block_ids: IntArray) -> None:
        for view, (ratio, stride) in enumerate(self._layout.specs[group].views()):
            entries = (columns * ratio)[:, None] + np.arange(ratio)
            found = step.kernel_block_table(group, view)[rows[:, None], entries]
            self._findings.count_views(num_wrong_entries(block_ids, found, stride), group, view)

    def _check_view_row(self, step: HostStep, group: int, row: int, table_row: IntArray) -> None:
        for view, (ratio, stride) in enumerate(self._layout.specs[group].views()):
            found = step.kernel_block_table(group, view)[row].reshape(-1, ratio)
            self._findings.count_views(num_wrong_entries(table_row, found, stride), group, view)
