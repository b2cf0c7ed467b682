"""BlockMemory: the KV-cache manager as the replay uses it; the one place where the replay allocates.

The engine asks here what fits, and for blocks, prefix hits, preemptions and frees, each in one call of the
manager for the whole batch. The manager writes the tables' mirror itself.
"""

import numpy as np

from pagedkv.allocation import FullAttentionSpec, KVCacheManager, SlidingWindowSpec
from pagedkv.checks import IntArray
from pagedkv.errors import OutOfBlocksError
from pagedkv.mirror import HostMirror
from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.layout import Layout
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.requests import Int64Array, Requests
from pagedkv.replay.token_ids import TokenIds
from pagedkv.specs import KVCacheGroupSpec

__all__ = ["BlockMemory"]

_NO_HANDLE = -1


class BlockMemory:
    """Blocks and rows of the running batch, and handles of all that were considered for it.

    Parameters
    ----------
    options : ReplayOptions
    max_model_len : int
    layout : Layout
    mirror : HostMirror
        The tables' mirror; the manager is its writer.
    batch : RunningBatch
    requests : Requests

    Attributes
    ----------
    manager : KVCacheManager
    """

    def __init__(
        self,
        options: ReplayOptions,
        max_model_len: int,
        layout: Layout,
        mirror: HostMirror,
        batch: RunningBatch,
        requests: Requests,
    ) -> None:
        self.manager = KVCacheManager(
            [_managed(spec) for spec in layout.specs],
            options.resolved_num_blocks(),
            max_num_seqs=mirror.max_num_reqs,
            max_model_len=max_model_len,
            watermark=options.watermark,
            enable_prefix_caching=options.prefix_caching,
            algorithm=options.hash,
            seed=b"replay %d" % options.seed,
            context_parallel=layout.context_parallel,
            mirror=mirror,
        )
        self._layout, self._batch, self._tokens = layout, batch, TokenIds(requests)
        self._handle = np.full(len(requests), _NO_HANDLE, np.int64)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self.manager.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones among them."""
        return self.manager.num_free_blocks

    def match(self, request: int, known: int) -> tuple[int, int]:
        """Return (tokens, blocks needed) for a waiting request: its prefix hit, and what it takes beside it.

        The blocks are those that all `known` tokens take out of the free ones: hits that nobody holds now
        among them, hits that somebody holds not.
        """
        if self._handle[request] == _NO_HANDLE:
            self._handle[request] = self.manager.add(self._tokens.prompt(request))
        handle = int(self._handle[request])
        hit = self.manager.match_prefix(handle)
        peak = self._layout.peak_blocks(np.array([known]))
        taken = np.where(self._layout.windows > known, hit // self._layout.positions_per_block, 0)
        needed = int((peak - taken).sum()) + self.manager.num_free_hit_blocks(handle)
        return hit, min(needed, int(peak.sum()))

    def num_promised(self) -> int:
        """Blocks that the rows will need until all that they know is computed, beyond what they hold."""
        held = self.num_columns() - self._layout.first_columns(self._batch.computed)
        return int(np.maximum(self._layout.peak_blocks(self._batch.known) - held, 0).sum())

    def allocate(self, num_admitted: int) -> IntArray | None:
        """Give all that are scheduled their blocks and rows, the oldest first, in one call.

        Parameters
        ----------
        num_admitted : int
            How many of them, the newest ones, start with this step.

        Returns
        -------
        ndarray of int32, or None
            The blocks that were handed out; None, and nothing has changed, where they do not fit.
        """
        batch = self._batch
        order = batch.oldest_first()
        order = order[batch.scheduled[order] > 0]
        try:
            done = self.manager.allocate_slots(self._handles(order), batch.scheduled[order])
        except OutOfBlocksError:
            return None
        admitted = order[len(order) - num_admitted :]
        batch.computed[admitted] = done.num_computed_tokens[len(order) - num_admitted :]
        batch.row[admitted] = self.manager.rows(self._handles(admitted))
        return done.block_ids

    def settle(self) -> None:
        """Let the manager know what this step computed: full blocks become reachable, skipped ones free."""
        places = np.flatnonzero(self._batch.scheduled)
        self.manager.commit(self._handles(places), self._batch.computed[places])

    def append_sampled(self, places: Int64Array) -> None:
        """Append the token that each of these sequences has sampled, its last known one."""
        requests, positions = self._batch.request[places], self._batch.known[places] - 1
        self.manager.append(self._handles(places), self._tokens.sampled(requests, positions))

    def free(self, places: Int64Array) -> None:
        """End sequences; cached blocks stay reachable until they are handed out again."""
        self.manager.free(self._handles(places))
        self._handle[self._batch.request[places]] = _NO_HANDLE

    def preempt(self, places: Int64Array) -> None:
        """Take blocks and rows back; tokens stay, so that a resume hits what is still cached."""
        self.manager.preempt(self._handles(places))

    def compact_rows(self) -> None:
        """Move the sequences in the highest rows into holes, so that the batch takes the lowest rows."""
        rows = self._batch.row
        moving = np.flatnonzero(rows >= len(rows))
        if not len(moving):
            return
        holes = np.setdiff1d(np.arange(len(rows)), rows)
        self.manager.move_rows(rows[moving], holes)
        rows[moving] = holes
        self._batch.moved[moving] = 1

    def num_columns(self) -> Int64Array:
        """Live columns of each sequence's row, int64 [num_groups, num_reqs]."""
        counts = [self.manager.num_blocks_held(g)[self._batch.row] for g in range(self._layout.num_groups)]
        return np.array(counts, np.int64)

    def _handles(self, places: Int64Array) -> Int64Array:
        return self._handle[self._batch.request[places]]


def _managed(spec: KVCacheGroupSpec) -> FullAttentionSpec | SlidingWindowSpec:
    if spec.sliding_window is None:
        return FullAttentionSpec(spec.block_size, cp_sharded=spec.cp_sharded)
    return SlidingWindowSpec(spec.block_size, spec.sliding_window)
