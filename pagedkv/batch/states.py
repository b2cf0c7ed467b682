"""RequestStates: the requests that a batch knows, by name and by handle, and the order of the batch."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.addresses import address_table
from pagedkv.batch import advance as a
from pagedkv.checks import IntArray
from pagedkv.tables.inputs import NO_INT64

__all__ = ["Int64Array", "RequestStates", "Standing"]

Int64Array = npt.NDArray[np.int64]
_NO_REQUEST = (-1, -1, -1, 0, 0, 0, 0, 0)  # of a free slot, in the order of `advance`


class Standing(NamedTuple):
    """Who stands where in a batch: slots in its order, the numbers of all requests, and the holes."""

    slots: Int64Array
    numbers: Int64Array
    holes: list[int]


class RequestStates:
    """Known requests: one line of numbers each, and their names.

    Parameters
    ----------
    max_num_reqs : int
        Positions of the batch; more requests than these can be known.
    makes_handles : bool
        False where handles are somebody else's, and slots with them.

    Attributes
    ----------
    numbers : int64 [capacity, FIELDS]
        By slot; grows.
    order : int64 [max_num_reqs]
        Slot at each position.
    setup : int64 [SETUP_WORDS]
    addresses : address table of these three
    holes : list of int
        Positions below num_reqs that nobody holds, ascending.
    committed : int64 [n]
        Handles of the step committed last, in its order.
    """

    addresses: Any

    def __init__(self, max_num_reqs: int, *, makes_handles: bool) -> None:
        self.order = np.full(max_num_reqs, -1, np.int64)
        self.setup = np.zeros(a.SETUP_WORDS, np.int64)
        self.holes: list[int] = []
        self.committed: Int64Array = NO_INT64
        self._slots: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._free: list[int] | None = [] if makes_handles else None
        self._generation = 0
        self.numbers = np.empty((0, a.FIELDS), np.int64)
        self._grow(max_num_reqs)

    @property
    def num_reqs(self) -> int:
        """Positions in use, holes among them."""
        return self.setup.item(a.NUM_REQS)

    @property
    def slots(self) -> Int64Array:
        """Slots of the batch in its order, int64 [num_reqs]; a view."""
        return self.order[: self.num_reqs]

    def column(self, field: int) -> Int64Array:
        """One number of each request in batch order, int64 [num_reqs]; -1 in holes."""
        slots = self.slots
        return np.where(slots >= 0, self.numbers[slots, field], -1)

    def committed_positions(self) -> IntArray:
        """Where each request stood in the step committed last, int32 [num_reqs]; -1: it did not."""
        last = self.committed & a.SLOT_MASK
        handles = np.full(len(self.numbers), -1, np.int64)
        positions = np.full(len(self.numbers), -1, np.int32)
        handles[last], positions[last] = self.committed, np.arange(last.size)
        slots = self.slots
        positions[handles != self.numbers[:, a.HANDLE]] = -1  # somebody else has the slot by now
        return np.where(slots >= 0, positions[slots], np.int32(-1))

    def __len__(self) -> int:
        """Requests that are known, in the batch or not."""
        return len(self._slots)

    def slot_of(self, req_id: Hashable) -> int | None:
        """Slot of a known request."""
        return self._slots.get(req_id)

    def slot_of_handle(self, handle: Any) -> int | None:
        """Slot of the known request of a handle; None for all else."""
        if not isinstance(handle, int | np.integer) or handle < 0:
            return None
        slot = int(handle) & a.SLOT_MASK
        is_known = slot < len(self.numbers) and self.numbers[slot, a.HANDLE] == handle
        return slot if is_known else None

    def name_of(self, slot: int) -> Hashable:
        """Name of the request in a slot."""
        return self._names[slot]

    def new_handle(self) -> int:
        """Return a handle for a request to come, of a free slot: nothing is taken by this."""
        assert self._free is not None
        if not self._free:
            self._grow(2 * len(self.numbers))
        return self._generation + 1 << 32 | self._free[-1]

    def open(self, req_id: Hashable, handle: int) -> int:
        """Make a request known; returns its slot."""
        slot = handle & a.SLOT_MASK
        if slot >= len(self.numbers):
            self._grow(max(slot + 1, 2 * len(self.numbers)))
        if self._free is not None:
            self._free.pop()
            self._generation = handle >> 32
        self._slots[req_id], self._names[slot] = slot, req_id
        self.numbers[slot] = _NO_REQUEST
        self.numbers[slot, a.HANDLE] = handle
        return slot

    def close(self, slot: int) -> None:
        """Forget a request that is not in the batch; its handle is stale from now on."""
        del self._slots[self._names.pop(slot)]
        self.numbers[slot] = _NO_REQUEST
        if self._free is not None:
            self._free.append(slot)

    def enter(self, slot: int) -> None:
        """Let a request into the batch: at the lowest hole, or behind all others."""
        if self.holes:
            position = self.holes.pop(0)
        else:
            position = self.num_reqs
            self.setup[a.NUM_REQS] += 1
        self._place(slot, position)

    def leave(self, slots: Int64Array) -> None:
        """Let requests out of the batch; their positions are holes until somebody enters, or `condense`."""
        positions = self.numbers[slots, a.POSITION]
        self.order[positions] = -1
        self.numbers[slots, a.POSITION] = -1
        self.numbers[slots, a.COMPUTED] += self.numbers[slots, a.SCHEDULED]
        self.numbers[slots, a.SCHEDULED] = 0
        self.holes = sorted([*self.holes, *positions.tolist()])

    def condense(self) -> tuple[IntArray, IntArray]:
        """Close the holes: the highest position moves into the lowest hole, and so on; returns the pairs."""
        moves = []
        end = self.num_reqs
        while self.holes:
            end -= 1
            if self.holes[-1] == end:
                self.holes.pop()
                continue
            hole = self.holes.pop(0)
            moves.append((end, hole))
            self._place(int(self.order[end]), hole)
            self.order[end] = -1
        self.setup[a.NUM_REQS] = end
        pairs = np.array(moves, np.int32).reshape(-1, 2)
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def standing(self) -> Standing:
        """Return who stands where, and everybody's numbers, for `restore`."""
        return Standing(self.slots.copy(), self.numbers.copy(), list(self.holes))

    def restore(self, before: Standing) -> None:
        """Let everybody stand as before; nobody may have been made known or forgotten since."""
        self.order[: before.slots.size], self.numbers[:] = before.slots, before.numbers
        self.setup[a.NUM_REQS], self.holes = before.slots.size, before.holes

    def permute(self, order: Int64Array) -> None:
        """Let the request that stands at ``order[i]`` stand at i."""
        self.order[: order.size] = self.order[order]
        self.numbers[self.slots, a.POSITION] = np.arange(order.size)

    def _place(self, slot: int, position: int) -> None:
        self.order[position] = slot
        self.numbers[slot, a.POSITION] = position

    def _grow(self, capacity: int) -> None:
        old = len(self.numbers)
        numbers = np.empty((capacity, a.FIELDS), np.int64)
        numbers[:old], numbers[old:] = self.numbers, _NO_REQUEST
        if self._free is not None:
            self._free = [*range(capacity - 1, old - 1, -1), *self._free]
        self.numbers = numbers
        self.addresses = address_table(self.numbers, self.order, self.setup)
