"""Rows: what a batch does to table rows, whosever they are."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from pagedkv.batch.states import Int64Array
from pagedkv.checks import IntArray
from pagedkv.tables.inputs import NO_INT32

__all__ = ["NO_BLOCKS", "Blocks", "Rows", "Slots"]


Slots: TypeAlias = Sequence[int] | Int64Array
"""How requests are named: by their slots."""


class Blocks(NamedTuple):
    """Blocks of n requests: counts int32 [G, n], and ids int32 [sum of counts], group by group."""

    counts: IntArray
    ids: IntArray


NO_BLOCKS: Final = Blocks(np.empty((0, 0), np.int32), NO_INT32)
"""For as many requests and groups as there are: none takes a block."""


class Rows(Protocol):
    """What a batch does to table rows. Requests are named by slot; positions are those of the batch."""

    is_written: bool
    """Whether the batch writes the tables: False with a manager, which does."""

    @property
    def num_free(self) -> int:
        """Rows for requests that have none."""

    def leave(self, slots: Slots, *, keep: bool) -> None:
        """Let requests out of the batch; `keep` their blocks, or give them up with the row."""

    def enter(self, slots: Slots) -> None:
        """Let requests that stand in the batch have rows."""

    def num_held(self, slots: Slots) -> IntArray:
        """Blocks of requests, in the batch or not, int32 [G, n]."""

    def past_limits(self, slots: Slots) -> tuple[int, int, int] | None:
        """Find a block of requests that the tables no longer take: (slot, group, id), or None."""

    def num_computed(self, handles: Any) -> IntArray | None:
        """Tokens that a manager has in the cache of sequences; None where there is no manager."""

    def check_handles(self, handles: Any) -> None:
        """Raise StaleSequenceError where a handle that is given is no sequence's."""

    def add(self, slots: Slots, blocks: Blocks) -> None:
        """Replace the blocks of requests in the batch."""

    def append(self, slots: Slots, blocks: Blocks) -> None:
        """Append to the blocks of requests in the batch, those that came back among them."""

    def move(self, srcs: IntArray, tgts: IntArray) -> None:
        """Follow moves of positions, pair by pair."""

    def swap(self, first: IntArray, second: IntArray) -> None:
        """Follow swaps of positions, pair by pair."""

    def of_batch(self) -> IntArray:
        """Rows in batch order, int32 [P]; -1 in holes."""

    def of_step(self, rows: IntArray, handles: Any) -> IntArray | None:
        """Return the rows that a commit takes, of what `fill` wrote."""
