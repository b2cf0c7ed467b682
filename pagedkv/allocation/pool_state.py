"""PoolState: a pool's arrays and what can be read off them in O(1)."""

from pagedkv.allocation.block_records import (
    NUM_CACHED,
    NUM_EVICTED,
    NUM_FREE,
    NUM_KEYS,
    Keys,
    PoolArrays,
    new_arrays,
)
from pagedkv.allocation.events import Event, fetch_log, room_for
from pagedkv.allocation.stats import PoolStats
from pagedkv.checks import check_int

__all__ = ["PoolState"]


class PoolState:
    """The arrays of a pool; `PrefixCache` and `BlockPool` say what happens to them."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool, enable_events: bool) -> None:
        self.num_blocks = check_int("num_blocks", num_blocks, low=1)
        if enable_events and not enable_prefix_caching:
            raise ValueError("enable_events must go with enable_prefix_caching: events tell what is cached")
        self._arrays = new_arrays(self.num_blocks, prefix_caching=enable_prefix_caching, events=enable_events)
        self._events: list[Event] = []

    @property
    def arrays(self) -> PoolArrays:
        """The arrays for compiled code; take them anew for each call."""
        return self._arrays

    @property
    def has_events(self) -> bool:
        """Whether changes of the index are told."""
        return len(self._arrays.log) > 0

    def fetch_log(self) -> Keys:
        """Take the logged rows out, for who makes events of them with tokens; uint64 [n, 4]."""
        return fetch_log(self._arrays)

    def make_room_for_events(self, num_events: int) -> None:
        """Let the log take so many events more; does nothing where events are off."""
        self._arrays = room_for(self._arrays, num_events)

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether blocks can have keys."""
        return len(self._arrays.entries) > 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included; the null block is not counted."""
        return self._arrays.counters.item(NUM_FREE)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that have a key, held or free."""
        return self._arrays.counters.item(NUM_CACHED)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1; the null block is not counted."""
        usable = self.num_blocks - 1
        return 1.0 - self.num_free_blocks / usable if usable else 0.0

    @property
    def nbytes(self) -> int:
        """Host memory of the pool's arrays, in bytes: 16 a block, at most 56 with prefix caching."""
        return sum(array.nbytes for array in self._arrays)

    def stats(self) -> PoolStats:
        """Return the pool in numbers."""
        counters = self._arrays.counters
        return PoolStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self.num_cached_blocks,
            num_cached_keys=int(counters[NUM_KEYS]),
            num_evictions=int(counters[NUM_EVICTED]),
            usage=self.usage,
        )
