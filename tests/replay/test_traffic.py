"""The built-in traffic: seeded, in order, sharing prefixes as conversations do."""

import numpy as np
import pytest

from pagedkv.replay.requests import HASH_BLOCK_SIZE
from pagedkv.replay.traffic import generate_trace


@pytest.mark.parametrize("num_requests", [1, 2, 300])
def test_traffic_is_well_formed(num_requests):
    requests = generate_trace(num_requests, seed=3).requests

    assert num_requests == len(requests)
    assert requests.arrivals[0] == 0
    assert (np.diff(requests.arrivals) >= 0).all()
    assert requests.prompt_lens.min() >= 1
    assert requests.output_lens.min() >= 1
    np.testing.assert_array_equal(
        -(-requests.prompt_lens // HASH_BLOCK_SIZE), np.diff(requests.key_start_loc)
    )


def test_equal_seeds_give_equal_traffic_and_others_do_not():
    one, same, other = (generate_trace(50, seed).requests for seed in (7, 7, 8))

    np.testing.assert_array_equal(one.arrivals, same.arrivals)
    np.testing.assert_array_equal(one.prefix_keys, same.prefix_keys)
    assert one.arrivals.tolist() != other.arrivals.tolist()


def test_prompts_share_system_prompts_and_earlier_turns():
    requests = generate_trace(300, seed=0).requests
    keys, counts = np.unique(requests.prefix_keys, return_counts=True)

    openings = {requests.keys_of(r)[0] for r in range(300)}
    assert 2 <= len(openings) <= 4
    assert counts[np.isin(keys, list(openings))].sum() == 300
    turns = counts[(counts > 1) & ~np.isin(keys, list(openings))]
    assert len(turns) > 20  # blocks of a conversation come again in its later turns
