"""The perfect LRU against one that holds its blocks in a plain list."""

import pytest

from pagedkv.replay.ideal import ideal_hit_rate
from pagedkv.replay.traffic import generate_trace

from .prefix_cache_bounds import lru_hit_rate, runs_of

REQUESTS = generate_trace(40, seed=3).requests


def plain_lru_hit_rate(requests, num_blocks, block_size):
    held, hits = [], 0  # least recent first
    for request, prompt in enumerate(requests.prompt_lens.tolist()):
        blocks = [(name, i) for name, count in runs_of(requests, request, block_size) for i in range(count)]
        found = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        hits += min(found, (prompt - 1) // block_size) * block_size
        used = set(blocks)
        held = ([block for block in held if block not in used] + blocks[::-1])[-num_blocks:]
    return hits / int(requests.prompt_lens.sum())


@pytest.mark.parametrize("num_blocks", [25, 60, 150])
def test_runs_are_evicted_as_single_blocks_would_be(num_blocks):
    rate = lru_hit_rate(REQUESTS, num_blocks, 64)

    assert rate == pytest.approx(plain_lru_hit_rate(REQUESTS, num_blocks, 64))
    assert 0 < rate < ideal_hit_rate(REQUESTS, 64)


def test_a_pool_without_end_hits_the_ideal():
    assert lru_hit_rate(REQUESTS, 10**9, 16) == pytest.approx(ideal_hit_rate(REQUESTS, 16))
