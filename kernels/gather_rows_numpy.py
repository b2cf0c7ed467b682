"""gather_rows: bring stable rows into batch order, touching only positions that changed.

For each batch position i of the gather section (a word) and each group:

    word >= 0           row = word: its live columns are copied, then NULL up to the previous count
    word == -1          the position is padding or a dummy: NULL up to the previous count
    word == -(row + 2)  the position keeps its row: apply_writes has brought its changes already

Under a sliding window of reach = window - 1 tokens, with p = num_computed_tokens[i], the first
max(p - reach, 0) // (block_size * cp_world) columns lie wholly below what the step's first token sees
and become NULL; where p went back, they are copied again.
"""

import numpy as np
from pagedkv.kernels.apply_writes_numpy import expand_columns

from pagedkv.constants import MAX_INT32
from pagedkv.kernels._layout import (
    BLOCK_SIZE,
    CP_WORLD,
    FIRST_VIEW,
    GATHER,
    KEEP,
    NUM_COMPUTED_TOKENS,
    NUM_GATHER,
    NUM_REQS,
    NUM_VIEWS,
    TABLE_OFFSET,
    WIDTH,
    WINDOW_REACH,
)
from pagedkv.kernels._spec import I32, I64, Array, OutI32


def gather_rows(
    staging: I32[Array, "num_words"],
    geometry: I64[Array, "num_groups 14"],
    views: I64[Array, "num_views 3"],
    num_computed_tokens: I32[Array, "num_reqs"],
    tables: I32[Array, "num_elements"],
    num_blocks: I32[Array, "num_groups max_num_reqs"],
    batch_tables: OutI32[Array, "num_elements"],
    batch_num_blocks: OutI32[Array, "num_groups max_num_reqs"],
    batch_first_live: OutI32[Array, "num_groups max_num_reqs"],
    kernel_tables: OutI32[Array, "num_kernel_elements"],
) -> None:
    if staging[NUM_COMPUTED_TOKENS] >= 0:
        num_computed_tokens = staging[staging[NUM_COMPUTED_TOKENS] :]
    words = staging[staging[GATHER] :][: staging[NUM_GATHER]]
    n = words.size
    kept = words <= KEEP
    row = np.where(kept, -words - 2, words)
    p = np.where(np.arange(n) < staging[NUM_REQS], np.resize(num_computed_tokens[: staging[NUM_REQS]], n), 0)
    for g, group in enumerate(geometry):
        count = np.where(row >= 0, num_blocks[g, np.maximum(row, 0)], 0)
        live = first_live(p, count, group)
        before, dead = batch_num_blocks[g, :n], batch_first_live[g, :n]
        start = np.where(kept, np.minimum(dead, live), 0)
        end = np.minimum(np.where(kept, np.maximum(dead, live), MAX_INT32), np.maximum(count, before))
        for i in np.flatnonzero(start < end).tolist():
            bring(int(row[i]), i, (start[i], live[i], count[i], end[i]), group, tables, batch_tables)
            shown = batch_tables[group[TABLE_OFFSET] + i * group[WIDTH] :][: group[WIDTH]]
            for view in views[group[FIRST_VIEW] :][: group[NUM_VIEWS]]:
                expand_columns(shown, start[i], end[i], i, view, kernel_tables)
        batch_num_blocks[g, :n], batch_first_live[g, :n] = count, live


def bring(row: int, i: int, columns: Array, group: Array, tables: Array, batch_tables: Array) -> None:
    """Copy the columns of a row that are live into position i, from the first to the last that changes."""
    start, live, count, end = columns
    width = int(group[WIDTH])
    shown = batch_tables[group[TABLE_OFFSET] + i * width :][:width]
    stored = tables[group[TABLE_OFFSET] + max(row, 0) * width :][:width]
    first, last = min(max(start, live), end), max(min(end, count), start)
    shown[start:end] = 0
    shown[first:last] = stored[first:last]


def first_live(p: Array, count: Array, group: Array) -> Array:
    """Leading columns that lie wholly below the windows of positions p, at most `count`."""
    reach = int(group[WINDOW_REACH])
    if reach < 0:
        return np.zeros_like(count)
    return np.minimum(np.maximum(p - reach, 0) // int(group[BLOCK_SIZE] * group[CP_WORLD]), count)
