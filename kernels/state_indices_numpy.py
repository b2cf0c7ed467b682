"""state_indices: which blocks hold the recurrent states that a step reads and writes, for all state groups.

For state group s and request i, with the group's own block size B, L = seq_lens[i] as slot_mapping wrote
it and c = num_computed_tokens[i], in 64 bits:

    last_computed   = (c - 1) // B               0 where the group keeps one running state; -1 where c <= 0
    first_scheduled = max(c, 0) // B             0 where the group keeps one running state
    last_scheduled  = max((L - 1) // B, 0)       0 where the group keeps one running state

    indices[i, j]      = block_table[i, last_scheduled + j]   for 0 <= j <= drafts
    initial_indices[i] = block_table[i, last_computed]
    columns[:, i]      = last_computed, first_scheduled, last_scheduled

A block is NULL where its column is negative, or at or past the row's count or the table's width. Rows in
[num_reqs, num_reqs_fill) are padding: NULL blocks, and the columns -1, 0 and 0 of a sequence without tokens.
"""

import numpy as np

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
from pagedkv.kernels._spec import I32, I64, Array, OutI32


def state_indices(
    staging: I32[Array, "num_words"],
    geometry: I64[Array, "num_groups 14"],
    states: I64[Array, "num_states 4"],
    num_computed_tokens: I32[Array, "num_reqs"],
    seq_lens: I32[Array, "max_num_reqs"],
    tables: I32[Array, "num_elements"],
    num_blocks: I32[Array, "num_groups max_num_reqs"],
    indices: OutI32[Array, "num_state_elements"],
    initial_indices: OutI32[Array, "num_states req_stride"],
    columns: OutI32[Array, "num_states 3 req_stride"],
) -> None:
    num_reqs, fill = staging[[NUM_REQS, NUM_REQS_FILL]].tolist()
    if staging[NUM_COMPUTED_TOKENS] >= 0:
        num_computed_tokens = staging[staging[NUM_COMPUTED_TOKENS] :]
    computed = num_computed_tokens[:num_reqs].astype(np.int64)
    length = seq_lens[:num_reqs].astype(np.int64)
    for s, (g, by_position, drafts, offset) in enumerate(
        states[:, [STATE_GROUP, STATE_BY_POSITION, STATE_DRAFTS, STATE_OFFSET]].tolist()
    ):
        size = geometry[g, BLOCK_SIZE]
        last_computed = np.where(computed > 0, by_position * ((computed - 1) // size), -1)
        first_scheduled = by_position * (np.maximum(computed, 0) // size)
        last_scheduled = by_position * np.maximum((length - 1) // size, 0)
        written = last_scheduled[:, None] + np.arange(1 + drafts)

        table = indices[offset : offset + max(num_reqs, fill) * (1 + drafts)].reshape(-1, 1 + drafts)
        table[:num_reqs] = _blocks(geometry[g], tables, num_blocks[g], written)
        table[num_reqs:] = 0
        initial_indices[s, :num_reqs] = _blocks(geometry[g], tables, num_blocks[g], last_computed[:, None])[
            :, 0
        ]
        initial_indices[s, num_reqs:fill] = 0
        columns[s, :, :num_reqs] = last_computed, first_scheduled, last_scheduled
        columns[s, :, num_reqs:fill] = [[-1], [0], [0]]


def _blocks(group: Array, tables: Array, num_blocks: Array, columns: Array) -> Array:
    """Blocks of columns [num_reqs, n], NULL where a row has none."""
    row = np.arange(len(columns))[:, None]
    valid = (columns >= 0) & (columns < np.minimum(num_blocks[row], group[WIDTH]))
    place = group[TABLE_OFFSET] + row * group[WIDTH] + columns
    return np.where(valid, tables[np.where(valid, place, 0)], 0)
