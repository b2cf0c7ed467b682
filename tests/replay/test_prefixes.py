"""The longest live prefix against trying every pair."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.replay.prefixes import LivePrefixes

from .runs import requests_of

HASH_IDS = st.lists(st.integers(0, 1), max_size=4)


@settings(deadline=None, max_examples=60)
@given(st.lists(HASH_IDS, min_size=2, max_size=7), st.data())
def test_the_longest_usable_prefix_of_a_live_sequence_is_found(all_ids, data):
    requests = requests_of(*((0.0, max(1, 512 * len(ids)), 1, *ids) for ids in all_ids))
    prefixes, live = LivePrefixes(requests), {}
    for request in range(1, len(all_ids)):
        prefixes.add(request)
        live[request] = data.draw(st.sampled_from([0, 500, 512, 1024, 1500, 4096]))  # what is computed
    for request in data.draw(st.lists(st.sampled_from(sorted(live)), unique=True)):
        prefixes.remove(request)
        del live[request]

    tokens, holder = prefixes.longest(
        0, lambda others, common: np.array([min(common, live[o]) for o in others.tolist()])
    )

    expected = max((min(512 * common(all_ids[0], all_ids[r]), live[r]) for r in live), default=0)
    assert expected == tokens
    if tokens:
        assert expected == min(512 * common(all_ids[0], all_ids[holder]), live[holder])
    else:
        assert holder == -1


def common(one, other):
    """Equal leading ids."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_nothing_is_kept_after_the_last_holder():
    requests = requests_of((0.0, 600, 1, 1, 2), (0.0, 600, 1, 1, 2), (0.0, 600, 1, 1, 2))
    prefixes = LivePrefixes(requests)
    prefixes.add(0)
    prefixes.add(1)

    prefixes.remove(0)
    assert prefixes.longest(2, lambda others, common: np.full(len(others), common)) == (1024, 1)
    prefixes.remove(1)
    assert prefixes.longest(2, lambda others, common: np.full(len(others), common)) == (0, -1)
