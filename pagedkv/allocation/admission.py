"""The first half of an allocation, compiled: what each sequence of a batch needs, and how many fit.

What a sequence needs is reserved as it is counted, so that the next one sees it: a hit block gets its
reference (a free one stays in the queue until `placement`), a block to be copied its pin. Reservations of
the sequences that do not fit are taken back.
"""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.block_records import NUM_FREE, PINS, REFS
from pagedkv.allocation.group_rules import (
    BLOCK_SIZE,
    CROSS,
    ENCODER_ONLY,
    HASHES,
    KIND,
    STATE,
    STATE_ALIGNED,
    first_needed_block,
    num_required,
)
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.matching import block_at, longest_hit
from pagedkv.allocation.prefix_index import is_cached
from pagedkv.allocation.state_columns import num_state_blocks

Array = s.Array
Int = s.Int

__all__ = ["plan", "room_for_hits"]


@inlined
def _has_slots(kind: int) -> Int:
    return kind not in (STATE, STATE_ALIGNED, CROSS, ENCODER_ONLY)


@inlined
def reserve_hits(pool: Array, m: Array, line: Array, hit: int, hits: Array, used: int) -> tuple[int, int]:
    """Reference the blocks of a hit and note them; (blocks noted so far, how many of these were free)."""
    num_free = 0
    for g in range(m.groups.shape[0]):
        if m.groups[g, HASHES] == 0:
            continue
        for j in range(first_needed_block(m.groups, g, hit), hit // m.groups[g, BLOCK_SIZE]):
            block = block_at(pool.keys, pool.entries, m, line, g, j)
            num_free += pool.records[block, REFS] == 0
            pool.records[block, REFS] += 1
            hits[used] = block
            used += 1
    return used, num_free


@inlined
def reserve_copy(pool: Array, mirror: Array, m: Array, line: Array, g: int, where: int) -> Int:
    """Pin the block that the next token of group g falls into, if it must be copied before."""
    column = line[s.NUM_COMPUTED] // m.groups[g, BLOCK_SIZE]
    if not _has_slots(m.groups[g, KIND]) or column >= mirror.counts[g, line[s.ROW]]:
        return False
    block = mirror.blocks[mirror.layout[g, 0] + line[s.ROW] * mirror.layout[g, 1] + column]
    owners = pool.records[block, REFS] - pool.records[block, PINS]
    if block == 0 or (owners == 1 and not is_cached(pool.twins, block)):
        return False
    pool.records[block, PINS] += 1
    at = m.totals[s.NUM_COPIES]
    m.copies[at, 0], m.copies[at, 1] = block, where
    m.totals[s.NUM_COPIES] += 1
    return True


@inlined
def num_new_blocks(m: Array, line: Array, g: int, held: int, num_slots: int, num_tokens: int) -> Int:
    """Blocks that group g needs beyond the `held` entries of the table, NULL ones among them."""
    required = num_required(m.groups, g, num_slots, num_tokens, line[s.NUM_ENCODER])
    if m.groups[g, KIND] == STATE_ALIGNED:
        return max(num_state_blocks(m, line, g, held, required), 0)
    return max(required - held, 0)


@inlined
def take_back(pool: Array, m: Array, hits: Array, first_hit: int, num_hits: int, first_copy: int) -> None:
    """Take reservations back: the hits in [first_hit, num_hits), and the copies from `first_copy` on."""
    for k in range(first_hit, num_hits):
        pool.records[hits[k], REFS] -= 1
    for k in range(first_copy, m.totals[s.NUM_COPIES]):
        pool.records[m.copies[k, 0], PINS] -= 1
    m.totals[s.NUM_COPIES] = first_copy


@inlined
def _count(pool: Array, mirror: Array, m: Array, line: Array, i: int, num_slots: int, num_tokens: int) -> Int:
    """Blocks for one sequence whose hit is in MATCHED, copies included (and reserved)."""
    needed = 0
    for g in range(m.groups.shape[0]):
        if line[s.ROW] >= 0:
            held = mirror.counts[g, line[s.ROW]]
            if line[s.SHARES] != 0:
                needed += reserve_copy(pool, mirror, m, line, g, i * m.groups.shape[0] + g)
        else:
            held = line[s.MATCHED] // m.groups[g, BLOCK_SIZE]
        needed += num_new_blocks(m, line, g, held, num_slots, num_tokens)
    return needed


@inlined
def room_for_hits(m: Array, places: Array, hard: Array) -> Int:
    """Blocks that the hits of those that start can have."""
    room = 0
    for i in hard:
        if m.sequences[places[i], s.ROW] < 0:
            room += m.sequences[places[i], s.MATCHED] // max(m.limits[s.PAGE_SIZE], 1) * m.groups.shape[0]
    return room


@inlined
def plan(
    pool: Array,
    mirror: Array,
    m: Array,
    places: Array,
    num_new: Array,
    hard: Array,
    lookahead: int,
    exclusive: bool,
    hits: Array,
) -> tuple[int, int, int, int, int]:
    """Reserve for as many of the batch's places in `hard` as fit, all or none of them if `exclusive`.

    Returns (fault, the place that does not fit, blocks needed up to it, new blocks, number of hits); with
    no fault the place is the batch's size. A hit that shrank since it was matched is shortened in MATCHED.
    """
    longest = m.limits[s.MAX_MODEL_LEN]
    num_hits, first_copy = 0, m.totals[s.NUM_COPIES]
    free, taken, reserved, admitted = pool.counters[NUM_FREE], 0, 0, 0
    for i in hard:
        line = m.sequences[places[i]]
        start = line[s.NUM_COMPUTED]
        hits_before, copies_before, free_hits, spare = num_hits, m.totals[s.NUM_COPIES], 0, 0
        fault = s.OUT_OF_BLOCKS
        if line[s.ROW] < 0:
            if line[s.MATCHED] > 0:
                start = longest_hit(pool.keys, pool.entries, m, line, line[s.MATCHED], m.limits[s.ALIGNMENT])
                line[s.MATCHED] = start
                num_hits, free_hits = reserve_hits(pool, m, line, start, hits, num_hits)
            if m.totals[s.NUM_RUNNING] + admitted > 0:
                spare = m.limits[s.WATERMARK]
            if admitted == m.rows[0]:
                fault, spare = s.OUT_OF_ROWS, free + 1
            admitted += 1
        num_tokens = min(np.int64(start) + num_new[i], longest)
        num_slots = min(num_tokens + lookahead, longest)
        needed = _count(pool, mirror, m, line, i, num_slots, num_tokens)
        if taken + reserved + needed + free_hits + spare > free:
            wanted = taken + reserved + needed + free_hits
            first_hit = 0 if exclusive else hits_before
            take_back(pool, m, hits, first_hit, num_hits, first_copy if exclusive else copies_before)
            return fault, i, wanted, taken, hits_before
        taken += needed
        reserved += free_hits
    return s.GOOD, places.size, taken + reserved, taken, num_hits
