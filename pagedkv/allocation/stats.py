"""The pool and the manager in numbers."""

from dataclasses import dataclass

__all__ = ["PoolStats"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool in numbers, all read in O(1).

    Attributes
    ----------
    num_blocks, num_free_blocks, num_cached_blocks : int
        Blocks in all (the null block included), that nobody holds, that have a key.
    num_cached_keys : int
        Distinct keys; fewer than cached blocks where several hold the same tokens.
    num_evictions : int
        Cached blocks that were handed out and lost their key, since the last reset.
    usage : float
        Share of the blocks that are held.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_cached_keys: int
    num_evictions: int
    usage: float
