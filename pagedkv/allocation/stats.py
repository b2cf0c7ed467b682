"""The pool and the manager in numbers."""

from dataclasses import dataclass

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.sequence_state import ManagerArrays

__all__ = ["KVCacheStats", "PoolStats", "manager_stats"]


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


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """A manager in numbers. Tokens are counted when a sequence is admitted, not when it is looked up.

    Attributes
    ----------
    pool : PoolStats
        The pool.
    num_sequences, num_running : int
        Sequences in all, and those that hold a row.
    num_preemptions : int
        Sequences preempted.
    num_unfinished_copies : int
        Block copies that were not taken, or not done yet. Each pins two blocks, so a number that grows from
        step to step is a leak.
    num_queried_tokens, num_hit_tokens : int
        Tokens of the sequences admitted for the first time, and how many of them were cached.
    num_requeried_tokens, num_rehit_tokens : int
        The same of sequences that resumed after a preemption.
    hit_rate : float
        Hit over queried tokens of first admissions, since the last reset.
    recent_hit_rate : float
        The same over the last 1,000 of them.
    """

    pool: PoolStats
    num_sequences: int
    num_running: int
    num_preemptions: int
    num_unfinished_copies: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_requeried_tokens: int
    num_rehit_tokens: int
    hit_rate: float
    recent_hit_rate: float


def manager_stats(pool: PoolStats, arrays: ManagerArrays, num_unfinished_copies: int) -> KVCacheStats:
    """Read a manager's counters."""
    totals = arrays.totals.tolist()
    recent = arrays.recent[: totals[s.ADMITTED]].sum(axis=0)
    return KVCacheStats(
        pool=pool,
        num_sequences=totals[s.NUM_SEQUENCES],
        num_running=totals[s.NUM_RUNNING],
        num_preemptions=totals[s.PREEMPTED],
        num_unfinished_copies=num_unfinished_copies,
        num_queried_tokens=totals[s.QUERIED],
        num_hit_tokens=totals[s.HIT],
        num_requeried_tokens=totals[s.QUERIED_AGAIN],
        num_rehit_tokens=totals[s.HIT_AGAIN],
        hit_rate=totals[s.HIT] / totals[s.QUERIED] if totals[s.QUERIED] else 0.0,
        recent_hit_rate=float(recent[1] / recent[0]) if recent[0] else 0.0,
    )
