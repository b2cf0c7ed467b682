"""apply_writes: put a step's changed columns into the device tables.

For each record (target, start, end, source, position) of the staging buffer, with
group, row = divmod(target, max_num_reqs), and for every column start <= c < end:

    block_table[group][row, c]             = payload[source + c - start], or NULL where source < 0
    batch_table[group][position, c]        = the same, or NULL where c < batch_first_live[group, position]
    kernel_table[view][position, c * ratio + j] = id * stride + j for 0 <= j < ratio; NULL stays NULL

The last two only where position >= 0. A record that sets the count makes it `end`, or `start` where
it writes NULL. Records of one launch never overlap.
"""

from pagedkv.kernels._layout import (
    FIRST_VIEW,
    MAX_NUM_REQS,
    NUM_VIEWS,
    NUM_WRITES,
    PAYLOAD,
    TABLE_OFFSET,
    VIEW_OFFSET,
    VIEW_RATIO,
    VIEW_STRIDE,
    WIDTH,
    WRITE_WORDS,
    WRITES,
)
from pagedkv.kernels._spec import I32, I64, Array, OutI32


def apply_writes(
    staging: I32[Array, "num_words"],
    geometry: I64[Array, "num_groups 14"],
    views: I64[Array, "num_views 3"],
    batch_first_live: I32[Array, "num_groups max_num_reqs"],
    tables: OutI32[Array, "num_elements"],
    num_blocks: OutI32[Array, "num_groups max_num_reqs"],
    batch_tables: OutI32[Array, "num_elements"],
    batch_num_blocks: OutI32[Array, "num_groups max_num_reqs"],
    kernel_tables: OutI32[Array, "num_kernel_elements"],
) -> None:
    first, payload = staging[WRITES], staging[staging[PAYLOAD] :]
    for w in range(staging[NUM_WRITES]):
        record = staging[first + w * WRITE_WORDS : first + (w + 1) * WRITE_WORDS].tolist()
        target, start, end, source, position = record
        source, sets_count = source >> 1, source & 1
        group, row = divmod(target, int(geometry[0, MAX_NUM_REQS]))
        width, table = int(geometry[group, WIDTH]), int(geometry[group, TABLE_OFFSET])
        ids = payload[source : source + end - start] if source >= 0 else 0
        tables[table + row * width + start : table + row * width + end] = ids
        if sets_count:
            num_blocks[group, row] = end if source >= 0 else start
        if position < 0:
            continue
        shown = batch_tables[table + position * width :][:width]
        shown[start:end] = ids
        shown[start : max(start, min(end, int(batch_first_live[group, position])))] = 0
        if sets_count:
            batch_num_blocks[group, position] = end if source >= 0 else start
        for view in views[geometry[group, FIRST_VIEW] :][: geometry[group, NUM_VIEWS]]:
            expand_columns(shown, start, end, position, view, kernel_tables)


def expand_columns(
    row: Array, start: int, end: int, position: int, view: Array, kernel_tables: Array
) -> None:
    """Write columns [start, end) of one manager row in a view's kernel blocks."""
    offset, ratio, stride = int(view[VIEW_OFFSET]), int(view[VIEW_RATIO]), int(view[VIEW_STRIDE])
    to = kernel_tables[offset + position * row.size * ratio :][: row.size * ratio].reshape(row.size, ratio)
    for j in range(ratio):
        to[start:end, j] = (row[start:end] * stride + j) * (row[start:end] != 0)
