"""Packing a step: one compiled call writes everything that travels into one staging buffer.

Layout of the buffer: `pagedkv.kernels._layout`. Everything is checked before anything is changed, the
mirror's dirty ranges included, so a step that is refused can be put right and packed again.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

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
    WRITE_CHUNK,
    WRITE_END,
    WRITE_POSITION,
    WRITE_SOURCE,
    WRITE_START,
    WRITE_TARGET,
    WRITE_WORDS,
    WRITES,
)

__all__ = ["Mode", "PackFault", "Sizes", "bucket", "pack_step", "token_class"]

Array = Any


class Mode(IntEnum):
    """How the rows of the packed writes are shown to the consumer."""

    BATCH_ORDER = 0  # row i of the table is request i
    STABLE = 1  # the step's rows are placed at batch positions
    WRITES_ONLY = 2  # stable rows, no step: the table alone is brought up to date


class PackFault(IntEnum):
    """Why a step was refused."""

    NONE = 0
    GROW = 1  # the buffer is too small; value = words needed
    FIRST_START = 2
    START_ORDER = 3
    TOKENS = 4
    TOKENS_PADDED = 5
    POSITIONS = 6
    ROWS = 7
    LIVE_ROW = 8
    NUM_REQS = 9
    MAX_TOKENS_PADDED = 10


class Sizes(NamedTuple):
    """What a graph is captured for; its kernels are right for any step within these bounds."""

    words: int  # of the copy, a bucket
    tokens: int  # slots to write, the padding included
    positions: int  # batch positions to gather; 0 = none, and no gather_rows
    writes: bool  # False: nothing changed in the tables, and no apply_writes

    @classmethod
    def of(cls, key: int) -> "Sizes":
        """Read the key that `pack_step` returns."""
        words, tokens, positions = key & 0xFFFFFFFF, key >> 32 & 15, key >> 36 & 15
        return cls(words, _class_size(tokens), _class_size(positions), bool(key >> 40))

    @classmethod
    def key(cls, words: int, tokens: int, positions: int, *, writes: bool) -> int:
        """Return the key of a step of these sizes."""
        return int(bucket(words) | token_class(tokens) << 32 | token_class(positions) << 36 | writes << 40)


def _class_size(place: int) -> int:
    return 1024 * 8 ** (place - 1) if place else 0


_GROW, _FIRST, _ORDER, _TOKENS, _PADDED, _POSITIONS, _ROWS, _LIVE, _REQS, _MAX_PADDED = range(1, 11)
_BATCH_ORDER, _STABLE = int(Mode.BATCH_ORDER), int(Mode.STABLE)


@compiled
def _align(word: int) -> int:
    return (word + 3) // 4 * 4  # 16 bytes


@compiled
def _split(blocks: Array, base: int, count: int, start: int, end: int) -> tuple[int, int]:
    # [start, dead) is NULL although live, [dead, live) holds ids, [live, end) lies past the count.
    live = min(end, max(start, count))
    dead = start
    while dead < live - 1 and blocks[base + dead] == 0:
        dead += 1
    return dead, live


@compiled
def _chunks(start: int, end: int) -> int:
    return (end - start + WRITE_CHUNK - 1) // WRITE_CHUNK


@compiled
def _size_writes(blocks: Array, layout: Array, counts: Array, ranges: Array, dirty: Array) -> tuple[int, int]:
    R = counts.shape[1]
    num_writes, num_ids = 0, 0
    for k in range(1, dirty[0] + 1):
        target = dirty[k]
        g = target // R
        row = target - g * R
        base = layout[g, 0] + np.int64(row) * layout[g, 1]
        for at in (0, 2):
            start, end = ranges[target, at], ranges[target, at + 1]
            if start < end:
                dead, live = _split(blocks, base, counts[g, row], start, end)
                num_writes += _chunks(start, dead) + _chunks(dead, live) + _chunks(live, end)
                num_ids += live - dead
    return num_writes, num_ids


@compiled
def _put_run(
    out: Array, at: int, target: int, start: int, end: int, count: int, source: int, position: int
) -> int:
    for first in range(start, end, WRITE_CHUNK):
        last = min(first + WRITE_CHUNK, end)
        out[at + WRITE_TARGET] = target
        out[at + WRITE_START] = first
        out[at + WRITE_END] = last
        if source >= 0:
            out[at + WRITE_SOURCE] = 2 * (source + first - start) + (1 if last == count else 0)
        else:
            out[at + WRITE_SOURCE] = -2 + (1 if first == count else 0)
        out[at + WRITE_POSITION] = position
        at += WRITE_WORDS
    return at


@compiled
def _put_writes(
    out: Array,
    at: int,
    payload: int,
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    versions: Array,
    mode: int,
) -> None:
    R = counts.shape[1]
    source = 0
    for k in range(1, dirty[0] + 1):
        target = dirty[k]
        g = target // R
        row = target - g * R
        base = layout[g, 0] + np.int64(row) * layout[g, 1]
        position = row
        if mode != _BATCH_ORDER:
            position = versions[1, row] if mode == _STABLE else -1
            versions[0, row] += 1
        for half in (0, 2):
            start, end = ranges[target, half], ranges[target, half + 1]
            if start < end:
                count = counts[g, row]
                dead, live = _split(blocks, base, count, start, end)
                at = _put_run(out, at, target, start, dead, -1, -1, position)
                at = _put_run(out, at, target, dead, live, count, source, position)
                at = _put_run(out, at, target, live, end, count, -1, position)
                for c in range(dead, live):
                    out[payload + source] = blocks[base + c]
                    source += 1
            ranges[target, half], ranges[target, half + 1] = 0, 0
    dirty[0] = 0


@compiled
def _place_rows(
    out: Array, at: int, batch: Array, versions: Array, ranges: Array, rows: Array, seen: int, groups: int
) -> bool:
    # A position keeps its row if it shows that row as it was before this step's writes; those then come
    # by apply_writes. One position a row can be kept so: a repeated, changed row is gathered again.
    changed = False
    for i in range(rows.size):
        row = rows[i]
        kept = i < seen and batch[0, i] == row
        if kept and row >= 0:
            kept = batch[1, i] == versions[0, row]
            if kept and versions[1, row] < 0:
                versions[1, row] = i
            elif kept:
                for g in range(groups):
                    kept = kept and ranges[g * versions.shape[1] + row, 1] == 0
        out[at + i] = -(row + 2) if kept and row >= 0 else row
        changed = changed or not (kept or (row < 0 and (i >= seen or batch[0, i] < 0)))
    for i in range(rows.size, seen):
        out[at + i] = -1
        changed = changed or batch[0, i] >= 0
    return changed


@compiled
def _show_rows(batch: Array, versions: Array, rows: Array, seen: int) -> None:
    for i in range(rows.size):
        batch[0, i] = rows[i]
        if rows[i] >= 0:
            batch[1, i] = versions[0, rows[i]]
            versions[1, rows[i]] = -1
    for i in range(rows.size, seen):
        batch[0, i] = -1


@compiled
def _find_fault(
    counts: Array,
    query_start_loc: Array,
    num_positions: int,
    rows: Array,
    num_reqs: int,
    num_reqs_padded: int,
    tokens_padded: int,
    max_tokens: int,
    mode: int,
) -> tuple[int, int, int]:
    if num_reqs < 0 or num_reqs > num_reqs_padded or num_reqs_padded > counts.shape[1]:
        return _REQS, num_reqs, num_reqs_padded
    if tokens_padded > max_tokens:
        return _MAX_PADDED, tokens_padded, 0
    if query_start_loc.size:
        if query_start_loc[0] != 0:
            return _FIRST, query_start_loc[0], 0
        for i in range(num_reqs):
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
        if rows[i] < -1 or rows[i] >= counts.shape[1]:
            return _ROWS, rows[i], i
    if mode == _BATCH_ORDER:
        for g in range(counts.shape[0]):
            for row in range(num_reqs, num_reqs_padded):
                if counts[g, row] > 0:
                    return _LIVE, row, g
    return 0, 0, 0


@compiled
def bucket(words: int) -> int:
    """Round words up to one of four sizes an octave: few graphs, at most 1.25 times the bytes."""
    size = 256
    while size < words:
        size *= 2
    step = size // 8
    return max(256, (words + step - 1) // step * step)


@compiled
def token_class(num: int) -> int:
    """Place of the smallest of 0, 1024, 8192, 65536, ... that holds `num`: the grids of graphs."""
    place, size = 0, 0
    while size < num:
        size = max(1024, size * 8)
        place += 1
    return place


@compiled
def pack_step(
    out: Array,
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    batch: Array,
    versions: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,
    positions: Array,
    rows: Array,
    num_positions: int,
    num_reqs: int,
    num_reqs_padded: int,
    tokens_padded: int,
    reqs_seen: int,
    tokens_seen: int,
    max_tokens: int,
    has_windows: bool,
    mode: int,
) -> tuple[int, int, int]:
    """Pack one step; returns (0, key of its sizes, num_tokens) or (fault, value, place).

    Empty input arrays stand for arrays that are on the device. num_positions is -1 where positions are
    formed; num_tokens comes back negative where only the device knows it (then it is at most
    -num_tokens - 1). The key is read by `Sizes.of`.
    """
    code, value, place = _find_fault(
        counts,
        query_start_loc,
        num_positions,
        rows,
        num_reqs,
        num_reqs_padded,
        tokens_padded,
        max_tokens,
        mode,
    )
    if code:
        return code, value, place
    if query_start_loc.size:
        num_tokens = query_start_loc[num_reqs]
        host_positions = min(positions.size, num_tokens)
    else:
        num_tokens = -(max_tokens if num_positions < 0 else min(max_tokens, num_positions)) - 1
        host_positions = positions.size
    num_writes, num_ids = _size_writes(blocks, layout, counts, ranges, dirty)
    at_start_loc = HEADER_WORDS
    at_computed = _align(at_start_loc + query_start_loc.size)
    at_positions = _align(at_computed + num_computed_tokens.size)
    at_writes = _align(at_positions + 2 * host_positions)
    at_payload = _align(at_writes + num_writes * WRITE_WORDS)
    at_gather = _align(at_payload + num_ids)
    num_gather = max(rows.size, reqs_seen) if mode == _STABLE else 0
    words = _align(at_gather + num_gather)
    if words > out.size:
        return _GROW, words, 0

    out[at_start_loc : at_start_loc + query_start_loc.size] = query_start_loc
    out[at_computed : at_computed + num_computed_tokens.size] = num_computed_tokens
    if host_positions:
        out[at_positions : at_positions + 2 * host_positions].view(np.int64)[:] = positions[:host_positions]
    changed = False
    if mode == _STABLE:
        changed = has_windows
        changed |= _place_rows(out, at_gather, batch, versions, ranges, rows, reqs_seen, counts.shape[0])
    _put_writes(out, at_writes, at_payload, blocks, layout, counts, ranges, dirty, versions, mode)
    if mode == _STABLE:
        _show_rows(batch, versions, rows, reqs_seen)
    if not changed:
        num_gather, words = 0, at_gather

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
    most = max(num_tokens if num_tokens >= 0 else -num_tokens - 1, tokens_padded, tokens_seen)
    key = np.int64(bucket(words)) | np.int64(token_class(most)) << 32
    key |= np.int64(token_class(num_gather)) << 36 | np.int64(1 if num_writes else 0) << 40
    return 0, key, num_tokens
