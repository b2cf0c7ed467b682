"""What goes on between a manager and the engine's steps: copies, fences, rows, events."""

from typing import Any

import numpy as np

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.events import Event
from pagedkv.allocation.group_rules import SPARE
from pagedkv.allocation.manager_events import events_with_tokens
from pagedkv.allocation.manager_reads import Handles, ManagerReads
from pagedkv.checks import IntArray, as_int32, check_shape
from pagedkv.errors import InvalidBlockError

__all__ = ["ManagerSteps"]


class ManagerSteps(ManagerReads):
    """Base of `KVCacheManager`: everything around a step that neither takes nor gives back blocks."""

    def take_block_copies(self) -> IntArray:
        """Hand out the block copies that must run before the step's writes.

        Both blocks of a pair stay pinned until `copies_done`; the pairs may run in any order. Call both in
        every step, also where nothing forks: the blocks of a pair that is never taken, or never reported as
        done, are never free again (`num_unfinished_copies` counts the pairs).

        Returns
        -------
        ndarray of int32, shape [n, 2]
            Pairs (source, target) of whole blocks, in every layer.
        """
        totals = self._state.arrays.totals
        pairs = self._state.arrays.copies[: totals[s.NUM_COPIES]].copy()
        totals[s.NUM_COPIES] = 0
        self._num_copies_taken += len(pairs)
        return pairs

    def copies_done(self, copies: Any) -> None:
        """Unpin the blocks of copies that have run.

        Parameters
        ----------
        copies : array_like of int, shape [n, 2]
            What `take_block_copies` returned.

        Raises
        ------
        InvalidBlockError
            A block is not pinned so often by copies that were taken; nothing is unpinned.
        ValueError
            Another shape.
        """
        given = np.asarray(copies)
        if given.size == 0:
            return
        if given.ndim != 2 or given.shape[1] != 2:
            raise ValueError(
                f"copies must have shape [n, 2], got {list(given.shape)} "
                "(pass what take_block_copies returned)"
            )
        pairs = as_int32("copies", given.ravel(), 0, self.pool.num_blocks - 1)
        blocks, times = np.unique(pairs, return_counts=True)
        waiting = self._state.arrays.copies[: self._state.arrays.totals[s.NUM_COPIES]].ravel()
        pinned = self.pool.pin_counts[blocks] - (waiting == blocks[:, None]).sum(axis=1)
        if (times > pinned).any():
            at = int((times > pinned).argmax())
            raise InvalidBlockError(
                f"copies must be pinned: block {blocks[at]} is pinned {pinned[at]} times by copies that were "
                f"taken, got it {times[at]} times (take_block_copies, run them, then copies_done once)"
            )
        self.pool.unpin(pairs)
        self._num_copies_taken -= len(given)

    def begin_step(self) -> int:
        """Note that a step is sent, before anything is given back that it reads; returns its number.

        Only `defer_frees` makes use of it: what is given back from now on is free after `end_step`.
        """
        self._step += 1
        self._open_steps.append(self._step)
        return self._step

    def end_step(self, step: int) -> None:
        """Note that a step has run; blocks given back while it and all before it were open are free now."""
        if step not in self._open_steps:
            raise ValueError(f"step must be open, got {step} (open: {self._open_steps})")
        self._open_steps.remove(step)
        oldest = min(self._open_steps, default=self._step + 1)
        while self._deferred and self._deferred[0][0] < oldest:
            self.pool.free(self._deferred.pop(0)[1])

    def move_rows(self, srcs: Any, tgts: Any) -> None:
        """Move sequences to other rows, pair by pair, in tables and mirror.

        Raises
        ------
        ValueError
            A source has no sequence, or a target has one; nothing has moved.
        """
        sources = as_int32("srcs", srcs, 0, self.mirror.max_num_reqs - 1)
        targets = as_int32("tgts", tgts, 0, self.mirror.max_num_reqs - 1)
        check_shape("tgts", targets, sources.shape, "[len(srcs)]")
        arrays = self._state.arrays
        running = np.flatnonzero((arrays.sequences[:, s.LIVE] == 1) & (arrays.sequences[:, s.ROW] >= 0))
        owner = {int(arrays.sequences[at, s.ROW]): int(at) for at in running}
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            if source not in owner or (target in owner and target != source):
                wrong = "source row has no sequence" if source not in owner else "target row has a sequence"
                raise ValueError(f"rows {source} -> {target} cannot move: the {wrong}")
            owner[target] = owner.pop(source)
        self.mirror.move_rows(sources, targets)
        for row, at in owner.items():
            arrays.sequences[at, s.ROW] = row
        free = [row for row in range(self.mirror.max_num_reqs - 1, -1, -1) if row not in owner]
        arrays.rows[1 : 1 + len(free)] = free

    def reset_prefix_cache(self) -> bool:
        """Forget every key, if no sequence holds a block; False, and nothing changed, otherwise."""
        if not self.pool.reset_prefix_cache():
            return False
        totals = self._state.arrays.totals
        totals[[s.QUERIED, s.HIT, s.QUERIED_AGAIN, s.HIT_AGAIN, s.ADMITTED]] = 0
        self._events += self.pool.take_events()
        return True

    def take_events(self) -> list[Event]:
        """Return what changed in the prefix cache since the last call, in order (with events on)."""
        self._fetch_events()
        events, self._events = self._events, []
        return events

    def _defer(self, blocks: IntArray) -> None:
        if not blocks.size:
            return
        if self._open_steps:
            self._deferred.append((self._open_steps[-1], blocks))
        else:
            self.pool.free(blocks)

    def _make_room(self, handles: Handles, tokens: IntArray, lookahead: int, most: int) -> None:
        """Let the event log take what a call can log: one for each block that it takes or publishes.

        Per group these are blocks for so many tokens, beside one that is begun, one that is a copy, a
        state and its drafts' blocks; and never more than there are, `most`.
        """
        limits, spare = self._state.arrays.limits, self._state.arrays.groups[:, SPARE].max()
        slots = (tokens.astype(np.int64) + lookahead).clip(0, limits[s.MAX_MODEL_LEN])
        per_group = slots.sum() // max(limits[s.PAGE_SIZE], 1) + (4 + spare) * handles.size
        self.pool.make_room_for_events(min(most, len(self.groups) * int(per_group)))

    def _fetch_events(self) -> None:
        if self.pool.has_events:
            self._events += events_with_tokens(self.pool.fetch_log(), self._state)
