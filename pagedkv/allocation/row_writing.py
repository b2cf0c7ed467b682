"""How blocks enter table rows, compiled: hits, copies and new blocks, with their dirty ranges."""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.block_records import PINS, REFS
from pagedkv.allocation.group_rules import (
    BLOCK_SIZE,
    CHUNKED,
    CROSS,
    ENCODER_ONLY,
    HASHES,
    KIND,
    SPAN,
    SPARE,
    STATE,
    STATE_ALIGNED,
    WINDOW,
    first_needed_block,
    num_required,
)
from pagedkv.allocation.inlined import inlined
from pagedkv.constants import MAX_INT32
from pagedkv.mirror import mark_dirty

Array = s.Array
Int = s.Int

__all__ = ["base_of", "note_copy", "place_hit", "place_new", "replace", "set_capacity", "set_next_event"]


@inlined
def base_of(mirror: Array, g: int, row: int) -> Int:
    """Return where a row of group g starts in the mirror's flat array."""
    return mirror.layout[g, 0] + np.int64(row) * mirror.layout[g, 1]


@inlined
def set_capacity(mirror: Array, m: Array, line: Array) -> None:
    """Work out anew for how many tokens every group has blocks."""
    capacity = m.limits[s.MAX_MODEL_LEN]
    for g in range(m.groups.shape[0]):
        kind = m.groups[g, KIND]
        if kind in (STATE, CROSS, ENCODER_ONLY):
            continue
        held = mirror.counts[g, line[s.ROW]] - m.groups[g, SPARE]
        capacity = min(capacity, held * m.groups[g, BLOCK_SIZE])
    line[s.CAPACITY] = capacity


@inlined
def set_next_event(mirror: Array, m: Array, at: int) -> None:
    """Work out anew from how many computed tokens on a block is to be published, freed or moved."""
    line = m.sequences[at]
    event = np.int64(MAX_INT32)
    for g in range(m.groups.shape[0]):
        kind, size, span = m.groups[g, KIND], m.groups[g, BLOCK_SIZE], m.groups[g, SPAN]
        if m.groups[g, HASHES] > 0:
            event = min(event, (m.cursors[at, g, s.PUBLISHED] + 1) * size)
        end = (m.cursors[at, g, s.FIRST_LIVE] + 1) * size  # where the first block ends that may go
        if kind == WINDOW:
            event = min(event, end + span)
        elif kind == CHUNKED:
            event = min(event, (end + span - 1) // span * span)
        elif kind == STATE_ALIGNED:
            event = min(event, end + 1)
            if mirror.counts[g, line[s.ROW]] - m.groups[g, SPARE] > (line[s.NUM_COMPUTED] + size - 1) // size:
                event = min(event, line[s.NUM_COMPUTED] + 1)  # see `state_columns`: a state may have to move
    line[s.NEXT_EVENT] = event


@inlined
def place_hit(mirror: Array, m: Array, at: int, g: int, hits: Array, used: int) -> Int:
    """Write NULL and the hit blocks of one group; returns how many hits are used up."""
    line = m.sequences[at]
    hit = line[s.MATCHED]
    if m.groups[g, HASHES] == 0 or hit == 0:
        return used
    first, end = first_needed_block(m.groups, g, hit), hit // m.groups[g, BLOCK_SIZE]
    base = base_of(mirror, g, line[s.ROW])
    for j in range(first, end):
        mirror.blocks[base + j] = hits[used]
        used += 1
    mirror.counts[g, line[s.ROW]] = end
    m.cursors[at, g, s.FIRST_LIVE], m.cursors[at, g, s.PUBLISHED] = first, end
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + line[s.ROW], 0, end)
    return used


@inlined
def place_new(
    mirror: Array,
    m: Array,
    line: Array,
    g: int,
    num_slots: int,
    num_tokens: int,
    new: Array,
    used: int,
) -> Int:
    """Append new blocks to one group's row; returns how many are used up."""
    row = line[s.ROW]
    held = mirror.counts[g, row]
    required = num_required(m.groups, g, num_slots, num_tokens, line[s.NUM_ENCODER])
    if required <= held:
        return used
    base = base_of(mirror, g, row)
    for j in range(held, required):
        mirror.blocks[base + j] = new[used]
        used += 1
    mirror.counts[g, row] = required
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + row, held, required)
    return used


@inlined
def note_copy(pool: Array, m: Array, at: int, source: int, target: int) -> None:
    """Write entry `at` of the pending copies; both ends are pinned, the source already is."""
    if pool.records[source, PINS] > 1:  # perhaps itself the target of a pending copy: go to its source
        for k in range(at):
            if m.copies[k, 1] == source:
                pool.records[source, PINS] -= 1
                pool.records[source, REFS] -= 1
                source = m.copies[k, 0]
                pool.records[source, PINS] += 1
                pool.records[source, REFS] += 1
                break
    m.copies[at, 0], m.copies[at, 1] = source, target
    pool.records[target, PINS] += 1
    pool.records[target, REFS] += 1


@inlined
def replace(pool: Array, mirror: Array, m: Array, line: Array, g: int, at: int, target: int) -> None:
    """Put a new block where the one stood that pending copy `at` reads; its reference becomes the pin."""
    column = line[s.NUM_COMPUTED] // m.groups[g, BLOCK_SIZE]
    mirror.blocks[base_of(mirror, g, line[s.ROW]) + column] = target
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + line[s.ROW], column, column + 1)
    note_copy(pool, m, at, m.copies[at, 0], target)
