"""Packing the writes: the mirror's dirty ranges as records of columns, with the ids that they carry.

Ids are written upwards from where the section starts, records downwards from the buffer's end, so that
one pass suffices; then the records are moved down to the ids.
"""

from typing import Any

import numpy as np

from pagedkv.compiled import compiled
from pagedkv.kernels._layout import (
    WRITE_CHUNK,
    WRITE_END,
    WRITE_POSITION,
    WRITE_SOURCE,
    WRITE_START,
    WRITE_TARGET,
    WRITE_WORDS,
)
from pagedkv.tables.modes import BATCH_ORDER, BATCH_ORDER_WRITES, STABLE

__all__ = ["put_writes", "take_writes", "words_of_writes"]

Array = Any


@compiled
def _chunks(start: int, end: int) -> int:
    return (end - start + WRITE_CHUNK - 1) // WRITE_CHUNK


@compiled
def _put_run(
    out: Array, top: int, target: int, start: int, end: int, count: int, source: int, position: int
) -> int:
    for first in range(start, end, WRITE_CHUNK):
        last = min(first + WRITE_CHUNK, end)
        top -= WRITE_WORDS
        out[top + WRITE_TARGET] = target
        out[top + WRITE_START] = first
        out[top + WRITE_END] = last
        if source >= 0:
            out[top + WRITE_SOURCE] = 2 * (source + first - start) + (1 if last == count else 0)
        else:
            out[top + WRITE_SOURCE] = -2 + (1 if first == count else 0)
        out[top + WRITE_POSITION] = position
    return top


@compiled
def words_of_writes(ranges: Array, dirty: Array) -> int:
    """Words that the dirty ranges need at most."""
    words = 0
    for k in range(1, dirty[0] + 1):
        for half in (0, 2):
            start, end = ranges[dirty[k], half], ranges[dirty[k], half + 1]
            if start < end:
                words += end - start + WRITE_WORDS * (_chunks(start, end) + 3)
    return words


@compiled
def put_writes(
    out: Array,
    at: int,
    blocks: Array,
    layout: Array,
    counts: Array,
    ranges: Array,
    dirty: Array,
    versions: Array,
    mode: int,
) -> tuple[int, int]:
    """Write ids from word `at`, and records after them; returns (first word, number) of the records.

    The number is -1 where the buffer is too small. The ranges stay: `take_writes` takes them as sent.
    """
    R = counts.shape[1]
    end_of_ids, top = at, out.size
    group, first_target = 0, 0
    for k in range(1, dirty[0] + 1):
        target = dirty[k]
        while target >= first_target + R:  # a division costs more than a few steps
            group, first_target = group + 1, first_target + R
        while target < first_target:
            group, first_target = group - 1, first_target - R
        row = target - first_target
        count = counts[group, row]
        base = layout[group, 0] + np.int64(row) * layout[group, 1]
        position = -1
        if mode in (BATCH_ORDER, BATCH_ORDER_WRITES):
            position = row
        elif mode == STABLE:
            position = versions[1, row]
        for half in (0, 2):
            start, end = ranges[target, half], ranges[target, half + 1]
            if start >= end:
                continue
            # [start, dead) is NULL although live, [dead, live) holds ids, [live, end) lies past the count.
            live = min(end, max(start, count))
            dead = start
            while dead < live - 1 and blocks[base + dead] == 0:
                dead += 1
            records = _chunks(start, dead) + _chunks(dead, live) + _chunks(live, end)
            if end_of_ids + live - dead + WRITE_WORDS * records + 3 > top:
                return 0, -1
            if dead > start:
                top = _put_run(out, top, target, start, dead, -1, -1, position)
            if live > dead:
                top = _put_run(out, top, target, dead, live, count, end_of_ids - at, position)
                for c in range(dead, live):
                    out[end_of_ids + c - dead] = blocks[base + c]
                end_of_ids += live - dead
            if end > live:
                top = _put_run(out, top, target, live, end, count, -1, position)
    at_writes = (end_of_ids + 3) // 4 * 4
    num_words = out.size - top
    for w in range(num_words):
        out[at_writes + w] = out[top + w]
    return at_writes, num_words // WRITE_WORDS


@compiled
def take_writes(ranges: Array, dirty: Array, versions: Array, num_rows: int, mode: int) -> None:
    """Take the dirty ranges as sent; with stable rows, their rows have a new version."""
    for k in range(1, dirty[0] + 1):
        target = dirty[k]
        ranges[target] = 0
        if mode not in (BATCH_ORDER, BATCH_ORDER_WRITES):
            versions[0, target % num_rows] += 1
    dirty[0] = 0
