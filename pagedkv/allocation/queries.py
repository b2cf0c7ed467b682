"""Questions about running sequences, compiled: they change nothing."""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.admission import num_new_blocks
from pagedkv.allocation.block_records import REFS
from pagedkv.allocation.group_rules import (
    BLOCK_SIZE,
    HASHES,
    INTERLEAVE,
    RANK,
    WORLD_SIZE,
    first_needed_block,
)
from pagedkv.allocation.matching import block_at, longest_hit
from pagedkv.allocation.row_writing import base_of
from pagedkv.allocation.unpacking import unpack
from pagedkv.compiled import compiled
from pagedkv.constants import PAD_SLOT_ID

Array = s.Array
Int = s.Int

__all__ = ["common_prefix", "free_hits", "match", "needed_blocks", "read", "translate"]


@compiled
def read(state: Array, handles: Array, column: int) -> tuple[int, int, Array]:
    """One number of each sequence; (fault, index at fault, int32 [n])."""
    _, _, m = unpack(state)
    out = np.empty(handles.size, np.int32)
    for i in range(handles.size):
        at = s.place_of(m.sequences, handles[i])
        if at < 0:
            return s.BAD_HANDLE, i, out
        out[i] = m.sequences[at, column]
    return s.GOOD, 0, out


@compiled
def match(state: Array, handle: int) -> tuple[int, int]:
    """Find and note the longest hit that leaves a token to compute; (fault, tokens)."""
    pool, _, m = unpack(state)
    at = s.place_of(m.sequences, handle)
    if at < 0:
        return s.BAD_HANDLE, 0
    line = m.sequences[at]
    if line[s.ROW] >= 0:
        return s.RUNS, 0
    hit = 0
    if m.limits[s.PAGE_SIZE] > 0:
        hit = longest_hit(pool.keys, pool.entries, m, line, line[s.NUM_TOKENS] - 1, m.limits[s.ALIGNMENT])
    line[s.MATCHED] = hit
    return s.GOOD, hit


@compiled
def free_hits(state: Array, handle: int) -> tuple[int, int]:
    """Count the blocks of the hit that was noted which nobody holds; (fault, blocks)."""
    pool, _, m = unpack(state)
    at = s.place_of(m.sequences, handle)
    if at < 0:
        return s.BAD_HANDLE, 0
    line = m.sequences[at]
    num = 0
    for g in range(m.groups.shape[0]):
        if m.groups[g, HASHES] == 0:
            continue
        first = first_needed_block(m.groups, g, line[s.MATCHED])
        for j in range(first, line[s.MATCHED] // m.groups[g, BLOCK_SIZE]):
            block = block_at(pool.keys, pool.entries, m, line, g, j)
            num += block != 0 and pool.records[block, REFS] == 0
    return s.GOOD, num


@compiled
def translate(state: Array, handles: Array, positions: Array, g: int, out: Array) -> tuple[int, int]:
    """out[i] = slot of a position of a sequence, PAD where it has none here; (fault, index at fault).

    With o the offset in the block of all ranks, a position is here iff (o // interleave) % world == rank, and
    its slot there is block * size / world + o // (world * interleave) * interleave + o % interleave.
    """
    _, mirror, m = unpack(state)
    size, world, stride = m.groups[g, BLOCK_SIZE], m.groups[g, WORLD_SIZE], m.groups[g, INTERLEAVE]
    for i in range(handles.size):
        at = s.place_of(m.sequences, handles[i])
        if at < 0:
            return s.BAD_HANDLE, i
        row = m.sequences[at, s.ROW]
        column = positions[i] // size
        out[i] = PAD_SLOT_ID
        if row >= 0 and positions[i] >= 0 and column < mirror.counts[g, row]:
            block = np.int64(mirror.blocks[base_of(mirror, g, row) + column])
            offset = positions[i] - column * size
            if block != 0 and offset // stride % world == m.groups[g, RANK]:
                out[i] = block * (size // world) + offset // (world * stride) * stride + offset % stride
    return s.GOOD, 0


@compiled
def common_prefix(state: Array, handles: Array, g: int) -> tuple[int, int, int]:
    """Leading blocks that all sequences hold; (fault, index at fault, blocks)."""
    _, mirror, m = unpack(state)
    shared = mirror.blocks.size
    first = np.int64(0)
    for i in range(handles.size):
        at = s.place_of(m.sequences, handles[i])
        if at < 0:
            return s.BAD_HANDLE, i, 0
        row = m.sequences[at, s.ROW]
        if row < 0:
            return s.NOT_RUNNING, i, 0
        base = base_of(mirror, g, row)
        if i == 0:
            first = base
        shared = min(shared, mirror.counts[g, row])
        j = 0
        while (
            j < shared
            and mirror.blocks[base + j] != 0
            and mirror.blocks[base + j] == mirror.blocks[first + j]
        ):
            j += 1
        shared = j
    return s.GOOD, 0, shared if handles.size else 0


@compiled
def needed_blocks(state: Array, handles: Array, num_new: Array, lookahead: int) -> tuple[int, int, Array]:
    """Blocks that each sequence would take, hits and copies left out; (fault, index at fault, int32 [n])."""
    _, mirror, m = unpack(state)
    out = np.zeros(handles.size, np.int32)
    for i in range(handles.size):
        at = s.place_of(m.sequences, handles[i])
        if at < 0:
            return s.BAD_HANDLE, i, out
        if num_new[i] < 1:
            return s.BAD_COUNT, i, out
        line = m.sequences[at]
        start = line[s.NUM_COMPUTED] if line[s.ROW] >= 0 else line[s.MATCHED]
        num_tokens = min(np.int64(start) + num_new[i], m.limits[s.MAX_MODEL_LEN])
        num_slots = min(num_tokens + lookahead, m.limits[s.MAX_MODEL_LEN])
        for g in range(m.groups.shape[0]):
            held = line[s.MATCHED] // m.groups[g, BLOCK_SIZE]
            if line[s.ROW] >= 0:
                held = mirror.counts[g, line[s.ROW]]
            out[i] += num_new_blocks(m, line, g, held, num_slots, num_tokens)
    return s.GOOD, 0, out
