"""Block tables the plain way: row by row in Python, whole rows copied each step, slots request by request.

The same calls as `MultiGroupBlockTable` as far as the replay makes them, so that one engine runs on either.
"""

from types import SimpleNamespace

import numpy as np

from pagedkv.constants import PAD_SLOT_ID
from pagedkv.specs import ContextParallel, table_width


class PlainMirror:
    """Host tables in NumPy, one per group, and their counts."""

    def __init__(self, specs, max_num_reqs, max_model_len):
        self.max_num_reqs = max_num_reqs
        self.widths = tuple(table_width(spec, max_model_len, ContextParallel()) for spec in specs)
        self.tables = [np.zeros((max_num_reqs, width), np.int32) for width in self.widths]
        self.counts = [np.zeros(max_num_reqs, np.int32) for _ in specs]

    def block_table(self, group=0):
        return self.tables[group]

    def num_blocks(self, group=0):
        return self.counts[group]


class PlainTables:
    """One rank, full or window groups, no kernel views."""

    backend = "plain"

    def __init__(self, specs, max_num_reqs, max_model_len, max_num_batched_tokens, **_):
        self.specs = specs
        self.mirror = PlainMirror(specs, max_num_reqs, max_model_len)
        self._device = [np.zeros_like(table) for table in self.mirror.tables]
        self._slots = [np.full(max_num_batched_tokens, PAD_SLOT_ID, np.int64) for _ in specs]
        self.num_h2d_copies = self.num_h2d_bytes = 0

    def add_rows(self, rows, counts, block_ids):
        self.clear_rows(rows)
        self.append_rows(rows, counts, block_ids)

    def append_rows(self, rows, counts, block_ids):
        at = 0
        for group, of_group in enumerate(counts):
            for row, count in zip(rows, of_group, strict=True):
                start = self.mirror.counts[group][row]
                self.mirror.tables[group][row, start : start + count] = block_ids[at : at + count]
                self.mirror.counts[group][row] = start + count
                at += count

    def clear_rows(self, rows):
        for table, counts in zip(self.mirror.tables, self.mirror.counts, strict=True):
            for row in rows:
                table[row, : counts[row]] = 0
                counts[row] = 0

    def move_rows(self, srcs, tgts):
        for table, counts in zip(self.mirror.tables, self.mirror.counts, strict=True):
            for src, tgt in zip(srcs, tgts, strict=True):
                table[tgt], counts[tgt] = table[src], counts[src]
                table[src, : counts[src]] = 0
                counts[src] = 0

    def null_columns(self, rows, starts, ends, group=0):
        for row, start, end in zip(rows, starts, ends, strict=True):
            self.mirror.tables[group][row, start:end] = 0

    def commit(self, num_reqs, query_start_loc, num_computed_tokens):
        for device, table in zip(self._device, self.mirror.tables, strict=True):
            device[:num_reqs] = table[:num_reqs]
            self.num_h2d_copies += 1
            self.num_h2d_bytes += device[:num_reqs].nbytes
        lengths = np.diff(query_start_loc)
        positions = np.empty(query_start_loc[-1], np.int64)
        for row in range(num_reqs):
            start, end, first = query_start_loc[row], query_start_loc[row + 1], num_computed_tokens[row]
            positions[start:end] = np.arange(first, first + lengths[row])
            for group, spec in enumerate(self.specs):
                column, offset = np.divmod(positions[start:end], spec.block_size)
                blocks = self._device[group][row, column].astype(np.int64)
                self._slots[group][start:end] = blocks * spec.block_size + offset
        return SimpleNamespace(
            positions=positions,
            seq_lens=num_computed_tokens + lengths,
            slot_mapping=lambda group: self._slots[group][: len(positions)],
            block_table=lambda group: self._device[group][:num_reqs],
        )
