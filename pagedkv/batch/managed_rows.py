"""Table rows that a manager writes."""

from typing import Any

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.rows import Blocks, Slots
from pagedkv.batch.states import RequestStates
from pagedkv.checks import IntArray
from pagedkv.errors import PagedKVError

__all__ = ["ManagedRows"]


class ManagedRows:
    """Rows that a `KVCacheManager` gives and writes; a request's handle is its sequence's."""

    is_written = False

    def __init__(self, manager: Any, states: RequestStates) -> None:
        self._manager, self._states = manager, states

    @property
    def num_free(self) -> int:
        """The manager has given them already."""
        return int(self._manager.mirror.max_num_reqs)

    def num_held(self, slots: Slots) -> IntArray:
        """The manager knows."""
        return np.zeros((0, len(slots)), np.int32)

    def past_limits(self, slots: Slots) -> tuple[int, int, int] | None:
        """No table joins that does not take all ids of the manager."""
        del slots
        return None

    def num_computed(self, handles: Any) -> IntArray | None:
        """Ask the manager: what is settled, prefix hits among it."""
        counts: IntArray = self._manager.num_computed_tokens(handles)
        return counts

    def check_handles(self, handles: Any) -> None:
        """Ask the manager for their rows."""
        self._manager.rows(handles)

    def add(self, slots: Slots, blocks: Blocks) -> None:
        """The manager has written them."""

    def append(self, slots: Slots, blocks: Blocks) -> None:
        """The manager has written them."""

    def leave(self, slots: Slots, *, keep: bool) -> None:
        """The manager knows."""

    def enter(self, slots: Slots) -> None:
        """The manager knows."""

    def move(self, srcs: IntArray, tgts: IntArray) -> None:
        """Rows stay."""

    def swap(self, first: IntArray, second: IntArray) -> None:
        """Rows stay."""

    def of_batch(self) -> IntArray:
        """Ask the manager; -1 too where a request has no blocks."""
        handles = self._states.column(a.HANDLE)
        is_held = handles >= 0
        rows = np.full(handles.size, -1, np.int32)
        rows[is_held] = self._manager.rows(handles[is_held])
        return rows

    def of_step(self, rows: IntArray, handles: Any) -> IntArray | None:
        """Ask the manager, which moves sequences to other rows after a preemption.

        Raises
        ------
        PagedKVError
            A request of the batch has no row: it was given no blocks.
        """
        del rows
        found: IntArray = self._manager.rows(handles)
        if found.size and found.min() < 0:
            raise PagedKVError(
                f"requests of a step must have blocks, got none for handle {handles[found.argmin()]} "
                "(allocate_slots before commit, or leave it out of the step)"
            )
        return found
