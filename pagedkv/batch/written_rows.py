"""Table rows that the batch writes itself: in batch order, or stable."""

from typing import Any

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.resting_blocks import RestingBlocks
from pagedkv.batch.rows import Blocks, Slots
from pagedkv.batch.states import RequestStates
from pagedkv.checks import IntArray
from pagedkv.mirror import HostMirror

__all__ = ["BatchOrderRows", "StableRows"]


class _WrittenRows:
    is_written = True

    def __init__(self, mirror: HostMirror, states: RequestStates) -> None:
        self._mirror, self._states = mirror, states

    def add(self, slots: Slots, blocks: Blocks) -> None:
        self._mirror.add_rows(self._rows(slots), *blocks)

    def append(self, slots: Slots, blocks: Blocks) -> None:
        if blocks.counts.size:
            self._mirror.append_rows(self._rows(slots), *blocks)

    def past_limits(self, slots: Slots) -> tuple[int, int, int] | None:
        del slots  # what lies in rows was seen by every table that joined the mirror
        return None

    def num_computed(self, handles: Any) -> IntArray | None:
        del handles
        return None

    def check_handles(self, handles: Any) -> None:
        del handles  # they are made, not given

    def of_batch(self) -> IntArray:
        return self._states.column(a.ROW).astype(np.int32)

    def _rows(self, slots: Slots) -> IntArray:
        return self._states.numbers[slots, a.ROW].astype(np.int32)


class BatchOrderRows(_WrittenRows):
    """Row i is request i of the batch. The ids of those that rest are kept aside."""

    def __init__(self, mirror: HostMirror, states: RequestStates) -> None:
        super().__init__(mirror, states)
        self._kept = RestingBlocks(mirror)

    @property
    def num_free(self) -> int:
        """As many as there are positions."""
        return self._mirror.max_num_reqs

    def leave(self, slots: Slots, *, keep: bool) -> None:
        """Copy the ids that are kept, and clear the rows."""
        rows = self._rows(slots)
        if keep:
            self._kept.keep(slots, rows)
        else:
            self._kept.forget(slots)
        self._mirror.clear_rows(rows[rows >= 0])
        self._states.numbers[slots, a.ROW] = -1

    def enter(self, slots: Slots) -> None:
        """Position and row are one."""
        numbers = self._states.numbers
        numbers[slots, a.ROW] = numbers[slots, a.POSITION]

    def num_held(self, slots: Slots) -> IntArray:
        """Of their rows, or of what is kept."""
        rows = self._rows(slots)
        counts: IntArray = self._mirror.counts.take(rows, axis=1)
        resting = rows < 0
        if resting.any():
            counts[:, resting] = self._kept.counts(np.asarray(slots)[resting].tolist())
        return counts

    def past_limits(self, slots: Slots) -> tuple[int, int, int] | None:
        """Of what is kept."""
        return self._kept.past_limits(slots)

    def add(self, slots: Slots, blocks: Blocks) -> None:
        """Replace their blocks; what was kept of those that rested is void."""
        self._kept.forget(slots)
        super().add(slots, blocks)

    def append(self, slots: Slots, blocks: Blocks) -> None:
        """Append, behind what was kept of those that came back."""
        back = self._kept.among(slots)
        if back:
            super().add(back, self._kept.take(back))
        super().append(slots, blocks)

    def move(self, srcs: IntArray, tgts: IntArray) -> None:
        """Move the rows as well."""
        self._mirror.move_rows(srcs, tgts)

    def swap(self, first: IntArray, second: IntArray) -> None:
        """Swap the rows as well."""
        self._mirror.swap_rows(first, second)

    def of_step(self, rows: IntArray, handles: Any) -> IntArray | None:
        """None: they are in order."""
        del rows, handles
        return None


class StableRows(_WrittenRows):
    """A request keeps its row until it is over or preempted; what rests keeps it as well."""

    def __init__(self, mirror: HostMirror, states: RequestStates) -> None:
        super().__init__(mirror, states)
        self._free = list(range(mirror.max_num_reqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def leave(self, slots: Slots, *, keep: bool) -> None:
        """Clear the rows of those that keep nothing, and take them back."""
        if keep:
            return
        rows = self._rows(slots)
        rows = rows[rows >= 0]
        self._mirror.clear_rows(rows)
        self._free += rows[::-1].tolist()
        self._states.numbers[slots, a.ROW] = -1

    def enter(self, slots: Slots) -> None:
        """Give a row to those that have none."""
        for slot in slots:
            if self._states.numbers[slot, a.ROW] < 0:
                self._states.numbers[slot, a.ROW] = self._free.pop()

    def num_held(self, slots: Slots) -> IntArray:
        """Of their rows."""
        counts: IntArray = self._mirror.counts.take(self._rows(slots), axis=1)
        return counts

    def move(self, srcs: IntArray, tgts: IntArray) -> None:
        """Rows stay."""

    def swap(self, first: IntArray, second: IntArray) -> None:
        """Rows stay."""

    def of_step(self, rows: IntArray, handles: Any) -> IntArray | None:
        """As they were filled in."""
        del handles
        return rows
