"""expand_blocks in Numba CUDA: one thread per kernel block.

Definition: expand_blocks_numpy.py. Twin: expand_blocks.cu.
"""

import numpy as np
from numba import cuda


@cuda.jit
def expand_blocks(block_ids, kernel_block_ids, num_ids, ratio, stride):
    first = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    step = np.int64(cuda.gridDim.x) * cuda.blockDim.x
    for k in range(first, np.int64(num_ids) * ratio, step):
        i = k // ratio
        block_id = np.int64(block_ids[i])
        kernel_block_ids[k] = block_id * stride + (k - i * ratio) if block_id != 0 else np.int64(0)
