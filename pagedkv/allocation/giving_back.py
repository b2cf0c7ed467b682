"""How a sequence gives its blocks and its row back, compiled: free, preempt, truncate."""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.group_rules import BLOCK_SIZE, CROSS, KIND, STATE, STATE_ALIGNED, first_needed_block
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.references import release
from pagedkv.allocation.row_writing import base_of, set_capacity, set_next_event
from pagedkv.allocation.unpacking import unpack
from pagedkv.compiled import compiled
from pagedkv.mirror import mark_dirty

Array = s.Array
Int = s.Int

__all__ = ["give_back", "truncate"]


@inlined
def _empty_row(mirror: Array, m: Array, at: int, g: int, keep: int, out: Array, used: int) -> Int:
    """Cut a row of group g to `keep` blocks and note the others, the last first."""
    row = m.sequences[at, s.ROW]
    base, held = base_of(mirror, g, row), mirror.counts[g, row]
    for j in range(held - 1, keep - 1, -1):
        if mirror.blocks[base + j] != 0:
            out[used] = mirror.blocks[base + j]
            mirror.blocks[base + j] = 0
            used += 1
    mirror.counts[g, row] = min(keep, held)
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + row, keep, held)
    return used


@inlined
def _held(mirror: Array, row: int) -> Int:
    total = 0
    for g in range(mirror.counts.shape[0]):
        total += mirror.counts[g, row]
    return total


@inlined
def _leave(m: Array, at: int) -> None:
    """Give the row back and forget what was computed."""
    line = m.sequences[at]
    if line[s.ROW] >= 0:
        m.rows[1 + m.rows[0]] = line[s.ROW]
        m.rows[0] += 1
        m.totals[s.NUM_RUNNING] -= 1
    line[s.ROW] = -1
    line[s.NUM_COMPUTED] = line[s.CAPACITY] = line[s.MATCHED] = line[s.SHARES] = 0
    m.cursors[at] = 0


@compiled
def give_back(state: Array, handles: Array, end: bool, defer: bool) -> tuple[int, int, Array, Array]:
    """Free sequences (`end`) or preempt them; (fault, index at fault, places, blocks to free later)."""
    pool, mirror, m = unpack(state)
    nothing = np.empty(0, np.int32)
    fault, at = s.places_of(m, handles)
    if fault != s.GOOD:
        return fault, at, nothing, nothing
    places = m.batch_places[: handles.size].copy()
    room = 0
    for i in range(places.size):
        row = m.sequences[places[i], s.ROW]
        if row >= 0:
            room += _held(mirror, row)
        elif not end:
            return s.NOT_RUNNING, i, places, nothing
    out = np.empty(room, np.int32)
    first = used = 0
    for i in range(places.size):
        line = m.sequences[places[i]]
        if line[s.ROW] >= 0:
            for g in range(m.groups.shape[0]):
                used = _empty_row(mirror, m, places[i], g, 0, out, used)
        if not defer:
            release(pool.records, pool.counters, pool.twins, out[first:used], False)
            first = used
        _leave(m, places[i])
        if end:
            line[s.LIVE] = 0
            line[s.GENERATION] = line[s.GENERATION] % 0x7FFFFFFF + 1
            m.totals[s.NUM_SEQUENCES] -= 1
            m.totals[s.NUM_ENDED] += 1
        else:
            line[s.NUM_PREEMPTIONS] += 1
            m.totals[s.PREEMPTED] += 1
    return s.GOOD, 0, places, out[first:used]


@inlined
def _forget_tokens(m: Array, line: Array, num_tokens: int) -> None:
    """Know `num_tokens` tokens only, of those that were looked up, allocated for and hashed."""
    running = line[s.ROW] >= 0
    if running and m.limits[s.STATES] != 0 and num_tokens < line[s.ALLOCATED]:
        line[s.SHARES] = 1  # a state may stand where the tokens were that go: the next allocation looks
    line[s.NUM_TOKENS] = num_tokens
    line[s.MATCHED] = min(line[s.MATCHED], num_tokens - (not running))  # or ALLOCATED, where it runs
    if m.limits[s.PAGE_SIZE] > 0:
        line[s.NUM_HASHED] = min(line[s.NUM_HASHED], num_tokens // m.limits[s.PAGE_SIZE])


@compiled
def truncate(state: Array, handle: int, num_tokens: int, defer: bool) -> tuple[int, Array]:
    """Drop the tokens from `num_tokens` on; (fault, blocks to free later).

    Blocks for tokens that were never computed stay for the next ones. Where computed tokens go, their
    blocks go too: they may be shared or cached, and others must not see them written again.
    """
    pool, mirror, m = unpack(state)
    nothing = np.empty(0, np.int32)
    at = s.place_of(m.sequences, handle)
    if at < 0:
        return s.BAD_HANDLE, nothing
    line = m.sequences[at]
    if num_tokens < 1 or num_tokens > line[s.NUM_TOKENS]:
        return s.BAD_COUNT, nothing
    out = nothing
    used = 0
    if num_tokens < line[s.NUM_COMPUTED]:
        for g in range(m.groups.shape[0]):
            gone = first_needed_block(m.groups, g, num_tokens) < m.cursors[at, g, s.FIRST_LIVE]
            if gone or m.groups[g, KIND] in (STATE, STATE_ALIGNED):
                return s.NO_WAY_BACK, nothing
        out = np.empty(_held(mirror, line[s.ROW]), np.int32)
        for g in range(m.groups.shape[0]):
            size = m.groups[g, BLOCK_SIZE]
            keep = (num_tokens + size - 1) // size
            if m.groups[g, KIND] != CROSS and keep < mirror.counts[g, line[s.ROW]]:
                used = _empty_row(mirror, m, at, g, keep, out, used)
            m.cursors[at, g, s.PUBLISHED] = min(m.cursors[at, g, s.PUBLISHED], num_tokens // size)
        line[s.NUM_COMPUTED] = num_tokens
        line[s.SHARES] = 1
        set_capacity(mirror, m, line)
        set_next_event(mirror, m, at)
    _forget_tokens(m, line, num_tokens)
    if not defer:
        release(pool.records, pool.counters, pool.twins, out[:used], False)
        used = 0
    return s.GOOD, out[:used]
