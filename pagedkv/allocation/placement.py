"""The second half of an allocation, compiled: blocks leave the queue and enter tables and mirror."""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.admission import plan, room_for_hits
from pagedkv.allocation.block_records import NEXT, UNLINKED
from pagedkv.allocation.free_queue import unlink
from pagedkv.allocation.group_rules import KIND, STATE_ALIGNED
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.references import take
from pagedkv.allocation.row_writing import place_hit, place_new, replace, set_capacity, set_next_event
from pagedkv.allocation.state_columns import place_states
from pagedkv.allocation.unpacking import unpack
from pagedkv.compiled import compiled

Array = s.Array
Int = s.Int

__all__ = ["allocate"]


@inlined
def _admit(m: Array, line: Array) -> None:
    """Give a sequence a row, and count it once, however often it was refused before."""
    m.rows[0] -= 1
    line[s.ROW] = m.rows[1 + m.rows[0]]
    line[s.NUM_COMPUTED] = line[s.MATCHED]
    m.totals[s.NUM_RUNNING] += 1
    if line[s.NUM_PREEMPTIONS] > 0:
        m.totals[s.QUERIED_AGAIN] += line[s.NUM_TOKENS]
        m.totals[s.HIT_AGAIN] += line[s.MATCHED]
        return
    m.totals[s.QUERIED] += line[s.NUM_TOKENS]
    m.totals[s.HIT] += line[s.MATCHED]
    slot = m.totals[s.ADMITTED] % m.recent.shape[0]
    m.recent[slot, 0], m.recent[slot, 1] = line[s.NUM_TOKENS], line[s.MATCHED]
    m.totals[s.ADMITTED] += 1


@inlined
def _sort_out(
    m: Array, places: Array, num_new: Array, lookahead: int, computed: Array, before: Array, hard: Array
) -> tuple[int, int, int]:
    """Note who needs more than it has, or must look before it writes; (fault, index, how many).

    For the others it is noted at once that they were allocated for; `before` has what stood there.
    """
    sequences, longest, states = m.sequences, m.limits[s.MAX_MODEL_LEN], m.limits[s.STATES]
    num_hard = 0
    for i in range(places.size):
        at = places[i]
        if num_new[i] < 1:
            return s.BAD_COUNT, i, 0
        start = sequences[at, s.NUM_COMPUTED]
        computed[i] = start
        num_tokens = min(np.int64(start) + num_new[i], longest)
        num_slots = min(num_tokens + lookahead, longest)
        before[i] = sequences[at, s.ALLOCATED]
        is_less = states != 0 and num_tokens < before[i]  # a state may have to go back
        if num_slots > sequences[at, s.CAPACITY] or sequences[at, s.SHARES] != 0 or is_less:
            hard[num_hard] = i
            num_hard += 1
        else:
            sequences[at, s.ALLOCATED] = max(num_tokens if states != 0 else num_slots, before[i])
    return s.GOOD, 0, num_hard


@inlined
def _take_back(m: Array, places: Array, before: Array, first: int, end: int) -> None:
    """Undo what `_sort_out` noted for the running sequences of a batch from `first` to `end`."""
    for i in range(first, end):
        if m.sequences[places[i], s.ROW] >= 0:
            m.sequences[places[i], s.ALLOCATED] = before[i]


