"""Tags and the loops that move them, against the formula in plain Python."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.replay.contents import Contents
from pagedkv.replay.tags import EMPTY, read_back, write_through_slots

from .runs import requests_of, traffic

MAX_MODEL_LEN = 2000


def tokens(requests, request, position):
    """What a KV cache's value depends on: the named blocks up to this one, or the request itself."""
    if position < requests.hashed_lens[request]:
        return tuple(requests.keys_of(request)[: position // 512 + 1])
    return f"request {request}"


@settings(deadline=None, max_examples=30)
@given(traffic(), st.integers(1, 3), st.data())
def test_tags_are_equal_exactly_where_the_cache_would_hold_equal_values(requests, num_groups, data):
    contents = Contents(requests, MAX_MODEL_LEN, num_groups)
    places = []
    for _ in range(20):
        request = data.draw(st.integers(0, len(requests) - 1))
        places.append((request, data.draw(st.integers(0, int(requests.total_lens[request])))))
    rows, starts = (np.array(column, np.int64) for column in zip(*places, strict=True))

    positions, tags = contents.runs(rows, starts, np.ones_like(rows))

    np.testing.assert_array_equal(starts, positions)
    assert (tags > EMPTY).all()
    for (request, position), tag in zip(places, tags.tolist(), strict=True):
        same = [
            (tokens(requests, *other), other[1]) == (tokens(requests, request, position), position)
            for other in places
        ]
        assert same == (tags == tag).tolist()


def test_runs_follow_each_other_and_may_be_empty():
    requests = requests_of((0.0, 600, 9, 1, 2), (0.0, 600, 9, 1, 3))
    contents = Contents(requests, MAX_MODEL_LEN, 1)

    positions, tags = contents.runs(np.array([0, 1, 1]), np.array([511, 5, 0]), np.array([2, 0, 513]))

    np.testing.assert_array_equal([511, 512, *range(513)], positions)
    assert tags[0] == tags[2 + 511]  # block 1 of both
    assert tags[1] != tags[2 + 512]  # blocks 2 and 3


def test_a_tag_is_described_in_words():
    requests = requests_of((0.0, 600, 9, 1, 2), (0.0, 600, 9))
    contents = Contents(requests, MAX_MODEL_LEN, 2)
    _, tags = contents.runs(np.array([0, 1]), np.array([513, 513]), np.array([1, 1]))

    assert contents.describe(int(tags[0]) * 2 + 1) == "position 513 of prefix 1 in group 1"
    assert contents.describe(int(tags[1]) * 2) == "position 513 of request 1 in group 0"
    assert contents.describe(EMPTY) == "nothing written"


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.data())
def test_what_is_written_by_slot_is_read_back_by_table_on_its_owner_alone(
    size_in_chunks, interleave, world, extra, data
):
    """Every position has one owner; each rank reads its own, and sees a wrong one."""
    block_size = size_in_chunks * interleave
    stride, columns, group, num_groups = block_size + extra, 3, 1, 2
    row = np.array(data.draw(st.permutations(range(1, 7)))[:columns], np.int32)
    length = data.draw(st.integers(0, columns * block_size * world))
    positions, tags = np.arange(length), np.arange(length) * 7 + 1
    kv = np.zeros((world, 8 * stride), np.int64)
    owners, owner_of = np.zeros(length, np.int32), {}
    for rank in range(world):
        slots = np.full(length, -1, np.int64)
        mine = [p for p in range(length) if p // interleave % world == rank]
        for place, p in enumerate(mine):  # the rank's positions lie one after the other
            slots[p] = row[place // block_size] * block_size + place % block_size
            owner_of[p] = rank
        write_through_slots(kv[rank], slots, tags, owners, block_size, stride, num_groups, group)
    np.testing.assert_array_equal(np.ones(length), owners)

    block_ids, found = row[positions // (block_size * world)], np.zeros_like(tags)
    shape = (block_size, stride, world, interleave)
    reads = [
        read_back(kv[r], block_ids, positions, tags, found, *shape, r, num_groups, group)
        for r in range(world)
    ]

    assert [(sum(o == r for o in owner_of.values()), 0, -1) for r in range(world)] == reads
    np.testing.assert_array_equal(tags * num_groups + group, found)
    if length:
        wrong = data.draw(st.integers(0, length - 1))
        block_ids[wrong] = 7
        again = read_back(
            kv[owner_of[wrong]], block_ids, positions, tags, found, *shape, owner_of[wrong], num_groups, group
        )
        assert (1, wrong) == again[1:]


def test_ids_and_slots_outside_the_cache_are_wrong_and_touch_nothing():
    kv, owners, found = np.zeros(8, np.int64), np.zeros(3, np.int32), np.zeros(3, np.int64)
    tags = np.array([1, 2, 3])

    write_through_slots(kv, np.array([-1, 8, 1 << 40]), tags, owners, 4, 4, 1, 0)
    read = read_back(kv, np.array([0, -1, 2], np.int32), np.arange(3), tags, found, 4, 4, 1, 1, 0, 1, 0)

    assert not kv.any()
    assert not owners.any()
    assert read == (3, 3, 0)
    np.testing.assert_array_equal([EMPTY] * 3, found)


def test_tokens_past_a_short_slot_mapping_are_owned_by_nobody():
    kv, owners = np.zeros(8, np.int64), np.zeros(3, np.int32)

    write_through_slots(kv, np.array([5]), np.array([1, 2, 3]), owners, 4, 4, 1, 0)

    np.testing.assert_array_equal([1, 0, 0], owners)
    np.testing.assert_array_equal([0, 0, 0, 0, 0, 1, 0, 0], kv)
