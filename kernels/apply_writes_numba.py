"""apply_writes in Numba CUDA: one warp per record.

Definition: apply_writes_numpy.py. Twin: apply_writes.cu.
"""

import numpy as np
from numba import cuda

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
    WRITE_END,
    WRITE_POSITION,
    WRITE_SOURCE,
    WRITE_START,
    WRITE_TARGET,
    WRITE_WORDS,
    WRITES,
)


@cuda.jit(device=True, inline="always")
def expand_column(block_id, place, group, geometry, views, kernel_tables):
    """Write one manager block into every view of its group; place = position * width + column."""
    for v in range(geometry[group, FIRST_VIEW], geometry[group, FIRST_VIEW] + geometry[group, NUM_VIEWS]):
        ratio = views[v, VIEW_RATIO]
        first = views[v, VIEW_OFFSET] + place * ratio
        for j in range(ratio):
            kernel_tables[first + j] = block_id * views[v, VIEW_STRIDE] + j if block_id != 0 else np.int64(0)


@cuda.jit
def apply_writes(
    staging,
    geometry,
    views,
    batch_first_live,
    tables,
    num_blocks,
    batch_tables,
    batch_num_blocks,
    kernel_tables,
):
    lane = cuda.threadIdx.x % 32
    num_warps = cuda.gridDim.x * (cuda.blockDim.x // 32)
    max_num_reqs = np.int64(geometry[0, MAX_NUM_REQS])
    warp = cuda.blockIdx.x * (cuda.blockDim.x // 32) + cuda.threadIdx.x // 32
    for w in range(warp, staging[NUM_WRITES], num_warps):
        record = np.int64(staging[WRITES]) + w * WRITE_WORDS
        target = np.int64(staging[record + WRITE_TARGET])
        start = np.int64(staging[record + WRITE_START])
        end = np.int64(staging[record + WRITE_END])
        source = np.int64(staging[record + WRITE_SOURCE]) >> 1  # -1: NULL
        sets_count = staging[record + WRITE_SOURCE] & 1
        position = np.int64(staging[record + WRITE_POSITION])

        group = target // max_num_reqs
        row = target - group * max_num_reqs
        table = geometry[group, TABLE_OFFSET] + row * geometry[group, WIDTH]
        shown = geometry[group, TABLE_OFFSET] + position * geometry[group, WIDTH]
        first_live = np.int64(0)
        if position >= 0:
            first_live = np.int64(batch_first_live[group, position])

        for c in range(start + lane, end, 32):
            block_id = np.int64(0)
            if source >= 0:
                block_id = np.int64(staging[np.int64(staging[PAYLOAD]) + source + c - start])
            tables[table + c] = block_id
            if position >= 0:
                if c < first_live:
                    block_id = np.int64(0)
                batch_tables[shown + c] = block_id
                place = position * geometry[group, WIDTH] + c
                expand_column(block_id, place, group, geometry, views, kernel_tables)
        if sets_count != 0 and lane == 0:
            count = end if source >= 0 else start
            num_blocks[group, row] = count
            if position >= 0:
                batch_num_blocks[group, position] = count
