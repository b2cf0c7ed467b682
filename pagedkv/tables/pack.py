"""Packing a step: one compiled call writes everything that travels into one staging buffer.

Layout of the buffer: `pagedkv.kernels._layout`. Everything is checked before anything is changed, the
mirror's dirty ranges included, so a step that is refused can be put right and packed again.
"""

from typing import Any

import numpy as np

from pagedkv.addresses import int32_1d, int32_2d, int64_1d, int64_2d
from pagedkv.compiled import compiled
from pagedkv.kernels._layout import (
    GATHER,
    HEADER_WORDS,
    NUM_COMPUTED_TOKENS,
    NUM_GATHER,
    NUM_REQS,
    NUM_REQS_FILL,
    NUM_TOKENS,
    NUM_TOKENS_FILL,
    NUM_WRITES,
    PAYLOAD,
    POSITIONS,
    POSITIONS_GIVEN,
    QUERY_START_LOC,
    ROWS,
    WRITE_WORDS,
    WRITES,
)
from pagedkv.tables.faults import find_fault
from pagedkv.tables.modes import BATCH_ORDER, STABLE
from pagedkv.tables.pack_rows import forget_rows, place_rows, show_rows
from pagedkv.tables.pack_writes import put_writes, take_writes, words_of_writes
from pagedkv.tables.sizes import bucket, token_class

__all__ = [
    "HAS_WINDOWS",
    "MAX_TOKENS",
    "OUT",
    "REQS_SEEN",
    "SEEN_WORDS",
    "TOKENS_FLOOR",
    "TOKENS_SEEN",
    "pack_at",
    "pack_step",
]

Array = Any

# Words of an output set's `seen`.
REQS_SEEN = 0  # requests of its last step: what is past a new step's is padded up to there
TOKENS_SEEN = 1  # tokens of its last step, likewise
MAX_TOKENS = 2  # tokens that it holds
HAS_WINDOWS = 3  # some group's columns become NULL below a window
OUT = 4  # its number
TOKENS_FLOOR = 5  # tokens that a captured slot mapping may write behind our back
SEEN_WORDS = 6


@compiled
def _align(word: int) -> int:
    return (word + 3) // 4 * 4  # 16 bytes


@compiled
def pack_step(
    out: Array,
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    versions: Array,
    totals: Array,
    batch: Array,
    seen: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,
    positions: Array,
    rows: Array,
    num_positions: int,
    num_reqs: int,
    num_reqs_padded: int,
    tokens_padded: int,
    mode: int,
) -> tuple[int, int]:
    """Pack one step; returns (key of its sizes, num_tokens).

    Returns (-words, 0) where the buffer is too small, and (-1, 0) where `find_fault` finds one; nothing
    was changed then. Empty input arrays stand for arrays that are on the device. num_positions is -1
    where positions are formed. num_tokens comes back negative where only the device knows it: it is at
    most -num_tokens - 1. The key is read by `Sizes.of`.

    `seen` int64 [SEEN_WORDS] is what the output set holds and may take; `totals` int64 [2] counts the
    copies and their bytes.
    """
    max_tokens, reqs_seen, tokens_seen = seen[MAX_TOKENS], seen[REQS_SEEN], seen[TOKENS_SEEN]
    fault = find_fault(
        counts,
        max_tokens,
        query_start_loc,
        num_computed_tokens,
        rows,
        num_positions,
        num_reqs,
        num_reqs_padded,
        tokens_padded,
        mode,
    )
    if fault[0]:
        return -1, 0
    if query_start_loc.size:
        num_tokens = np.int64(query_start_loc[num_reqs])
        host_positions = min(positions.size, num_tokens)
    else:
        num_tokens = -(max_tokens if num_positions < 0 else min(max_tokens, num_positions)) - 1
        host_positions = positions.size
    at_start_loc = HEADER_WORDS
    at_computed = _align(at_start_loc + query_start_loc.size)
    at_positions = _align(at_computed + num_computed_tokens.size)
    at_gather = _align(at_positions + 2 * host_positions)
    num_gather = max(rows.size, reqs_seen) if mode == STABLE else 0
    at_payload = _align(at_gather + num_gather)
    if at_payload > out.size:
        return -at_payload - words_of_writes(ranges, dirty) - 4, 0

    for i in range(query_start_loc.size):
        out[at_start_loc + i] = query_start_loc[i]
    for i in range(num_computed_tokens.size):
        out[at_computed + i] = num_computed_tokens[i]
    if host_positions:
        out[at_positions : at_positions + 2 * host_positions].view(np.int64)[:] = positions[:host_positions]
    if mode == STABLE:
        changed = place_rows(out, at_gather, batch, versions, ranges, rows, reqs_seen, counts.shape[0])
        if not changed and not seen[HAS_WINDOWS]:
            num_gather, at_payload = 0, at_gather
    at_writes, num_writes = put_writes(out, at_payload, blocks, layout, counts, ranges, dirty, versions, mode)
    if num_writes < 0:
        if mode == STABLE:
            forget_rows(versions, rows)
        return -at_payload - num_gather - words_of_writes(ranges, dirty) - 4, 0
    take_writes(ranges, dirty, versions, counts.shape[1], mode)
    if mode == STABLE:
        show_rows(batch, versions, rows, reqs_seen)
    words = at_writes + num_writes * WRITE_WORDS

    out[NUM_REQS] = num_reqs
    out[NUM_REQS_FILL] = max(num_reqs_padded, reqs_seen)
    out[NUM_TOKENS] = num_tokens
    out[NUM_TOKENS_FILL] = max(tokens_padded, tokens_seen)
    out[NUM_WRITES] = num_writes
    out[WRITES] = at_writes
    out[PAYLOAD] = at_payload
    out[QUERY_START_LOC] = at_start_loc if query_start_loc.size else -1
    out[NUM_COMPUTED_TOKENS] = at_computed if num_computed_tokens.size or not num_reqs else -1
    out[POSITIONS] = at_positions if host_positions else -1
    out[POSITIONS_GIVEN] = 1 if num_positions >= 0 else 0
    out[ROWS] = -1
    out[NUM_GATHER] = num_gather
    out[GATHER] = at_gather
    most = num_tokens if num_tokens >= 0 else -num_tokens - 1
    size = bucket(words)
    key = np.int64(size) | np.int64(token_class(max(most, tokens_padded, tokens_seen))) << 32
    key |= np.int64(token_class(num_gather)) << 36 | np.int64(1 if num_writes else 0) << 40
    if mode in (BATCH_ORDER, STABLE):
        seen[REQS_SEEN], seen[TOKENS_SEEN] = num_reqs, max(most, seen[TOKENS_FLOOR])
    totals[0] += 1
    totals[1] += 4 * size
    return int(key | seen[OUT] << 41), int(num_tokens)


@compiled
def pack_at(
    state: Array,
    out: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,
    positions: Array,
    rows: Array,
    num_positions: int,
    num_reqs: int,
    num_reqs_padded: int,
    tokens_padded: int,
    mode: int,
) -> tuple[int, int]:
    """`pack_step` with all that lives as long as the table by address, in its order from `blocks` on."""
    return pack_step(
        out,
        int32_1d(state, 0),
        int64_2d(state, 1),
        int32_2d(state, 2),
        int32_2d(state, 3),
        int32_1d(state, 4),
        int64_2d(state, 5),
        int64_1d(state, 6),
        int64_2d(state, 7),
        int64_1d(state, 8),
        query_start_loc,
        num_computed_tokens,
        positions,
        rows,
        num_positions,
        num_reqs,
        num_reqs_padded,
        tokens_padded,
        mode,
    )
