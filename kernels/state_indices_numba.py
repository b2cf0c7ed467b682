"""state_indices in Numba CUDA: threads stride over batch positions.

Definition: state_indices_numpy.py. Twin: state_indices.cu.
"""

import numpy as np
from numba import cuda

from pagedkv.kernels._layout import (
    BLOCK_SIZE,
    NUM_COMPUTED_TOKENS,
    NUM_REQS,
    NUM_REQS_FILL,
    STATE_BY_POSITION,
    STATE_DRAFTS,
    STATE_GROUP,
    STATE_OFFSET,
    TABLE_OFFSET,
    WIDTH,
)


@cuda.jit(device=True, inline="always")
def _block_at(tables, row, count, column):
    """Return the block in a column of the row that starts at `row`, or NULL."""
    if column >= 0 and column < count:
        return np.int64(tables[row + column])
    return np.int64(0)


@cuda.jit
def state_indices(
    staging,
    geometry,
    states,
    num_computed_tokens,
    seq_lens,
    tables,
    num_blocks,
    indices,
    initial_indices,
    columns,
):
    s = cuda.blockIdx.y
    g = states[s, STATE_GROUP]
    by_position = states[s, STATE_BY_POSITION] != 0
    num_written = 1 + states[s, STATE_DRAFTS]
    size = geometry[g, BLOCK_SIZE]
    width = geometry[g, WIDTH]
    reqs = np.int64(staging[NUM_REQS])
    reqs_fill = max(reqs, np.int64(staging[NUM_REQS_FILL]))
    thread = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    num_threads = np.int64(cuda.gridDim.x) * cuda.blockDim.x

    for i in range(thread, reqs_fill, num_threads):
        last_computed = np.int64(-1)
        first_scheduled = np.int64(0)
        last_scheduled = np.int64(0)
        count = np.int64(0)
        if i < reqs:
            if staging[NUM_COMPUTED_TOKENS] >= 0:
                computed = np.int64(staging[np.int64(staging[NUM_COMPUTED_TOKENS]) + i])
            else:
                computed = np.int64(num_computed_tokens[i])
            length = np.int64(seq_lens[i])
            if computed > 0:
                last_computed = np.int64(0)
                if by_position:
                    last_computed = (computed - 1) // size
                    first_scheduled = computed // size
            if length > 0 and by_position:
                last_scheduled = (length - 1) // size
            count = min(np.int64(num_blocks[g, i]), width)
        row = geometry[g, TABLE_OFFSET] + i * width
        for j in range(num_written):
            block_id = _block_at(tables, row, count, last_scheduled + j)
            indices[states[s, STATE_OFFSET] + i * num_written + j] = block_id
        initial_indices[s, i] = _block_at(tables, row, count, last_computed)
        columns[s, 0, i] = last_computed
        columns[s, 1, i] = first_scheduled
        columns[s, 2, i] = last_scheduled
