"""What happens when tokens are computed, compiled: blocks are published, and those out of sight freed."""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.group_rules import (
    BLOCK_SIZE,
    FULL,
    HASHES,
    KIND,
    SPARE,
    STATE_ALIGNED,
    first_needed_block,
)
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.prefix_index import is_cached, store
from pagedkv.allocation.publishing import with_group
from pagedkv.allocation.references import release_into
from pagedkv.allocation.row_writing import base_of, set_next_event
from pagedkv.allocation.state_columns import move_state, num_columns_ahead
from pagedkv.allocation.unpacking import unpack
from pagedkv.compiled import compiled
from pagedkv.mirror import mark_dirty

Array = s.Array
Int = s.Int

__all__ = ["commit"]


@inlined
def _publish(pool: Array, mirror: Array, m: Array, at: int, g: int) -> None:
    """Make the blocks of group g reachable whose tokens are known, hashed and computed."""
    line = m.sequences[at]
    size, hashes = m.groups[g, BLOCK_SIZE], m.groups[g, HASHES]
    settled = min(line[s.NUM_COMPUTED], line[s.NUM_TOKENS])
    end = min(settled // size, line[s.NUM_HASHED] // hashes)
    start = m.cursors[at, g, s.PUBLISHED]
    if start >= end:
        return
    m.cursors[at, g, s.PUBLISHED] = end
    if m.groups[g, KIND] == STATE_ALIGNED:  # only a state that a step ended with is the state at a boundary
        running = mirror.counts[g, line[s.ROW]] - m.groups[g, SPARE]
        if line[s.NUM_COMPUTED] != end * size or running != end:
            return
        start = end - 1
    base = base_of(mirror, g, line[s.ROW])
    for j in range(start, end):
        block = mirror.blocks[base + j]
        if block != 0 and not is_cached(pool.twins, block):
            page = line[s.EXTENT] + (j + 1) * hashes - 1
            pool.keys[block, 0] = m.keys[page, 0]
            pool.keys[block, 1] = with_group(m.keys[page, 1], g)
            tag: s.Int = np.int64(at) << 32 | j
            store(pool.counters, pool.keys, pool.twins, pool.entries, pool.log, block, tag)


@inlined
def _drop_skipped(mirror: Array, m: Array, at: int, g: int, out: Array, used: int) -> Int:
    """Replace the blocks that group g never reads again by NULL and note them, the last first."""
    line = m.sequences[at]
    row = line[s.ROW]
    start = m.cursors[at, g, s.FIRST_LIVE]
    end = min(first_needed_block(m.groups, g, line[s.NUM_COMPUTED]), mirror.counts[g, row])
    if start >= end:
        return used
    m.cursors[at, g, s.FIRST_LIVE] = end
    base = base_of(mirror, g, row)
    for j in range(end - 1, start - 1, -1):
        if mirror.blocks[base + j] != 0:
            out[used] = mirror.blocks[base + j]
            mirror.blocks[base + j] = 0
            used += 1
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + row, start, end)
    return used


@inlined
def _num_skipped_blocks(mirror: Array, m: Array, at: int, computed: int) -> Int:
    """Most blocks that a commit can free for one sequence."""
    num = 0
    for g in range(m.groups.shape[0]):
        if m.groups[g, KIND] != FULL:
            num += max(0, first_needed_block(m.groups, g, computed) - m.cursors[at, g, s.FIRST_LIVE])
        if m.groups[g, KIND] == STATE_ALIGNED:
            num += max(0, num_columns_ahead(mirror, m, at, g, computed))
    return num


@inlined
def _settle(m: Array, places: Array, computed: Array, before: Array, busy: Array) -> tuple[int, int, int]:
    """Note what is computed, and for whom a block is due; (fault, index at fault, how many).

    On a fault everything is as it was; `before` keeps it.
    """
    sequences = m.sequences
    num_busy = 0
    for i in range(places.size):
        at, count = places[i], computed[i]
        before[i] = sequences[at, s.NUM_COMPUTED]
        known = count <= sequences[at, s.NUM_TOKENS] and count <= sequences[at, s.ALLOCATED]
        if sequences[at, s.ROW] < 0 or count < before[i] or not known:
            for k in range(i):
                sequences[places[k], s.NUM_COMPUTED] = before[k]
            return s.NOT_RUNNING if sequences[at, s.ROW] < 0 else s.BAD_COUNT, i, 0
        sequences[at, s.NUM_COMPUTED] = count
        if count >= sequences[at, s.NEXT_EVENT]:
            busy[num_busy] = i
            num_busy += 1
    return s.GOOD, 0, num_busy


@inlined
def _room(mirror: Array, m: Array, places: Array, computed: Array, busy: Array) -> Int:
    """How many blocks can be freed at most."""
    room = 0
    for i in busy:
        room += _num_skipped_blocks(mirror, m, places[i], computed[i])
    return room


@inlined
def _publish_and_drop(
    pool: Array, mirror: Array, m: Array, places: Array, busy: Array, out: Array, scratch: Array, defer: bool
) -> Int:
    """Do what is due for busy sequences; returns how many blocks are in `out` and still held."""
    used = 0
    for i in busy:
        at = places[i]
        for g in range(m.groups.shape[0]):
            if m.groups[g, KIND] == STATE_ALIGNED:
                used = move_state(mirror, m, at, g, out, used)
            if m.groups[g, HASHES] > 0:
                _publish(pool, mirror, m, at, g)
            if out.size > 0:
                used = _drop_skipped(mirror, m, at, g, out, used)
        if used > 0 and not defer:
            release_into(pool.records, pool.counters, pool.twins, out[:used], False, scratch)
            used = 0
        set_next_event(mirror, m, at)
    return used


@compiled
def commit(state: Array, handles: Array, computed: Array, defer: bool) -> tuple[int, int, Array]:
    """Settle a batch; (fault, index at fault, blocks to free later if `defer`)."""
    pool, mirror, m = unpack(state)
    before, busy = np.empty(handles.size, np.int32), np.empty(handles.size, np.int32)
    nothing = np.empty(0, np.int32)
    fault, at = s.places_of(m, handles)
    if fault != s.GOOD:
        return fault, at, nothing
    places = m.batch_places[: handles.size]
    fault, at, num_busy = _settle(m, places, computed, before, busy)
    if fault != s.GOOD:
        return fault, at, nothing
    busy = busy[:num_busy]
    out = np.empty(_room(mirror, m, places, computed, busy), np.int32)
    num_left = _publish_and_drop(pool, mirror, m, places, busy, out, np.empty_like(out), defer)
    return s.GOOD, 0, out[:num_left]
