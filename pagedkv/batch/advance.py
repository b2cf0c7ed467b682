"""Compiled loops of the input batch: one pass over the running requests, one over the batch.

What they work on comes as one address table (`addresses.address_table`) of

    numbers  int64 [capacity, FIELDS]  one line per known request, by the slot of its handle
    order    int64 [max_num_reqs]      slot at each position of the batch
    setup    int64 [SETUP_WORDS]       sizes, limits and thresholds
"""

from enum import IntEnum
from typing import Any, Final

import numpy as np

from pagedkv._rowops import put_rows
from pagedkv.addresses import int32_1d, int32_2d, int32_3d, int64_1d, int64_2d
from pagedkv.compiled import compiled
from pagedkv.constants import MAX_INT32

__all__ = [
    "COMPUTED",
    "DECODE_THRESHOLD",
    "FIELDS",
    "HANDLE",
    "MAX_TOKENS",
    "NUM_REQS",
    "POSITION",
    "PREEMPTED",
    "PREFILL",
    "ROW",
    "SCHEDULED",
    "SETUP_WORDS",
    "SHORT_EXTEND_THRESHOLD",
    "SLOT_MASK",
    "STAMP",
    "STEP",
    "Code",
    "advance",
    "check_running",
    "class_of",
    "is_ordered",
    "set_running",
]

Array = Any

SLOT_MASK: Final = 0xFFFFFFFF  # a handle is a slot and, above it, the generation of its use

# --- a line of `numbers` ----------------------------------------------------------------------
HANDLE: Final = 0  # -1: the slot is free
POSITION: Final = 1  # in the batch; -1: not in it
ROW: Final = 2  # table row; -1: none
COMPUTED: Final = 3  # tokens in the cache before the step
SCHEDULED: Final = 4  # tokens of the step; 0 out of the batch
PREFILL: Final = 5  # tokens known when it was admitted
STAMP: Final = 6  # the step that named it last
PREEMPTED: Final = 7  # 1: its blocks were given up, and it must be resumed
FIELDS: Final = 8

# --- setup ------------------------------------------------------------------------------------
NUM_REQS: Final = 0
STEP: Final = 1  # of the last update, refused ones included
MAX_TOKENS: Final = 2
DECODE_THRESHOLD: Final = 3  # -1: the batch is not ordered
SHORT_EXTEND_THRESHOLD: Final = 4
SETUP_WORDS: Final = 5


class Code(IntEnum):
    """What a pass over the running requests came to."""

    DONE = 0
    CHANGES = 1  # somebody comes or goes: nothing was done
    UNORDERED = 2  # done, but the batch has to be ordered
    STALE = 3
    REPEATED = 4
    PREEMPTED = 5
    LENGTH = 6  # a number below 0, or a sum of them past int32
    SHAPE = 7
    BLOCKS = 8
    TOKENS = 9


_DONE, _CHANGES, _UNORDERED, _STALE, _REPEATED, _PREEMPTED, _LENGTH, _SHAPE, _BLOCKS, _TOKENS = (
    int(c) for c in Code
)


@compiled
def class_of(computed: int, scheduled: int, decode: int, short_extend: int) -> int:
    """Place of a request in an ordered batch: 0 decode, 1 short extend, 2 long extend, 3 prefill."""
    if computed <= 0:
        return 3
    return 0 if scheduled <= decode else 1 if scheduled <= short_extend else 2


@compiled
def check_running(
    numbers: Array, handles: Array, scheduled: Array, computed: Array, step: int
) -> tuple[int, int]:
    """Look for faults of the running requests and stamp each; returns (code, place)."""
    n = handles.size
    if scheduled.size != n or computed.size not in (0, n):
        return _SHAPE, n
    code = _DONE
    for i in range(n):
        slot = handles[i] & SLOT_MASK
        if slot >= numbers.shape[0] or numbers[slot, HANDLE] != handles[i]:
            return _STALE, i
        if numbers[slot, STAMP] == step:
            return _REPEATED, i
        numbers[slot, STAMP] = step
        start = np.int64(computed[i]) if computed.size else numbers[slot, COMPUTED] + numbers[slot, SCHEDULED]
        if start < 0 or scheduled[i] < 0 or start + scheduled[i] > MAX_INT32:
            return _LENGTH, i
        if numbers[slot, POSITION] < 0:
            if numbers[slot, PREEMPTED]:
                return _PREEMPTED, i
            code = _CHANGES
    return code, 0


