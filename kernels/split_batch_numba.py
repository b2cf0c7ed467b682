"""split_batch in Numba CUDA: threads stride over the rows, and over the tokens.

Definition: split_batch_numpy.py. Twin: split_batch.cu.
"""

import numpy as np
from numba import cuda

from pagedkv.kernels._layout import CP_INTERLEAVE, CP_RANK, CP_WORLD


@cuda.jit
def split_batch(
    geometry,
    query_start_loc,
    seq_lens,
    token_reqs,
    part_query_start_loc,
    part_seq_lens,
    part_token_reqs,
    part_local_seq_lens,
    first_req,
    last_req,
    first_token,
    last_token,
):
    g = cuda.blockIdx.y
    first = np.int64(first_token)
    last = np.int64(last_token)
    num_reqs = np.int64(last_req) - first_req
    interleave = geometry[g, CP_INTERLEAVE]
    world = geometry[g, CP_WORLD]
    thread = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    num_threads = np.int64(cuda.gridDim.x) * cuda.blockDim.x

    for i in range(thread, num_reqs + 1, num_threads):
        here = np.int64(query_start_loc[first_req + i])
        if g == 0:
            part_query_start_loc[i] = min(max(here, first), last) - first
        if i < num_reqs:
            after = np.int64(query_start_loc[first_req + i + 1])
            beyond = max(after, last) - max(here, last)
            length = np.int32(seq_lens[first_req + i] - beyond)  # wraps where the inputs are garbage
            if g == 0:
                part_seq_lens[i] = length
            local = np.int64(max(length, 0))
            base = local // interleave // world * interleave
            rest = local - base * world - geometry[g, CP_RANK] * interleave
            part_local_seq_lens[g, i] = base + min(max(rest, np.int64(0)), interleave)

    if g == 0:
        for t in range(thread, last - first, num_threads):
            request = np.int64(token_reqs[first + t]) - first_req
            part_token_reqs[t] = max(min(request, num_reqs - 1), np.int64(0))
