"""slot_mapping in Numba CUDA: threads stride over tokens.

Definition: slot_mapping_numpy.py. Twin: slot_mapping.cu.
"""

import numpy as np
from numba import cuda

from pagedkv.constants import MAX_INT32
from pagedkv.kernels._layout import (
    BLOCK_SIZE,
    CP_INTERLEAVE,
    CP_RANK,
    CP_WORLD,
    MAX_MODEL_LEN,
    MAX_NUM_REQS,
    NUM_COMPUTED_TOKENS,
    NUM_REQS,
    NUM_REQS_FILL,
    NUM_TOKENS,
    NUM_TOKENS_FILL,
    POSITIONS,
    POSITIONS_GIVEN,
    QUERY_START_LOC,
    ROWS,
    SLOTS_ENABLED,
    TABLE_OFFSET,
    WIDTH,
)


@cuda.jit(device=True, inline="always")
def _entry(staging, word, device_array, is_step, i):
    """Return entry i of a step's section of the staging buffer, or of the device array without one."""
    if is_step and staging[word] >= 0:
        return np.int64(staging[np.int64(staging[word]) + i])
    return np.int64(device_array[i])


@cuda.jit(device=True, inline="always")
def _divide(n, by, shift):
    """Return n // by for n >= 0, by a shift where `by` is a power of two (shift >= 0)."""
    if shift >= 0:
        return n >> shift
    return n // by


@cuda.jit(device=True, inline="always")
def _shift(by):
    """Return log2 of `by`, or -1 where it is no power of two."""
    shift = 0
    while (by >> shift) > 1:
        shift += 1
    return shift if by == (np.int64(1) << shift) else -1


@cuda.jit
def slot_mapping(
    staging,
    geometry,
    query_start_loc,
    num_computed_tokens,
    positions,
    rows,
    tables,
    num_blocks,
    slots,
    step_positions,
    step_seq_lens,
    step_query_start_loc,
    step_token_reqs,
    step_local_seq_lens,
    num_reqs,
    num_tokens,
    num_tokens_fill,
    has_rows,
):
    g = cuda.blockIdx.y
    is_step = num_reqs < 0
    is_given = True
    reqs = np.int64(num_reqs)
    tokens = np.int64(num_tokens)
    fill = np.int64(num_tokens_fill)
    is_indexed = has_rows != 0
    if is_step:
        reqs = np.int64(staging[NUM_REQS])
        tokens = np.int64(staging[NUM_TOKENS])
        fill = np.int64(staging[NUM_TOKENS_FILL])
        is_given = staging[POSITIONS_GIVEN] != 0
        is_indexed = is_indexed or staging[ROWS] >= 0
    if tokens < 0:
        most = -tokens - 1
        tokens = np.int64(0)
        if reqs > 0:
            tokens = min(max(_entry(staging, QUERY_START_LOC, query_start_loc, is_step, reqs), tokens), most)

    world = geometry[g, CP_WORLD]
    interleave = geometry[g, CP_INTERLEAVE]
    virtual_size = geometry[g, BLOCK_SIZE] * world
    by_virtual_size, by_interleave, by_world = _shift(virtual_size), _shift(interleave), _shift(world)
    max_position = np.int64(0)
    if geometry[g, SLOTS_ENABLED] != 0:
        max_position = min(geometry[g, MAX_MODEL_LEN], np.int64(MAX_INT32))
    thread = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    num_threads = np.int64(cuda.gridDim.x) * cuda.blockDim.x

    request = np.int64(0)
    start = np.int64(0)  # tokens [start, end) belong to the request that the variables describe
    end = np.int64(0)
    first_position = np.int64(0)
    limit = np.int64(0)  # positions at or past it are PAD
    blocks = np.int64(0)  # the request's row in the arena
    for t in range(thread, max(tokens, fill), num_threads):
        p = np.int64(0)
        slot = np.int64(-1)
        if t < tokens and reqs > 0:
            if t >= end:
                low = np.int64(0)
                high = reqs
                guess = min(t * reqs // tokens, reqs - 1)  # right where all queries have one length
                if _entry(staging, QUERY_START_LOC, query_start_loc, is_step, guess) > t:
                    high = guess
                else:
                    low = guess
                    if _entry(staging, QUERY_START_LOC, query_start_loc, is_step, guess + 1) > t:
                        high = guess + 1
                while high - low > 1:
                    middle = low + ((high - low) >> 1)
                    if _entry(staging, QUERY_START_LOC, query_start_loc, is_step, middle) <= t:
                        low = middle
                    else:
                        high = middle
                request = low
                start = _entry(staging, QUERY_START_LOC, query_start_loc, is_step, low)
                end = _entry(staging, QUERY_START_LOC, query_start_loc, is_step, low + 1)
                if not is_given:
                    first_position = _entry(staging, NUM_COMPUTED_TOKENS, num_computed_tokens, is_step, low)
                row = low
                if is_indexed:
                    row = _entry(staging, ROWS, rows, is_step, low)
                limit = np.int64(0)
                if row >= 0 and row < geometry[g, MAX_NUM_REQS]:
                    limit = min(max_position, np.int64(num_blocks[g, row]) * virtual_size)
                    blocks = geometry[g, TABLE_OFFSET] + row * geometry[g, WIDTH]
            if not is_given:
                p = first_position + (t - start)
            elif is_step and staging[POSITIONS] >= 0:
                low_word = np.int64(staging[POSITIONS]) + 2 * t
                p = (np.int64(staging[low_word + 1]) << 32) | (np.int64(staging[low_word]) & 0xFFFFFFFF)
            else:
                p = np.int64(positions[t])
            if p >= 0 and p < limit:
                b = _divide(p, virtual_size, by_virtual_size)
                offset = p - b * virtual_size
                is_local = True
                if world > 1:
                    chunk = _divide(offset, interleave, by_interleave)
                    turn = _divide(chunk, world, by_world)
                    is_local = chunk - turn * world == geometry[g, CP_RANK]
                    offset -= (chunk - turn) * interleave
                if is_local:
                    block_id = np.int64(tables[blocks + b])
                    if block_id != 0:
                        slot = block_id * geometry[g, BLOCK_SIZE] + offset
        slots[g, t] = slot
        if is_step and g == 0:
            step_positions[t] = p
            step_token_reqs[t] = request if t < tokens else 0

    if is_step:
        rank_start = geometry[g, CP_RANK] * interleave
        reqs_fill = max(reqs, np.int64(staging[NUM_REQS_FILL]))
        for i in range(thread, reqs_fill + 1, num_threads):
            here = _entry(staging, QUERY_START_LOC, query_start_loc, is_step, min(i, reqs))
            if g == 0:
                step_query_start_loc[i] = here
            if i < reqs:
                computed = _entry(staging, NUM_COMPUTED_TOKENS, num_computed_tokens, is_step, i)
                after = _entry(staging, QUERY_START_LOC, query_start_loc, is_step, i + 1)
                length = np.int32(computed + after - here)  # wraps where the inputs are garbage
                local = np.int64(max(length, 0))
                if world > 1:
                    base = _divide(_divide(local, interleave, by_interleave), world, by_world) * interleave
                    local = base + min(max(local - base * world - rank_start, 0), interleave)
                step_local_seq_lens[g, i] = local
                if g == 0:
                    step_seq_lens[i] = length
            elif i < reqs_fill:
                step_local_seq_lens[g, i] = 0
                if g == 0:
                    step_seq_lens[i] = 0
