"""TokenIds: token ids for traces that only say where tokens are equal.

    id = key * hash_block_size + offset          inside the prompt blocks that the trace names
    id = first own id + position                 everywhere else: nobody else has these

Ids are equal exactly where tags are (modulo 2**31), so hashes of tokens find what the trace says is equal.
"""

import numpy as np

from pagedkv.checks import IntArray
from pagedkv.constants import MAX_INT32
from pagedkv.replay.requests import HASH_BLOCK_SIZE, Int64Array, Requests

__all__ = ["TokenIds"]


class TokenIds:
    """Makes a request's token ids when they are needed; none are kept.

    Parameters
    ----------
    requests : Requests
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._hashed_lens = requests.hashed_lens
        own = requests.total_lens - self._hashed_lens
        named = requests.num_prefix_keys * HASH_BLOCK_SIZE
        self._own = named + np.cumsum(own) - own - self._hashed_lens  # the id at position 0, if it were own

    def prompt(self, request: int) -> IntArray:
        """Token ids of a prompt, int32 [prompt_len]."""
        num_tokens = int(self._requests.prompt_lens[request])
        if not self._hashed_lens[request]:
            return _as_token_ids(self._own[request] + np.arange(num_tokens))
        start, end = self._requests.key_start_loc[request : request + 2]
        keys = self._requests.prefix_keys[start:end, None]
        ids = keys * HASH_BLOCK_SIZE + np.arange(HASH_BLOCK_SIZE)
        return _as_token_ids(ids.reshape(-1)[:num_tokens])

    def sampled(self, requests: Int64Array, positions: Int64Array) -> IntArray:
        """Token ids that requests sample at positions past their prompts, int32 [n]."""
        return _as_token_ids(self._own[requests] + positions)


def _as_token_ids(ids: Int64Array) -> IntArray:
    return (ids & MAX_INT32).astype(np.int32)
