"""What is wrong with a step's arguments, found by one compiled look before anything is changed."""

from enum import IntEnum
from typing import Any

from pagedkv.compiled import compiled
from pagedkv.tables.modes import BATCH_ORDER, STABLE

__all__ = ["PackFault", "find_fault"]

Array = Any


class PackFault(IntEnum):
    """Why a step was refused."""

    NONE = 0
    FIRST_START = 1
    START_ORDER = 2
    TOKENS = 3
    TOKENS_PADDED = 4
    POSITIONS = 5
    ROWS = 6
    LIVE_ROW = 7
    NUM_REQS = 8
    MAX_TOKENS_PADDED = 9
    NUM_STARTS = 10
    NUM_COMPUTED = 11
    NUM_ROWS = 12


(
    _FIRST,
    _ORDER,
    _TOKENS,
    _PADDED,
    _POSITIONS,
    _ROWS,
    _LIVE,
    _REQS,
    _MAX_PADDED,
    _STARTS,
    _COMPUTED,
    _NUM_ROWS,
) = range(1, 13)


@compiled
def find_fault(
    counts: Array,
    max_tokens: int,
    query_start_loc: Array,
    num_computed_tokens: Array,
    rows: Array,
    num_positions: int,
    num_reqs: int,
    num_reqs_padded: int,
    tokens_padded: int,
    mode: int,
) -> tuple[int, int, int]:
    """Check the arguments of `pack_step`; returns the fault, its value and its place."""
    R = counts.shape[1]
    if num_reqs < 0 or num_reqs > num_reqs_padded or num_reqs_padded > R:
        return _REQS, num_reqs, num_reqs_padded
    if tokens_padded > max_tokens:
        return _MAX_PADDED, tokens_padded, 0
    if query_start_loc.size != 0 and query_start_loc.size != num_reqs + 1:
        return _STARTS, query_start_loc.size, num_reqs + 1
    if num_computed_tokens.size not in (0, num_reqs):
        return _COMPUTED, num_computed_tokens.size, num_reqs
    if rows.size != (num_reqs if mode == STABLE else 0):
        return _NUM_ROWS, rows.size, num_reqs
    if query_start_loc.size:
        if query_start_loc[0] != 0:
            return _FIRST, query_start_loc[0], 0
        drops = 0
        for i in range(num_reqs):  # no early end, so that it vectorises
            drops += query_start_loc[i + 1] < query_start_loc[i]
        for i in range(num_reqs if drops else 0):
            if query_start_loc[i + 1] < query_start_loc[i]:
                return _ORDER, query_start_loc[i + 1], i + 1
        total = query_start_loc[num_reqs]
        if total > max_tokens:
            return _TOKENS, total, num_reqs
        if 0 <= tokens_padded < total:
            return _PADDED, total, num_reqs
        if 0 <= num_positions < total:
            return _POSITIONS, total, num_positions
    for i in range(rows.size):
        if rows[i] < -1 or rows[i] >= R:
            return _ROWS, rows[i], i
    if mode == BATCH_ORDER:
        for g in range(counts.shape[0]):
            for row in range(num_reqs, num_reqs_padded):
                if counts[g, row] > 0:
                    return _LIVE, row, g
    return 0, 0, 0
