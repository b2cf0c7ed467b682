"""How a sequence is forked, compiled: shared blocks get one holder more, running states are copied."""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.block_records import PINS, REFS
from pagedkv.allocation.group_rules import BLOCK_SIZE, KIND, SPARE, STATE, STATE_ALIGNED
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.references import take
from pagedkv.allocation.row_writing import base_of, note_copy, set_capacity, set_next_event
from pagedkv.allocation.unpacking import unpack
from pagedkv.compiled import compiled
from pagedkv.mirror import mark_dirty

Array = s.Array
Int = s.Int

__all__ = ["fork", "needs"]


@inlined
def _num_inherited(mirror: Array, m: Array, line: Array, g: int) -> Int:
    """Leading entries of the parent's row that the child shares: those with computed tokens."""
    held = mirror.counts[g, line[s.ROW]]
    kind = m.groups[g, KIND]
    if kind == STATE:
        return min(held, 1)
    size = m.groups[g, BLOCK_SIZE]
    computed = (line[s.NUM_COMPUTED] + size - 1) // size
    return min(held, computed) if kind <= STATE_ALIGNED else held


@inlined
def _copied_column(m: Array, line: Array, g: int) -> Int:
    """Column of a running state, which its owner will overwrite: -1 where there is none."""
    kind, computed = m.groups[g, KIND], line[s.NUM_COMPUTED]
    if computed == 0:
        return -1
    if kind == STATE:
        return 0
    if kind == STATE_ALIGNED and computed % m.groups[g, BLOCK_SIZE] != 0:
        return computed // m.groups[g, BLOCK_SIZE]
    return -1


@inlined
def _num_new(m: Array, line: Array) -> Int:
    num = 0
    for g in range(m.groups.shape[0]):
        num += m.groups[g, SPARE]
        num += m.groups[g, KIND] == STATE or _copied_column(m, line, g) >= 0
    return num


@inlined
def _share_row(
    pool: Array, mirror: Array, m: Array, parent: Array, child: Array, g: int, new: Array, used: int
) -> Int:
    """Write the child's row of group g; returns how many new blocks are used up."""
    source, target = base_of(mirror, g, parent[s.ROW]), base_of(mirror, g, child[s.ROW])
    num, copied = _num_inherited(mirror, m, parent, g), _copied_column(m, parent, g)
    for j in range(num):
        block = mirror.blocks[source + j]
        if j == copied or m.groups[g, KIND] == STATE:
            mirror.blocks[target + j] = new[used]
            if j == copied:
                pool.records[block, REFS] += 1
                pool.records[block, PINS] += 1
                note_copy(pool, m, m.totals[s.NUM_COPIES], block, new[used])
                m.totals[s.NUM_COPIES] += 1
            used += 1
            continue
        mirror.blocks[target + j] = block
        if block != 0:
            pool.records[block, REFS] += 1
    for j in range(num, num + m.groups[g, SPARE]):
        mirror.blocks[target + j] = new[used]
        used += 1
    num += m.groups[g, SPARE]
    mirror.counts[g, child[s.ROW]] = num
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + child[s.ROW], 0, num)
    return used


@compiled
def needs(state: Array, handle: int) -> tuple[int, int]:
    """Blocks that a fork takes; (fault, blocks)."""
    _, _, m = unpack(state)
    at = s.place_of(m.sequences, handle)
    if at < 0:
        return s.BAD_HANDLE, 0
    line = m.sequences[at]
    return s.GOOD, _num_new(m, line) if line[s.ROW] >= 0 else 0


@compiled
def fork(state: Array, at: int, child_at: int) -> None:
    """Give the sequence at `child_at` the blocks of the one at `at`; there are blocks and a row for it."""
    pool, mirror, m = unpack(state)
    parent, child = m.sequences[at], m.sequences[child_at]
    if parent[s.ROW] < 0:
        return
    m.rows[0] -= 1
    child[s.ROW] = m.rows[1 + m.rows[0]]
    m.totals[s.NUM_RUNNING] += 1
    new = np.empty(_num_new(m, parent), np.int32)
    take(pool.records, pool.counters, pool.keys, pool.twins, pool.entries, pool.log, new)
    used = 0
    for g in range(m.groups.shape[0]):
        used = _share_row(pool, mirror, m, parent, child, g, new, used)
        m.cursors[child_at, g, s.FIRST_LIVE] = m.cursors[at, g, s.FIRST_LIVE]
        m.cursors[child_at, g, s.PUBLISHED] = m.cursors[at, g, s.PUBLISHED]
    child[s.NUM_COMPUTED] = child[s.ALLOCATED] = parent[s.NUM_COMPUTED]
    parent[s.SHARES] = child[s.SHARES] = 1
    set_capacity(mirror, m, child)
    set_next_event(mirror, m, child_at)
