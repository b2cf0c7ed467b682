"""Compiled row operations of the host mirror; `HostMirror` checks and documents what they do.

The first five arguments of each are the mirror's state arrays (see `pagedkv.mirror`).
"""

from enum import IntEnum
from typing import Any

import numpy as np

from pagedkv.addresses import int32_1d, int32_2d, int32_3d, int64_2d
from pagedkv.compiled import compiled

__all__ = [
    "Fault",
    "clear_rows",
    "find_fault",
    "mark_dirty",
    "move_rows",
    "null_columns",
    "put_rows",
    "set_blocks",
    "swap_rows",
    "write_rows",
    "write_rows_at",
]

Array = Any  # the compiler sees the arrays' own types


class Fault(IntEnum):
    """What a compiled check found; it comes with (group, place in the call, value)."""

    NONE = 0
    ROW = 1
    COUNT = 2
    TOTAL = 3
    BLOCK_ID = 4
    CAPACITY = 5
    RANGE = 6
    SHAPE = 7


_NONE, _ROW, _COUNT, _TOTAL, _BLOCK_ID, _CAPACITY, _RANGE, _SHAPE = (int(fault) for fault in Fault)


@compiled
def mark_dirty(ranges: Array, dirty: Array, target: int, start: int, end: int) -> None:
    """Note for every subscriber that columns [start, end) of a row changed."""
    if start >= end:
        return
    for s in range(ranges.shape[0]):
        r = ranges[s, target]
        if r[1] == 0:
            dirty[s, 0] += 1
            dirty[s, dirty[s, 0]] = target
            r[0], r[1] = start, end
        elif start <= r[1] and end >= r[0]:
            r[0], r[1] = min(r[0], start), max(r[1], end)
        elif r[3] == 0:
            r[2], r[3] = start, end
        elif max(r[2] - end, start - r[3]) <= max(r[0] - end, start - r[1]):
            r[2], r[3] = min(r[2], start), max(r[3], end)
        else:
            r[0], r[1] = min(r[0], start), max(r[1], end)
        if r[3] != 0 and r[2] <= r[1] and r[3] >= r[0]:
            r[0], r[1] = min(r[0], r[2]), max(r[1], r[3])
            r[2], r[3] = 0, 0


@compiled
def find_fault(
    layout: Array, counts: Array, rows: Array, lengths: Array, ids: Array, replace: bool
) -> tuple[int, int, int, int]:
    """Check the arguments of `write_rows`; returns the fault, its group, place in the call, and value."""
    G, R = counts.shape
    n = rows.size
    if lengths.shape[0] != G or lengths.shape[1] != n:
        return _SHAPE, 0, lengths.shape[0], lengths.shape[1]
    for i in range(n):
        if rows[i] < 0 or rows[i] >= R:
            return _ROW, 0, i, rows[i]
    total = 0
    for g in range(G):
        for i in range(n):
            if lengths[g, i] < -1:
                return _COUNT, g, i, lengths[g, i]
            total += max(lengths[g, i], 0)
    if total != ids.size:
        return _TOTAL, 0, ids.size, total
    k = 0
    for g in range(G):
        for i in range(n):
            for _ in range(lengths[g, i]):
                if ids[k] < 0 or ids[k] > layout[g, 2]:
                    return _BLOCK_ID, g, i, ids[k]
                k += 1
    for g in range(G):
        fault, done, want = -1, 0, 0
        for i in range(n):  # counts grow here, so that a repeated row is judged by its sum, and shrink again
            length = max(lengths[g, i], 0)
            want = length if replace else counts[g, rows[i]] + length
            if want > layout[g, 1]:
                fault = i
                break
            if not replace:
                counts[g, rows[i]] = want
                done += 1
        for i in range(done):
            counts[g, rows[i]] -= max(lengths[g, i], 0)
        if fault >= 0:
            return _CAPACITY, g, fault, want
    return _NONE, 0, 0, 0


@compiled
def write_rows(
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    rows: Array,
    lengths: Array,
    ids: Array,
    replace: bool,
) -> bool:
    """Append ids to rows, or replace them; False, and nothing changed, where `find_fault` finds one."""
    if find_fault(layout, counts, rows, lengths, ids, replace)[0] != _NONE:
        return False
    put_rows(blocks, layout, counts, ranges, dirty, rows, lengths, ids, replace)
    return True


@compiled
def put_rows(
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    rows: Array,
    lengths: Array,
    ids: Array,
    replace: bool,
) -> None:
    """Do what `write_rows` does, with arguments that were checked."""
    k = 0
    for g in range(counts.shape[0]):
        for i in range(rows.size):
            length = lengths[g, i]
            if length < 0 or (length == 0 and not replace):
                continue
            row = rows[i]
            old = counts[g, row]
            start = 0 if replace else old
            base = layout[g, 0] + np.int64(row) * layout[g, 1]
            for c in range(length):
                blocks[base + start + c] = ids[k + c]
            k += length
            for c in range(start + length, old):
                blocks[base + c] = 0
            counts[g, row] = start + length
            mark_dirty(ranges, dirty, g * counts.shape[1] + row, start, max(start + length, old))


