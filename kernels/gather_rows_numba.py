"""gather_rows in Numba CUDA: blocks stride over positions.

Definition: gather_rows_numpy.py. Twin: gather_rows.cu.
"""

import numpy as np
from numba import cuda, int64
from pagedkv.kernels.apply_writes_numba import expand_column

from pagedkv.kernels._layout import (
    BLOCK_SIZE,
    CP_WORLD,
    GATHER,
    KEEP,
    NUM_COMPUTED_TOKENS,
    NUM_GATHER,
    NUM_REQS,
    TABLE_OFFSET,
    WIDTH,
    WINDOW_REACH,
)

TILE = 4  # positions that a block takes at a time


@cuda.jit
def gather_rows(
    staging,
    geometry,
    views,
    num_computed_tokens,
    tables,
    num_blocks,
    batch_tables,
    batch_num_blocks,
    batch_first_live,
    kernel_tables,
):
    rows = cuda.shared.array(TILE, int64)
    starts = cuda.shared.array(TILE, int64)
    ends = cuda.shared.array(TILE, int64)
    lives = cuda.shared.array(TILE, int64)
    counts = cuda.shared.array(TILE, int64)
    g = cuda.blockIdx.y
    num_gather = np.int64(staging[NUM_GATHER])
    width = geometry[g, WIDTH]

    for first in range(cuda.blockIdx.x * TILE, num_gather, cuda.gridDim.x * TILE):
        tile = min(TILE, num_gather - first)
        for k in range(cuda.threadIdx.x, tile, cuda.blockDim.x):
            i = first + k
            word = np.int64(staging[np.int64(staging[GATHER]) + i])
            row = -word - 2 if word <= KEEP else word
            count = np.int64(0)
            if row >= 0:
                count = np.int64(num_blocks[g, row])
            before = np.int64(batch_num_blocks[g, i])
            dead = np.int64(batch_first_live[g, i])
            live = np.int64(0)
            if geometry[g, WINDOW_REACH] >= 0 and i < staging[NUM_REQS]:
                p = np.int64(0)
                if staging[NUM_COMPUTED_TOKENS] >= 0:
                    p = np.int64(staging[np.int64(staging[NUM_COMPUTED_TOKENS]) + i])
                else:
                    p = np.int64(num_computed_tokens[i])
                behind = max(p - geometry[g, WINDOW_REACH], np.int64(0))
                live = min(behind // (geometry[g, BLOCK_SIZE] * geometry[g, CP_WORLD]), count)
            rows[k] = row
            counts[k] = count
            lives[k] = live
            starts[k] = min(dead, live) if word <= KEEP else np.int64(0)
            ends[k] = min(max(dead, live) if word <= KEEP else width, max(count, before))
            batch_num_blocks[g, i] = count
            batch_first_live[g, i] = live
        cuda.syncthreads()
        for k in range(tile):
            place = (first + k) * width
            for c in range(starts[k] + cuda.threadIdx.x, ends[k], cuda.blockDim.x):
                block_id = np.int64(0)
                if lives[k] <= c < counts[k]:
                    block_id = np.int64(tables[geometry[g, TABLE_OFFSET] + rows[k] * width + c])
                batch_tables[geometry[g, TABLE_OFFSET] + place + c] = block_id
                expand_column(block_id, place + c, g, geometry, views, kernel_tables)
        cuda.syncthreads()
