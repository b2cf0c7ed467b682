"""gather_rows: bring stable rows into batch order, touching only positions that changed.

For each batch position i of the gather section (a word) and each group:

    word >= 0           row = word: its live columns are copied, then NULL up to the previous count
    word == -1          the position is padding or a dummy: NULL up to the previous count
    word == -(row + 2)  the position keeps its row: apply_writes has brought its changes already

Under a sliding window of reach = window - 1 tokens, with p = num_computed_tokens[i], the first
max(p - reach, 0) // (block_size * cp_world) columns lie wholly below what the step's first token sees
and become NULL; where p went back, they are copied again.
"""

from pagedkv.kernels.apply_writes_numpy import expand_columns

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
    geometry: I64[Array, "num_groups 13"],
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
    for i, word in enumerate(staging[staging[GATHER] :][: staging[NUM_GATHER]].tolist()):
        row = -word - 2 if word <= KEEP else word
        p = int(num_computed_tokens[i]) if i < staging[NUM_REQS] else 0
        for g, group in enumerate(geometry):
            width = int(group[WIDTH])
            shown = batch_tables[group[TABLE_OFFSET] + i * width :][:width]
            stored = tables[group[TABLE_OFFSET] + max(row, 0) * width :][:width]
            count = int(num_blocks[g, row]) if row >= 0 else 0
            before, dead = int(batch_num_blocks[g, i]), int(batch_first_live[g, i])
            live = first_live(p, count, group)
            start, end = (min(dead, live), max(dead, live)) if word <= KEEP else (0, max(count, before))
            end = min(end, max(count, before))
            for c in range(start, end):
                shown[c] = stored[c] if live <= c < count else 0
            batch_num_blocks[g, i], batch_first_live[g, i] = count, live
            for view in views[group[FIRST_VIEW] :][: group[NUM_VIEWS]]:
                expand_columns(shown, start, end, i, view, kernel_tables)


def first_live(p: int, count: int, group: Array) -> int:
    """Leading columns that lie wholly below the window of position p, at most `count`."""
    reach = int(group[WINDOW_REACH])
    if reach < 0:
        return 0
    return min(max(p - reach, 0) // int(group[BLOCK_SIZE] * group[CP_WORLD]), count)
