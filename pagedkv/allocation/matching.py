"""Prefix hits over several groups, compiled.

A hit of n tokens (a multiple of every group's block size) is valid if each group has cached the blocks
that it would still read, from `first_needed_block(n)` on. The longest valid one is found by shrinking a
candidate until no group objects: a missing block rules out every candidate that needs it.
"""

from pagedkv.allocation.group_rules import BLOCK_SIZE, FULL, HASHES, KIND, first_needed_block
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.prefix_index import find
from pagedkv.allocation.publishing import with_group
from pagedkv.allocation.sequence_state import EXTENT, Array, Int
from pagedkv.compiled import compiled

__all__ = ["block_at", "longest_hit"]


@inlined
def block_at(pool_keys: Array, index: Array, m: Array, line: Array, g: int, j: int) -> Int:
    """Return the cached block for logical block j of group g, 0 if there is none."""
    page = line[EXTENT] + (j + 1) * m.groups[g, HASHES] - 1
    return find(pool_keys, index, m.keys[page, 0], with_group(m.keys[page, 1], g))


@compiled
def longest_hit(pool_keys: Array, index: Array, m: Array, line: Array, limit: int, alignment: int) -> Int:
    """Return the longest valid hit of at most `limit` tokens."""
    hit = limit - limit % alignment
    for g in range(m.groups.shape[0]):  # from the left: stops at the first miss, and bounds the others
        if m.groups[g, KIND] == FULL:
            size = m.groups[g, BLOCK_SIZE]
            j = 0
            while j < hit // size and block_at(pool_keys, index, m, line, g, j) != 0:
                j += 1
            hit = min(hit, j * size // alignment * alignment)
    agreed = 0
    g = 0
    while hit > 0 and agreed < m.groups.shape[0]:
        size = m.groups[g, BLOCK_SIZE]
        j = hit // size - 1
        if m.groups[g, KIND] != FULL and m.groups[g, HASHES] > 0:
            first = first_needed_block(m.groups, g, hit)
            while j >= first and block_at(pool_keys, index, m, line, g, j) != 0:
                j -= 1
            if j >= first:
                hit = j * size // alignment * alignment
                agreed = 0
                continue
        agreed += 1
        g = (g + 1) % m.groups.shape[0]
    return hit