@inlined
def _place(
    pool: Array,
    mirror: Array,
    m: Array,
    at: int,
    i: int,
    num_new: int,
    lookahead: int,
    new: Array,
    hits: Array,
    back: Array,
    used: tuple[int, int, int, int],
) -> tuple[int, int, int, int]:
    """Write one sequence's hits, copies and new blocks, and note blocks to give back.

    `used` says how far these four are used up.
    """
    used_hits, copy, used_new, num_back = used
    line = m.sequences[at]
    admitted = line[s.ROW] < 0
    if admitted:
        _admit(m, line)
    num_tokens = min(np.int64(line[s.NUM_COMPUTED]) + num_new, m.limits[s.MAX_MODEL_LEN])
    num_slots = min(num_tokens + lookahead, m.limits[s.MAX_MODEL_LEN])
    G = m.groups.shape[0]
    for g in range(G):
        if admitted:
            used_hits = place_hit(mirror, m, at, g, hits, used_hits)
        elif copy < m.totals[s.NUM_COPIES] and m.copies[copy, 1] == i * G + g:
            replace(pool, mirror, m, line, g, copy, new[used_new])
            used_new += 1
            copy += 1
        if m.groups[g, KIND] == STATE_ALIGNED:
            used_new, num_back = place_states(mirror, m, line, g, num_tokens, new, used_new, back, num_back)
        else:
            used_new = place_new(mirror, m, line, g, num_slots, num_tokens, new, used_new)
    line[s.SHARES] = 0
    set_capacity(mirror, m, line)
    before = 0 if admitted else line[s.ALLOCATED]
    line[s.ALLOCATED] = num_tokens if m.limits[s.STATES] else max(min(num_slots, line[s.CAPACITY]), before)
    set_next_event(mirror, m, at)
    return used_hits, copy, used_new, num_back


@inlined
def _place_all(
    pool: Array,
    mirror: Array,
    m: Array,
    places: Array,
    num_new: Array,
    hard: Array,
    fitting: int,
    lookahead: int,
    new: Array,
    hits: Array,
    back: Array,
    first_copy: int,
    computed: Array,
) -> Int:
    """Serve the hard ones that fit; returns how many blocks to give back are in `back`."""
    used = (0, first_copy, 0, 0)
    for i in hard:
        if i >= fitting:
            break
        used = _place(pool, mirror, m, places[i], i, num_new[i], lookahead, new, hits, back, used)
        computed[i] = m.sequences[places[i], s.NUM_COMPUTED]
    return used[3]


@inlined
def _hold_hits(pool: Array, hits: Array, num_hits: int) -> None:
    """Take hit blocks out of the queue: all of them, before anything is evicted."""
    for k in range(num_hits):
        if pool.records[hits[k], NEXT] != UNLINKED:
            unlink(pool.records, pool.counters, hits[k])


@compiled
def allocate(
    state: Array, handles: Array, num_new: Array, lookahead: int, exclusive: bool
) -> tuple[int, int, int, Array, Array, int]:
    """Allocate for a batch.

    Returns (fault, sequences done or index at fault, blocks needed, ids, computed, num_back). The ids are
    those taken and, at the end, `num_back` to free.
    """
    pool, mirror, m = unpack(state)
    computed, hard = np.empty(handles.size, np.int32), np.empty(handles.size, np.int32)
    before = np.empty(handles.size, np.int32)
    nothing = np.empty(0, np.int32)
    fault, at = s.places_of(m, handles)
    if fault != s.GOOD:
        return fault, at, 0, nothing, computed, 0
    places = m.batch_places[: handles.size]
    fault, at, num_hard = _sort_out(m, places, num_new, lookahead, computed, before, hard)
    if fault != s.GOOD:
        _take_back(m, places, before, 0, at)
        return fault, at, 0, nothing, computed, 0
    if num_hard == 0:
        return fault, handles.size, 0, nothing, computed, 0
    hard = hard[:num_hard]
    first_copy = m.totals[s.NUM_COPIES]
    hits = np.empty(room_for_hits(m, places, hard), np.int32)
    fault, fitting, needed, num_taken, num_hits = plan(
        pool, mirror, m, places, num_new, hard, lookahead, exclusive, hits
    )
    if fault != s.GOOD:
        _take_back(m, places, before, 0 if exclusive else fitting, places.size)
    if fault != s.GOOD and exclusive:
        return fault, fitting, needed, nothing, computed, 0
    _hold_hits(pool, hits, num_hits)
    most_back = hard.size * m.groups.shape[0] if m.limits[s.STATES] else 0
    ids = np.empty(num_taken + most_back, np.int32)
    new, back = ids[:num_taken], ids[num_taken:]
    take(pool.records, pool.counters, pool.keys, pool.twins, pool.entries, pool.log, new)
    num_back = _place_all(
        pool, mirror, m, places, num_new, hard, fitting, lookahead, new, hits, back, first_copy, computed
    )
    return fault, fitting, needed, ids[: num_taken + num_back], computed, num_back