@compiled
def write_rows_at(state: Array, rows: Array, lengths: Array, ids: Array, replace: bool) -> bool:
    """`write_rows` with the state by address: blocks, layout, counts, ranges and dirty in that order."""
    return write_rows(
        int32_1d(state, 0),
        int64_2d(state, 1),
        int32_2d(state, 2),
        int32_3d(state, 3),
        int32_2d(state, 4),
        rows,
        lengths,
        ids,
        replace,
    )


@compiled
def clear_rows(
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    groups: tuple[int, int],
    rows: Array,
    keep: Array,
) -> None:
    """Shorten rows to `keep` blocks (to none where `keep` is empty) in a range of groups."""
    for g in range(groups[0], groups[1]):
        for i in range(rows.size):
            row = rows[i]
            start = keep[i] if keep.size else 0
            base = layout[g, 0] + np.int64(row) * layout[g, 1]
            end = counts[g, row]
            if start >= end:
                continue
            blocks[base + start : base + end] = 0
            counts[g, row] = start
            mark_dirty(ranges, dirty, g * counts.shape[1] + row, start, end)


@compiled
def move_rows(
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    groups: tuple[int, int],
    srcs: Array,
    tgts: Array,
) -> None:
    """Move rows pair by pair; the source becomes empty, and a row moved onto itself stays."""
    R = counts.shape[1]
    for g in range(groups[0], groups[1]):
        for i in range(srcs.size):
            src, tgt = srcs[i], tgts[i]
            if src == tgt:
                continue
            a = layout[g, 0] + np.int64(src) * layout[g, 1]
            b = layout[g, 0] + np.int64(tgt) * layout[g, 1]
            num, old = counts[g, src], counts[g, tgt]
            blocks[b : b + num] = blocks[a : a + num]
            if old > num:
                blocks[b + num : b + old] = 0
            blocks[a : a + num] = 0
            counts[g, tgt], counts[g, src] = num, 0
            mark_dirty(ranges, dirty, g * R + tgt, 0, max(num, old))
            mark_dirty(ranges, dirty, g * R + src, 0, num)


@compiled
def swap_rows(
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    groups: tuple[int, int],
    a_rows: Array,
    b_rows: Array,
) -> None:
    """Exchange rows pair by pair, in order, in a range of groups."""
    R = counts.shape[1]
    for g in range(groups[0], groups[1]):
        for i in range(a_rows.size):
            row_a, row_b = a_rows[i], b_rows[i]
            if row_a == row_b:
                continue
            a = layout[g, 0] + np.int64(row_a) * layout[g, 1]
            b = layout[g, 0] + np.int64(row_b) * layout[g, 1]
            num = max(counts[g, row_a], counts[g, row_b])
            for c in range(num):
                blocks[a + c], blocks[b + c] = blocks[b + c], blocks[a + c]
            counts[g, row_a], counts[g, row_b] = counts[g, row_b], counts[g, row_a]
            mark_dirty(ranges, dirty, g * R + row_a, 0, num)
            mark_dirty(ranges, dirty, g * R + row_b, 0, num)


@compiled
def null_columns(
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    group: int,
    rows: Array,
    starts: Array,
    ends: Array,
) -> tuple[int, int, int, int]:
    """Set columns [start, end) of rows to NULL and keep the counts."""
    for i in range(rows.size):
        if starts[i] > ends[i] or ends[i] > counts[group, rows[i]]:
            return _RANGE, group, i, ends[i]
    for i in range(rows.size):
        base = layout[group, 0] + np.int64(rows[i]) * layout[group, 1]
        blocks[base + starts[i] : base + ends[i]] = 0
        mark_dirty(ranges, dirty, group * counts.shape[1] + rows[i], starts[i], ends[i])
    return _NONE, 0, 0, 0


@compiled
def set_blocks(
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    group: int,
    rows: Array,
    columns: Array,
    ids: Array,
) -> tuple[int, int, int, int]:
    """Replace single live entries."""
    for i in range(rows.size):
        if columns[i] >= counts[group, rows[i]]:
            return _RANGE, group, i, columns[i]
    for i in range(rows.size):
        base = layout[group, 0] + np.int64(rows[i]) * layout[group, 1]
        blocks[base + columns[i]] = ids[i]
        mark_dirty(ranges, dirty, group * counts.shape[1] + rows[i], columns[i], columns[i] + 1)
    return _NONE, 0, 0, 0
