"""The ideal hit rate: what a pool that never evicts would find, from the trace alone."""

from pagedkv.replay.requests import HASH_BLOCK_SIZE, Requests

__all__ = ["ideal_hit_rate"]


def ideal_hit_rate(requests: Requests, alignment: int) -> float:
    """Return the share of prompt tokens that earlier prompts hold, the requests one after the other.

    Parameters
    ----------
    requests : Requests
    alignment : int
        A hit is a multiple of it, in tokens, and leaves at least one token of the prompt.
    """
    reach: dict[int, int] = {}  # prefix key -> tokens of the longest prompt so far that goes through it
    hits = 0
    for request, prompt_len in enumerate(requests.prompt_lens.tolist()):
        common = 0
        for place, key in enumerate(requests.keys_of(request)):
            end = min(prompt_len, (place + 1) * HASH_BLOCK_SIZE)
            common = max(common, min(reach.get(key, 0), end))
            reach[key] = max(reach.get(key, 0), end)
        hits += min(common, prompt_len - 1) // alignment * alignment
    return hits / max(int(requests.prompt_lens.sum()), 1)
