"""slot_mapping: where in the KV cache each scheduled token is written, for all groups.

For token t of request i (query_start_loc[i] <= t < query_start_loc[i + 1]) at position p, with
W ranks, rank r, interleave I, block size B, row = rows[i] (or i):

    v = B * W;  b = p // v;  o = p - b * v
    slot = block_table[row, b] * B + (o // (W * I)) * I + o % I      (in 64 bits)

PAD (-1) instead where the group has no slots; p < 0 or p >= max_model_len; row < 0 or row >=
max_num_reqs; b >= the row's count; block_table[row, b] is NULL; or (o // I) % W != r, that is, another
rank owns the token. Tokens in [num_tokens, num_tokens_fill) are PAD. p = positions[t] where positions are
given, else num_computed_tokens[i] + t - query_start_loc[i]. A max_model_len past int32 counts as 2**31 - 1.

A negative num_tokens stands for query_start_loc[num_reqs] as it is on the device, at most
-num_tokens - 1, and 0 without requests.

A negative num_reqs means a whole step: the scalars come from the staging header, and the step arrays
are written as well: positions and token_reqs, each token's request i (0 in the padding); seq_lens[i] =
num_computed_tokens[i] + query length (0 past the last request); query_start_loc (which repeats its last
value there); and for each group local_seq_lens[i], this rank's share of L = seq_lens[i] (0 past the last
request), that is, how many p in [0, L) have (p // I) % W == r:

    base = (L // I // W) * I
    local = base + clip(L - base * W - r * I, 0, I)       (in 64 bits)

L where W is 1, and 0 where L is negative, as garbage in device arrays may make it.
"""

import numpy as np

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
from pagedkv.kernels._spec import I32, I64, Array, OutI32, OutI64, OutSlot, Scalar


def slot_mapping(
    staging: I32[Array, "num_words"],
    geometry: I64[Array, "num_groups 14"],
    query_start_loc: I32[Array, "num_reqs+1"],
    num_computed_tokens: I32[Array, "num_reqs"],
    positions: I64[Array, "num_tokens"],
    rows: I32[Array, "num_reqs"],
    tables: I32[Array, "num_elements"],
    num_blocks: I32[Array, "num_groups max_num_reqs"],
    slots: OutSlot[Array, "num_groups slot_stride"],
    step_positions: OutI64[Array, "max_num_tokens"],
    step_seq_lens: OutI32[Array, "max_num_reqs"],
    step_query_start_loc: OutI32[Array, "max_num_reqs+1"],
    step_token_reqs: OutI32[Array, "max_num_tokens"],
    step_local_seq_lens: OutI32[Array, "num_groups req_stride"],
    num_reqs: Scalar,
    num_tokens: Scalar,
    num_tokens_fill: Scalar,
    has_rows: Scalar,
) -> None:
    is_step = num_reqs < 0
    given = True
    if is_step:
        num_reqs, num_tokens, num_tokens_fill = staging[[NUM_REQS, NUM_TOKENS, NUM_TOKENS_FILL]].tolist()
        given = bool(staging[POSITIONS_GIVEN])
        query_start_loc = _section(staging, QUERY_START_LOC, query_start_loc)
        num_computed_tokens = _section(staging, NUM_COMPUTED_TOKENS, num_computed_tokens)
        has_rows = has_rows or staging[ROWS] >= 0
        rows = _section(staging, ROWS, rows)
    starts = query_start_loc[: num_reqs + 1].astype(np.int64)
    if num_tokens < 0:
        num_tokens = min(max(int(starts[num_reqs]), 0), -num_tokens - 1) if num_reqs else 0
    if is_step and staging[POSITIONS] >= 0:
        positions = staging[staging[POSITIONS] :][: 2 * num_tokens].view(np.int64)

    token = np.arange(num_tokens)
    request = np.clip(np.searchsorted(starts, token, "right") - 1, 0, max(num_reqs - 1, 0))
    p = positions[:num_tokens] if given else num_computed_tokens[request] + (token - starts[request])
    row = rows[request] if has_rows else request
    for g, group in enumerate(geometry):
        slots[g, :num_tokens] = _slots(group, tables, num_blocks[g], row, p)
        slots[g, num_tokens:num_tokens_fill] = -1
    if is_step:
        fill = staging[NUM_REQS_FILL]
        step_positions[:num_tokens] = p
        step_positions[num_tokens:num_tokens_fill] = 0
        step_token_reqs[:num_tokens] = request
        step_token_reqs[num_tokens:num_tokens_fill] = 0
        step_query_start_loc[: num_reqs + 1] = starts
        step_query_start_loc[num_reqs + 1 : fill + 1] = starts[num_reqs]
        step_seq_lens[:num_reqs] = num_computed_tokens[:num_reqs] + np.diff(starts)
        step_seq_lens[num_reqs:fill] = 0
        for g, group in enumerate(geometry):
            step_local_seq_lens[g, :num_reqs] = local_lengths(group, step_seq_lens[:num_reqs])
            step_local_seq_lens[g, num_reqs:fill] = 0


def _slots(group: Array, tables: Array, num_blocks: Array, row: Array, p: Array) -> Array:
    size, world, interleave = group[BLOCK_SIZE], group[CP_WORLD], group[CP_INTERLEAVE]
    b = p // (size * world)
    o = p - b * (size * world)
    valid = (
        (p >= 0) & (p < min(group[MAX_MODEL_LEN], MAX_INT32)) & ((o // interleave) % world == group[CP_RANK])
    )
    row = np.where((row >= 0) & (row < group[MAX_NUM_REQS]), row, -1)
    valid &= (row >= 0) & (group[SLOTS_ENABLED] != 0)
    valid &= b < np.where(row >= 0, num_blocks[row], 0)
    place = group[TABLE_OFFSET] + row.astype(np.int64) * group[WIDTH] + b
    block = np.where(valid, tables[np.where(valid, place, 0)], 0).astype(np.int64)
    return np.where(block != 0, block * size + o // (world * interleave) * interleave + o % interleave, -1)


def local_lengths(group: Array, seq_lens: Array) -> Array:
    """Return the share of each length that lies on the group's rank."""
    world, interleave = group[CP_WORLD], group[CP_INTERLEAVE]
    length = np.maximum(seq_lens.astype(np.int64), 0)
    base = length // interleave // world * interleave
    return base + np.clip(length - base * world - group[CP_RANK] * interleave, 0, interleave)


def _section(staging: Array, word: int, device_array: Array) -> Array:
    return staging[staging[word] :] if staging[word] >= 0 else device_array
