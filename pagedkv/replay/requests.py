"""Requests: a whole trace as arrays, with equal prompt prefixes made equal integers.

A prompt is cut into blocks of `hash_block_size` tokens, the last one maybe partial. Traces name each block;
blocks hold equal tokens after equal prefixes exactly where their *leading* names are equal, so a name is
interned together with the path that led to it, and one integer (a prefix key) then stands for the block
and all before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["HASH_BLOCK_SIZE", "Int64Array", "Requests", "RequestsBuilder"]

HASH_BLOCK_SIZE = 512
"""Prompt tokens that one hash id of a trace stands for."""

_NO_PREFIX = -1

Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """Requests in the order of their arrival.

    Attributes
    ----------
    arrivals : ndarray of float64, shape [num_requests]
        Seconds since the first request.
    prompt_lens, output_lens : ndarray of int64, shape [num_requests]
        Tokens.
    key_start_loc : ndarray of int64, shape [num_requests + 1]
        Request r's prefix keys are ``prefix_keys[key_start_loc[r]:key_start_loc[r + 1]]``; none where the
        trace does not name its prompt blocks.
    prefix_keys : ndarray of int64, shape [total keys]
        In [0, num_prefix_keys); equal keys stand for equal tokens at equal positions after equal prefixes.
    num_prefix_keys : int
        Distinct prefix keys.
    """

    arrivals: npt.NDArray[np.float64]
    prompt_lens: Int64Array
    output_lens: Int64Array
    key_start_loc: Int64Array
    prefix_keys: Int64Array
    num_prefix_keys: int

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def total_lens(self) -> Int64Array:
        """Prompt and output tokens of each request, int64 [num_requests]."""
        return self.prompt_lens + self.output_lens

    @property
    def hashed_lens(self) -> Int64Array:
        """Leading tokens that prefix keys describe: the prompt, or 0 where the trace names no blocks."""
        return np.where(np.diff(self.key_start_loc) > 0, self.prompt_lens, 0)

    def keys_of(self, request: int) -> list[int]:
        """Prefix keys of one request, first block first."""
        start, end = self.key_start_loc[request : request + 2]
        keys: list[int] = self.prefix_keys[start:end].tolist()
        return keys


class RequestsBuilder:
    """Collects requests one by one and interns their prompt blocks by path."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int]] = []
        self._keys: list[int] = []
        self._key_start_loc = [0]
        self._interned: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, arrival: float, prompt_len: int, output_len: int, hash_ids: Sequence[int] = ()) -> None:
        """Add one request; `arrival` in seconds, one hash id per block of its prompt."""
        path = _NO_PREFIX
        for hash_id in hash_ids:
            path = self._interned.setdefault((path, hash_id), len(self._interned))
            self._keys.append(path)
        self._key_start_loc.append(len(self._keys))
        self._rows.append((arrival, prompt_len, output_len))

    def build(self) -> Requests:
        """Return what was added, at least one request."""
        arrivals, prompts, outputs = (np.array(c) for c in zip(*self._rows, strict=True))
        return Requests(
            arrivals=arrivals.astype(np.float64),
            prompt_lens=prompts.astype(np.int64),
            output_lens=outputs.astype(np.int64),
            key_start_loc=np.array(self._key_start_loc, np.int64),
            prefix_keys=np.array(self._keys, np.int64),
            num_prefix_keys=len(self._interned),
        )
