"""Prefix keys: equal exactly where the leading hash ids are equal."""

from hypothesis import given, settings
from hypothesis import strategies as st

from .runs import requests_of

HASH_IDS = st.lists(st.integers(-1, 2), max_size=5)


@settings(deadline=None, max_examples=50)
@given(st.lists(HASH_IDS, min_size=1, max_size=8))
def test_keys_are_equal_exactly_where_all_leading_ids_are(all_ids):
    requests = requests_of(*((0.0, max(1, 512 * len(ids)), 1, *ids) for ids in all_ids))

    paths = [
        (key, tuple(ids[: i + 1]))
        for r, ids in enumerate(all_ids)
        for i, key in enumerate(requests.keys_of(r))
    ]
    for key, path in paths:
        assert [path == other for _, other in paths] == [key == other for other, _ in paths]
    assert requests.num_prefix_keys == len({path for _, path in paths})


def test_hashed_lens_cover_the_prompts_that_are_named():
    requests = requests_of((0.0, 600, 5, 1, 2), (0.5, 600, 5))

    assert requests.hashed_lens.tolist() == [600, 0]
    assert requests.total_lens.tolist() == [605, 605]