@compiled
def set_running(numbers: Array, handles: Array, scheduled: Array, computed: Array) -> None:
    """Let each running request go on by its step."""
    for i in range(handles.size):
        slot = handles[i] & SLOT_MASK
        if computed.size:
            numbers[slot, COMPUTED] = computed[i]
        else:
            numbers[slot, COMPUTED] += numbers[slot, SCHEDULED]
        numbers[slot, SCHEDULED] = scheduled[i]


@compiled
def _takers(num_blocks: Array) -> Array:
    # Places of those that take blocks in some group; most take none.
    G, n = num_blocks.shape
    takers = np.zeros(n, np.int32)
    for g in range(G):
        for i in range(n):
            takers[i] |= num_blocks[g, i]
    num = 0
    for i in range(n):
        if takers[i] != 0:
            takers[num] = i
            num += 1
    return takers[:num]


@compiled
def _append(numbers: Array, mirror: Array, handles: Array, num_blocks: Array, block_ids: Array) -> bool:
    layout, counts = int64_2d(mirror, 1), int32_2d(mirror, 2)
    G, n = num_blocks.shape
    if n != handles.size or counts.shape[0] != G:
        return False
    takers = _takers(num_blocks)
    rows, lengths = np.empty(takers.size, np.int32), np.empty((G, takers.size), np.int32)
    for k in range(takers.size):
        rows[k] = numbers[handles[takers[k]] & SLOT_MASK, ROW]
    used = 0
    # What `find_fault` looks for in an append, in the pass that copies the lengths: no row is named twice
    # here, so none has to be judged by a sum. Which fault it was is found again by `plan_update`.
    for g in range(G):
        for k in range(takers.size):
            length = num_blocks[g, takers[k]]
            room = min(layout[g, 1] - counts[g, rows[k]], block_ids.size - used)
            if length < 0 or length > room:
                return False
            for at in range(used, used + length):
                if block_ids[at] < 0 or block_ids[at] > layout[g, 2]:
                    return False
            lengths[g, k] = length
            used += length
    if used != block_ids.size:
        return False
    blocks, ranges, dirty = int32_1d(mirror, 0), int32_3d(mirror, 3), int32_2d(mirror, 4)
    put_rows(blocks, layout, counts, ranges, dirty, rows, lengths, block_ids, False)
    return True


@compiled
def is_ordered(numbers: Array, order: Array, setup: Array) -> bool:
    """Whether the batch stands in the order of its classes, where that is wanted."""
    decode, short_extend = setup[DECODE_THRESHOLD], setup[SHORT_EXTEND_THRESHOLD]
    last = 0
    for position in range(setup[NUM_REQS] if decode >= 0 else 0):
        line = numbers[order[position]]
        place = class_of(line[COMPUTED], line[SCHEDULED], decode, short_extend)
        if place < last:
            return False
        last = place
    return True


@compiled
def advance(
    state: Array,
    mirror: Array,
    handles: Array,
    scheduled: Array,
    computed: Array,
    num_blocks: Array,
    block_ids: Array,
) -> int:
    """Take a step of running requests that are all in the batch; returns a code.

    Everything is checked before anything is changed. `mirror` is `HostMirror.addresses`; num_blocks of
    shape [0, 0] stands for no new blocks.
    """
    numbers, order, setup = int64_2d(state, 0), int64_1d(state, 1), int64_1d(state, 2)
    setup[STEP] += 1
    code, _ = check_running(numbers, handles, scheduled, computed, setup[STEP])
    if code == _DONE and handles.size != setup[NUM_REQS]:
        code = _CHANGES
    if code == _DONE and scheduled.sum() > setup[MAX_TOKENS]:
        code = _TOKENS
    if code != _DONE:
        return code
    has_blocks = num_blocks.shape[0] > 0 or block_ids.size > 0
    if has_blocks and not _append(numbers, mirror, handles, num_blocks, block_ids):
        return _BLOCKS
    set_running(numbers, handles, scheduled, computed)
    return _DONE if is_ordered(numbers, order, setup) else _UNORDERED
