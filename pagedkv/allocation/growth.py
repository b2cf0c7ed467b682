"""How sequences get tokens, compiled: written to their pages, and hashed as soon as a block is full."""

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.hashing import WORK_SIZE, hash_chain
from pagedkv.allocation.inlined import inlined
from pagedkv.allocation.unpacking import unpack
from pagedkv.compiled import compiled

Array = s.Array
Int = s.Int

__all__ = ["append", "hash_new", "open_line"]


@inlined
def _hash_pages(m: Array, at: int, secret: Array, start: Array, extras: Array, work: Array) -> None:
    """Hash the full pages of a sequence that have no key; `extras` has a row for each, or none at all."""
    line = m.sequences[at]
    size, extent = m.limits[s.PAGE_SIZE], line[s.EXTENT]
    first, end = extent + line[s.NUM_HASHED], extent + line[s.NUM_TOKENS] // size
    if end <= first:
        return
    parent = m.keys[first - 1] if first > extent else start
    hash_chain(secret, parent, m.tokens[first * size : end * size], size, extras, m.keys[first:end], work)
    line[s.NUM_HASHED] = end - extent


@inlined
def _fill_extras(m: Array, at: int, extras: Array) -> Int:
    """Extras of the pages that come next: one kind for the first after `add`, another for all later ones."""
    line = m.sequences[at]
    first, num = line[s.NUM_HASHED], line[s.NUM_TOKENS] // m.limits[s.PAGE_SIZE] - line[s.NUM_HASHED]
    for j in range(num):
        later = 2 if first + j > line[s.HASHED_AT_ADD] else 0
        extras[j, 0], extras[j, 1] = m.extras[at, later], m.extras[at, later + 1]
    return num


@inlined
def _write(
    m: Array,
    places: Array,
    token_ids: Array,
    lens: Array,
    secret: Array,
    start: Array,
    extras: Array,
    work: Array,
) -> None:
    size = m.limits[s.PAGE_SIZE]
    used = 0
    for i in range(places.size):
        line = m.sequences[places[i]]
        length = lens[i] if lens.size else 1
        at = line[s.EXTENT] * size + line[s.NUM_TOKENS]
        line[s.NUM_TOKENS] += length
        if size > 0:
            for k in range(length):
                m.tokens[at + k] = token_ids[used + k]
            if line[s.NUM_TOKENS] >= (line[s.NUM_HASHED] + 1) * size:
                num = _fill_extras(m, places[i], extras)
                _hash_pages(m, places[i], secret, start, extras[:num], work)
        used += length


@inlined
def _room_for(m: Array, places: Array, num_tokens: int, lens: Array) -> tuple[int, int]:
    """Whether every sequence can get its tokens; (fault, index at fault)."""
    sequences, size, longest = m.sequences, m.limits[s.PAGE_SIZE], m.limits[s.MAX_MODEL_LEN]
    total, crowded = 0, -1
    for i in range(places.size):
        place = places[i]
        length = lens[i] if lens.size else 1
        end = sequences[place, s.NUM_TOKENS] + length
        if length < 0:
            return s.BAD_COUNT, i
        if end > longest:
            return s.TOO_LONG, i
        if size > 0 and end > sequences[place, s.NUM_PAGES] * size:
            crowded = i
        total += length
    if total != num_tokens:
        return s.BAD_COUNT, -1
    return (s.OUT_OF_BLOCKS, crowded) if crowded >= 0 else (s.GOOD, 0)


@compiled
def append(
    state: Array, handles: Array, token_ids: Array, lens: Array, secret: Array, start: Array
) -> tuple[int, int]:
    """Append tokens to a batch; (fault, index at fault).

    OUT_OF_BLOCKS stands for pages here: a sequence has outgrown its extent, and must be moved first.
    """
    _, _, m = unpack(state)
    fault, at = s.places_of(m, handles)
    if fault != s.GOOD:
        return fault, at
    places = m.batch_places[: handles.size]
    fault, at = _room_for(m, places, token_ids.size, lens)
    if fault != s.GOOD:
        return fault, at
    num_pages = token_ids.size // max(m.limits[s.PAGE_SIZE], 1) + 1
    extras, work = np.empty((num_pages, 2), np.uint64), np.empty(WORK_SIZE, np.uint32)
    _write(m, places, token_ids, lens, secret, start, extras, work)
    return s.GOOD, 0


@compiled
def hash_new(state: Array, at: int, tokens: Array, secret: Array, start: Array, extras: Array) -> None:
    """Write the first tokens of a sequence to its pages, and hash the full ones."""
    _, _, m = unpack(state)
    first = m.sequences[at, s.EXTENT] * m.limits[s.PAGE_SIZE]
    for k in range(tokens.size):
        m.tokens[first + k] = tokens[k]
    m.sequences[at, s.NUM_TOKENS] = tokens.size
    _hash_pages(m, at, secret, start, extras, np.empty(WORK_SIZE, np.uint32))
    m.sequences[at, s.HASHED_AT_ADD] = m.sequences[at, s.NUM_HASHED]


@compiled
def open_line(sequences: Array, cursors: Array, extras: Array, at: int, num_encoder_tokens: int) -> None:
    """Start a sequence at a place: everything is 0 but what tells it from the one before."""
    generation = sequences[at, s.GENERATION]
    sequences[at] = 0
    cursors[at] = 0
    extras[at] = 0
    sequences[at, s.GENERATION] = generation
    sequences[at, s.LIVE] = 1
    sequences[at, s.ROW] = -1
    sequences[at, s.NUM_ENCODER] = num_encoder_tokens
