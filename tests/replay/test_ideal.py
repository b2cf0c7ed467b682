"""The ideal hit rate against comparing prompts token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.replay.ideal import ideal_hit_rate
from pagedkv.replay.token_ids import TokenIds

from .real_traces import real_trace
from .runs import requests_of, run, traffic


def brute_force(requests, alignment):
    tokens = TokenIds(requests)
    prompts = [tokens.prompt(request).tolist() for request in range(len(requests))]
    hits = 0
    for i, prompt in enumerate(prompts):
        longest = 0
        for earlier in prompts[:i]:
            common = 0
            while common < min(len(prompt) - 1, len(earlier)) and prompt[common] == earlier[common]:
                common += 1
            longest = max(longest, common)
        hits += longest // alignment * alignment
    return hits / sum(map(len, prompts))


@settings(deadline=None, max_examples=40)
@given(traffic(), st.sampled_from([1, 4, 6, 600]))
def test_the_ideal_equals_brute_force(requests, alignment):
    assert ideal_hit_rate(requests, alignment) == pytest.approx(brute_force(requests, alignment))


def test_a_run_with_room_and_time_reaches_the_ideal():
    requests = requests_of(*((100.0 * i, 600 + i, 9, 1, 2 + i % 2) for i in range(6)))

    engine = run(requests, num_blocks=900, max_num_batched_tokens=700)

    assert engine.memory.manager.stats().hit_rate == pytest.approx(ideal_hit_rate(requests, 4))


def test_the_mooncake_trace_repeats_37_percent():
    from pagedkv.replay.traces import read_trace

    requests = read_trace(real_trace("mooncake_conversation.jsonl")).requests

    assert ideal_hit_rate(requests, 16) == pytest.approx(0.374, abs=0.002)
