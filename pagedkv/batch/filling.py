"""Compiled loops that read the batch in its order: a step's host arrays, and its sizes.

`state` is the address table of `advance`.
"""

from typing import Any

import numpy as np

from pagedkv.addresses import int64_1d, int64_2d
from pagedkv.batch.advance import COMPUTED, HANDLE, NUM_REQS, PREFILL, ROW, SCHEDULED
from pagedkv.compiled import compiled

__all__ = ["fill", "sizes"]

Array = Any


@compiled
def fill(state: Array, host: Array, is_prefilling: Array, handles: Array, rows: Array) -> tuple[int, int]:
    """Write a step's host arrays in batch order; returns (max_query_len, max_seq_len).

    host int32 [3, num_reqs_padded + 1]: query_start_loc, seq_lens and num_computed_tokens. handles int64 and
    rows int32, [num_reqs] each; `rows` is left out where empty.
    """
    numbers, order, setup = int64_2d(state, 0), int64_1d(state, 1), int64_1d(state, 2)
    n = setup[NUM_REQS]
    starts, lengths, known = host[0], host[1], host[2]
    start, longest_query, longest = np.int64(0), np.int64(0), np.int64(0)
    for i in range(n):
        line = numbers[order[i]]
        computed, scheduled = line[COMPUTED], line[SCHEDULED]
        starts[i], lengths[i], known[i] = start, computed + scheduled, computed
        is_prefilling[i] = computed < line[PREFILL]
        handles[i] = line[HANDLE]
        if rows.size:
            rows[i] = line[ROW]
        start += scheduled
        longest_query, longest = max(longest_query, scheduled), max(longest, computed + scheduled)
    for i in range(n, host.shape[1]):
        starts[i], lengths[i], known[i] = start, 0, 0
    for i in range(n, is_prefilling.size):
        is_prefilling[i] = False
    return int(longest_query), int(longest)


@compiled
def sizes(state: Array) -> tuple[int, int, int]:
    """Return positions in use, tokens of the step, and the most of one request."""
    numbers, order, setup = int64_2d(state, 0), int64_1d(state, 1), int64_1d(state, 2)
    total, longest = np.int64(0), np.int64(0)
    for i in range(setup[NUM_REQS]):
        if order[i] >= 0:
            total += numbers[order[i], SCHEDULED]
            longest = max(longest, numbers[order[i], SCHEDULED])
    return int(setup[NUM_REQS]), int(total), int(longest)
