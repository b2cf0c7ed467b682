"""Contents: what every position of every request should hold, as tags."""

import numpy as np

from pagedkv.replay.requests import HASH_BLOCK_SIZE, Int64Array, Requests
from pagedkv.replay.tags import describe_tag, expected_tags

__all__ = ["Contents"]


class Contents:
    """Expected tags of a trace's requests; see `pagedkv.replay.tags` for the formula.

    Parameters
    ----------
    requests : Requests
    max_model_len : int
        Above every position.
    num_groups : int
    """

    def __init__(self, requests: Requests, max_model_len: int, num_groups: int) -> None:
        self.num_groups = num_groups
        self._arrays = (requests.key_start_loc, requests.prefix_keys, requests.hashed_lens)
        self._constants = (HASH_BLOCK_SIZE, requests.num_prefix_keys, max_model_len)

    def runs(
        self, requests: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return positions and tags (without group): `counts[i]` from `starts[i]` of each request.

        Both are int64 [sum(counts)].
        """
        positions, tags = np.empty((2, int(counts.sum())), np.int64)
        expected_tags(positions, tags, requests, starts, counts, *self._arrays, *self._constants)
        return positions, tags

    def describe(self, tag: int) -> str:
        """Say in words what a tag with its group stands for."""
        return describe_tag(tag, self.num_groups, *self._constants[1:])
