"""Block tables the plain way: whole rows copied each step, row by row, and slots request by request.

The same calls as `MultiGroupBlockTable` as far as the replay makes them, so that one engine runs on either.
"""

from types import SimpleNamespace

import numpy as np

from pagedkv.constants import PAD_SLOT_ID
from pagedkv.mirror import HostMirror
from pagedkv.specs import ContextParallel, table_width


class PlainTables:
    """One rank, full or window groups, no kernel views; the manager writes the mirror as it does anyway."""

    backend = "plain"

    def __init__(self, specs, max_num_reqs, max_model_len, max_num_batched_tokens, **_):
        self.specs = specs
        widths = [table_width(spec, max_model_len, ContextParallel()) for spec in specs]
        self.mirror = HostMirror(max_num_reqs, widths)
        self._device = [np.zeros((max_num_reqs, width), np.int32) for width in widths]
        self._slots = [np.full(max_num_batched_tokens, PAD_SLOT_ID, np.int64) for _ in specs]
        self.num_h2d_copies = self.num_h2d_bytes = 0

    def commit(self, num_reqs, query_start_loc, num_computed_tokens, rows):
        for group, device in enumerate(self._device):
            table = self.mirror.block_table(group)
            for place, row in enumerate(rows):
                device[place] = table[row]
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
