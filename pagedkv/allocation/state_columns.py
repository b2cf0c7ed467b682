"""Where a row of recurrent states has its blocks ("align"), compiled.

    columns before ceil(computed / block_size)   kept: the last has the state after the computed tokens
    then                                         NULL, up to the column of the step's last token
    the last 1 + SPARE                           the state that the step leaves, and its drafts'

A step that ends in the last kept column goes on in place: only the drafts' blocks stand behind it then. What
stands behind the kept columns holds nothing yet; a commit says what of it does.
"""

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.group_rules import BLOCK_SIZE, SPARE, num_required
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.row_writing import base_of, set_capacity
from pagedkv.mirror import mark_dirty

Array = s.Array
Int = s.Int

__all__ = ["move_state", "num_columns_ahead", "num_state_blocks", "place_states"]


@inlined
def _num_kept(m: Array, line: Array, g: int) -> Int:
    """Columns up to that of the last computed token."""
    size = m.groups[g, BLOCK_SIZE]
    return (line[s.NUM_COMPUTED] + size - 1) // size


@inlined
def num_state_blocks(m: Array, line: Array, g: int, held: int, required: int) -> Int:
    """Blocks that a row takes whose `held` columns become `required`; -1 where it gives one back."""
    kept, most = _num_kept(m, line, g) if line[s.ROW] >= 0 else held, m.groups[g, SPARE] + 1
    return min(required - kept, most) - min(held - kept, most)


@inlined
def place_states(
    mirror: Array,
    m: Array,
    line: Array,
    g: int,
    num_tokens: int,
    new: Array,
    used: int,
    back: Array,
    num_back: int,
) -> tuple[int, int]:
    """Put the blocks that hold nothing yet where a step that ends after `num_tokens` writes.

    The row grows, or shrinks where it was allocated for more before. Returns how many blocks of `new` are
    used up, and how many to be freed are in `back`.
    """
    row, most = line[s.ROW], m.groups[g, SPARE] + 1
    held = mirror.counts[g, row]
    required = num_required(m.groups, g, num_tokens, num_tokens, 0)
    if required == held:
        return used, num_back
    base, kept = base_of(mirror, g, row), _num_kept(m, line, g)
    num = min(held - kept, most)
    source, target = held - num, required - min(required - kept, most)
    first = min(source, target)
    if num > required - target:  # one too many: the step goes on in place
        back[num_back] = mirror.blocks[base + source]
        mirror.blocks[base + source] = 0
        num_back += 1
        source += 1
        num -= 1
    if source == target:
        first = min(held, required)  # nothing moves
    for i in range(num):
        j = num - 1 - i if source < target else i  # the blocks' old and new columns may overlap
        block = mirror.blocks[base + source + j]
        mirror.blocks[base + source + j] = 0
        mirror.blocks[base + target + j] = block
    for j in range(target + num, required):
        mirror.blocks[base + j] = new[used]
        used += 1
    mirror.counts[g, row] = required
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + row, first, max(held, required))
    return used, num_back


@inlined
def num_columns_ahead(mirror: Array, m: Array, at: int, g: int, computed: int) -> Int:
    """How far the running state stands behind the column of the last computed token."""
    size, held = m.groups[g, BLOCK_SIZE], mirror.counts[g, m.sequences[at, s.ROW]]
    return held - m.groups[g, SPARE] - (computed + size - 1) // size


@inlined
def move_state(mirror: Array, m: Array, at: int, g: int, out: Array, used: int) -> Int:
    """Move a running state, and its drafts' blocks, to the column of the last computed token.

    It stands further right where drafts of the step were rejected. What stood there or between, the state
    before, is noted in `out`.
    """
    line = m.sequences[at]
    row, ahead = line[s.ROW], num_columns_ahead(mirror, m, at, g, line[s.NUM_COMPUTED])
    if ahead <= 0:
        return used
    base, held = base_of(mirror, g, row), mirror.counts[g, row]
    running = held - m.groups[g, SPARE] - 1
    for j in range(running - 1, running - ahead - 1, -1):
        if mirror.blocks[base + j] != 0:
            out[used] = mirror.blocks[base + j]
            used += 1
    for j in range(running, held):
        mirror.blocks[base + j - ahead] = mirror.blocks[base + j]
    for j in range(held - ahead, held):
        mirror.blocks[base + j] = 0
    mirror.counts[g, row] = held - ahead
    mark_dirty(mirror.ranges, mirror.dirty, g * mirror.counts.shape[1] + row, running - ahead, held)
    set_capacity(mirror, m, line)
    line[s.ALLOCATED] = min(line[s.ALLOCATED], line[s.CAPACITY])
    return used
