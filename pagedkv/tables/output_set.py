"""OutputSet: the persistent arrays of one set of steps, and cached views of them."""

from functools import cached_property
from typing import Any

import numpy as np

from pagedkv.checks import check_int
from pagedkv.constants import PAD_SLOT_ID
from pagedkv.tables.device_tables import DeviceTables
from pagedkv.tables.geometry import Geometry, aligned
from pagedkv.tables.kept import Kept, keep
from pagedkv.tables.overlaps import Overlaps
from pagedkv.tables.pack import HAS_WINDOWS, MAX_TOKENS, OUT, SEEN_WORDS
from pagedkv.tables.state_outputs import StateOutputs

__all__ = ["OutputSet"]


class OutputSet:
    """One persistent set of step arrays; commits into other sets leave it alone.

    With rows in batch order its tables are the stored ones, which every commit brings up to date.

    Parameters
    ----------
    backend : backend
    geometry : Geometry
    out : int
        Its number.
    shown : DeviceTables, optional
        The tables that the step hands out, in batch order; tables of its own where None.
    """

    def __init__(self, backend: Any, geometry: Geometry, out: int, shown: DeviceTables | None) -> None:
        self.geometry = geometry
        self.is_stable = shown is None
        self.shown = DeviceTables(backend, geometry, with_views=True) if shown is None else shown
        self.max_num_tokens = geometry.max_num_batched_tokens
        num_groups, max_num_reqs = len(geometry.groups), geometry.max_num_reqs
        line = aligned(self.max_num_tokens)
        self.slots = backend.full((num_groups, line), PAD_SLOT_ID, backend.slot_dtype)
        self.positions = backend.zeros(self.max_num_tokens, np.int64)
        self.seq_lens = backend.zeros(max_num_reqs, np.int32)
        self.query_start_loc = backend.zeros(max_num_reqs + 1, np.int32)
        self.token_reqs = backend.zeros(self.max_num_tokens, np.int32)
        self.local_seq_lens = backend.zeros((num_groups, aligned(max_num_reqs)), np.int32)
        self.states = StateOutputs(backend, geometry)
        # What is shown where (host): row and its version at each batch position.
        self.batch = np.full((2, max_num_reqs if self.is_stable else 0), -1, np.int64)
        self.seen = np.zeros(SEEN_WORDS, np.int64)
        self.seen[MAX_TOKENS], self.seen[OUT] = self.max_num_tokens, out
        self.seen[HAS_WINDOWS] = geometry.has_windows
        # Views by name, group and size; and what rooms above make of a step's views, by its padded sizes.
        self.kept: Kept = {}
        self._num_groups = len(geometry.specs)

    @cached_property
    def overlaps(self) -> Overlaps:
        """Which inputs on the device must not lie in these arrays; made when the first input comes."""
        return Overlaps(self)

    def slot_mapping(self, group: int, num_tokens: int) -> Any:
        """Slots of one group, int64 [num_tokens]; a view, made once."""
        return self.line("slots", group, num_tokens)

    def line(self, name: str, group: int, num: int) -> Any:
        """Return the first `num` elements of one group's line of a step array; a view, made once."""
        found = self.kept.get((name, group, num))
        if found is None:
            check_int("group", group, 0, self._num_groups - 1)
            found = keep(self.kept, (name, group, num), getattr(self, name)[group][:num])
        return found

    def view(self, name: str, num: int) -> Any:
        """Return the first `num` elements of a step array; a view, made once."""
        found = self.kept.get((name, None, num))
        if found is None:
            found = keep(self.kept, (name, None, num), getattr(self, name)[:num])
        return found
