"""Packing the writes: the mirror's dirty ranges as records of columns, with the ids that they carry."""

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
from pagedkv.tables.modes import BATCH_ORDER, STABLE

__all__ = ["put_writes", "size_writes"]

Array = Any


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
def size_writes(blocks: Array, layout: Array, counts: Array, ranges: Array, dirty: Array) -> tuple[int, int]:
    """Count the records and ids that the dirty ranges need."""
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
def put_writes(
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
    """Write records and ids, and take the ranges as sent."""
    R = counts.shape[1]
    source = 0
    for k in range(1, dirty[0] + 1):
        target = dirty[k]
        g = target // R
        row = target - g * R
        base = layout[g, 0] + np.int64(row) * layout[g, 1]
        position = row
        if mode != BATCH_ORDER:
            position = versions[1, row] if mode == STABLE else -1
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
