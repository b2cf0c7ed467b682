"""alloc_extend and alloc_decode against the definition by position, and against each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import errors
from pagedkv.allocation.page_slots import alloc_decode, alloc_extend


@st.composite
def requests(draw):
    """Requests over pages of their own, and free pages that nobody holds."""
    size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    lengths = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6))
    pages = iter(draw(st.permutations(range(400))))
    prefixes, ends, last = [], [], []
    for prefix, new in lengths:
        held = [next(pages) for _ in range(-(-prefix // size))]
        prefixes.append(prefix)
        ends.append(prefix + new)
        last.append(held[-1] * size + (prefix - 1) % size if prefix else -1)
    return prefixes, ends, last, [next(pages) for _ in range(150)], size


def by_position(prefixes, ends, last, free, size):
    slots, used = [], 0
    for prefix, end, loc in zip(prefixes, ends, last, strict=True):
        held = -(-prefix // size)
        for p in range(prefix, end):
            if p // size < held:
                slots.append(loc + 1 + p - prefix)
            else:
                slots.append(free[used + p // size - held] * size + p % size)
        used += -(-end // size) - held
    return slots, used


@settings(max_examples=100, deadline=None)
@given(case=requests())
def test_extend_follows_the_definition_by_position(case):
    prefixes, ends, last, free, size = case
    _, needed = by_position(prefixes, ends, last, free * 3, size)
    if needed > len(free):
        with pytest.raises(errors.OutOfBlocksError):
            alloc_extend(*case)
        return

    slots, used = alloc_extend(*case)

    assert (slots.tolist(), used) == by_position(*case)
    assert len(set(slots.tolist())) == len(slots)
    with pytest.raises(errors.OutOfBlocksError) if used else pytest.raises(ValueError, match="page_size"):
        alloc_extend(prefixes, ends, last, free[: used - 1] if used else free, size if used else 0)


@settings(max_examples=60, deadline=None)
@given(case=requests())
def test_token_by_token_gives_the_same_slots_of_the_same_pages(case):
    """One request at a time: a decode per token takes the pages that an extend takes."""
    prefixes, ends, last, free, size = case
    for prefix, end, loc in zip(prefixes, ends, last, strict=True):
        expected, used = alloc_extend([prefix], [end], [loc], free, size)
        slots, rest, before = [], list(free), loc
        for length in range(prefix + 1, end + 1):
            slot, taken = alloc_decode([length], [before], rest, size)
            rest = rest[taken:]
            before = int(slot[0])
            slots.append(before)

        assert slots == expected.tolist()
        assert len(free) - len(rest) == used


def test_pages_that_are_missing_are_noticed_before_anything_is_written():
    """Pages of 4, two free: 0 to 8 tokens and 4 to 9 need four."""
    with pytest.raises(errors.OutOfBlocksError) as raised:
        alloc_extend([0, 4], [8, 9], [-1, 3], [7, 8], 4)

    assert (raised.value.needed, raised.value.free, raised.value.index) == (4, 2, 1)


@pytest.mark.parametrize(
    ("prefix", "length", "last_loc"), [(-1, 3, -1), (5, 4, 8), (5, 6, 10), (0, 3, 2), (4, 5, 8)]
)
def test_lengths_and_last_slots_must_fit_together(prefix, length, last_loc):
    with pytest.raises(ValueError, match="request 0 must have"):
        alloc_extend([prefix], [length], [last_loc], [1, 2, 3], 4)


def test_shapes_and_types_are_checked():
    with pytest.raises(ValueError, match="seq_lens must have shape"):
        alloc_extend([1], [2, 3], [0], [], 4)
    with pytest.raises(TypeError, match="free_pages"):
        alloc_extend([0], [1], [-1], [0.5], 4)


def test_nothing_to_do_takes_nothing():
    slots, used = alloc_extend([], [], [], [], 4)

    assert (slots.dtype, slots.size, used) == (np.int64, 0, 0)
    assert alloc_decode([], [], [3], 4)[1] == 0
