"""RestingBlocks: the block ids of requests that rest while their rows are another's."""

from typing import Any, NamedTuple

import numpy as np

from pagedkv.addresses import int32_1d, int32_2d, int64_2d
from pagedkv.batch.rows import Blocks, Slots
from pagedkv.checks import IntArray
from pagedkv.compiled import compiled
from pagedkv.mirror import HostMirror
from pagedkv.tables.inputs import NO_INT32

__all__ = ["RestingBlocks"]

Array = Any


class _Held(NamedTuple):
    counts: list[int]  # of each group
    ids: IntArray  # group by group


class RestingBlocks:
    """Block ids kept aside, by slot.

    Parameters
    ----------
    mirror : HostMirror
        Whose rows the ids come from, and go back to.
    """

    def __init__(self, mirror: HostMirror) -> None:
        self._mirror = mirror
        self._limits = mirror.layout[:, 2].copy()
        self._held: dict[int, _Held] = {}

    def keep(self, slots: Slots, rows: IntArray) -> None:
        """Copy what the rows of requests hold."""
        counts = self._mirror.counts.take(rows, axis=1)
        ids = _ids_of(self._mirror.addresses, rows)
        ends = counts.sum(axis=0).cumsum().tolist()
        for slot, own, start, end in zip(slots, counts.T.tolist(), [0, *ends], ends, strict=False):
            self._held[slot] = _Held(own, ids[start:end].copy())  # a view would keep the others' ids alive

    def forget(self, slots: Slots) -> None:
        """Drop what is kept of requests."""
        for slot in slots:
            self._held.pop(slot, None)

    def among(self, slots: Slots) -> list[int]:
        """Return those of whom something is kept, be it no block."""
        return [slot for slot in np.asarray(slots).tolist() if slot in self._held] if self._held else []

    def counts(self, slots: list[int]) -> IntArray:
        """Blocks of requests that are kept, int32 [G, n]."""
        counts = np.array([self._held[slot].counts for slot in slots], np.int32)
        return counts.reshape(len(slots), self._mirror.num_groups).T.copy()

    def take(self, slots: list[int]) -> Blocks:
        """Return what is kept of requests, and keep it no longer."""
        counts = self.counts(slots)
        ids = np.concatenate([NO_INT32, *[self._held.pop(slot).ids for slot in slots]])
        return Blocks(counts, _by_group(counts, ids))

    def past_limits(self, slots: Slots) -> tuple[int, int, int] | None:
        """Find an id that the tables no longer take: (slot, group, id), or None.

        Ids that are in no row are not seen by a table with smaller limits that joins the mirror.
        """
        limits = self._mirror.layout[:, 2]
        if not self._held or np.array_equal(limits, self._limits):
            return None
        for slot in self.among(slots):
            held = self._held[slot]
            for group, ids in enumerate(np.split(held.ids, np.cumsum(held.counts[:-1]))):
                if ids.max(initial=0) > limits[group]:
                    return slot, group, int(ids.max())
        return None


@compiled
def _ids_of(mirror: Array, rows: Array) -> Array:
    # Ids of rows, row by row, and group by group within one.
    blocks, layout, counts = int32_1d(mirror, 0), int64_2d(mirror, 1), int32_2d(mirror, 2)
    total = 0
    for row in rows:
        for g in range(counts.shape[0]):
            total += counts[g, row]
    ids = np.empty(total, np.int32)
    k = 0
    for row in rows:
        for g in range(counts.shape[0]):
            start, num = layout[g, 0] + row * layout[g, 1], counts[g, row]
            ids[k : k + num] = blocks[start : start + num]
            k += num
    return ids


@compiled
def _by_group(counts: Array, ids: Array) -> Array:
    # The same ids group by group, and row by row within one.
    ordered = np.empty(ids.size, np.int32)
    places = np.zeros(counts.shape[0], np.int64)  # where the next ids of each group go
    for g in range(1, counts.shape[0]):
        places[g] = places[g - 1] + counts[g - 1].sum()
    k = 0
    for i in range(counts.shape[1]):
        for g in range(counts.shape[0]):
            num = counts[g, i]
            ordered[places[g] : places[g] + num] = ids[k : k + num]
            places[g] += num
            k += num
    return ordered
