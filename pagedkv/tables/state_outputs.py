"""StateOutputs: the blocks of a step's recurrent states, and cached views of them."""

from typing import Any

import numpy as np

from pagedkv.checks import check_int
from pagedkv.kernels._layout import STATE_DRAFTS, STATE_GROUP, STATE_OFFSET
from pagedkv.tables.geometry import Geometry, aligned
from pagedkv.tables.kept import Kept, keep

__all__ = ["StateOutputs"]


class StateOutputs:
    """Arrays of all state groups of one output set, at addresses that never change; empty without any.

    Parameters
    ----------
    backend : backend
        Where the arrays live.
    geometry : Geometry
        Which groups hold states, and where their indices lie.
    """

    def __init__(self, backend: Any, geometry: Geometry) -> None:
        num_states, line = len(geometry.states), aligned(geometry.max_num_reqs)
        self.all_indices = backend.zeros(geometry.num_state_elements, np.int32)
        self.all_initial = backend.zeros((num_states, line), np.int32)
        self.all_columns = backend.zeros((num_states, 3, line), np.int32)
        self._num_groups = len(geometry.specs)
        groups = geometry.states[:, STATE_GROUP].tolist()
        places = geometry.states[:, [STATE_OFFSET, STATE_DRAFTS]].tolist()
        self._states = {
            group: (s, *place) for s, (group, place) in enumerate(zip(groups, places, strict=True))
        }
        self._cached: Kept = {}

    def indices(self, group: int, num_reqs: int) -> Any:
        """Blocks of the running state and the drafts, int32 [num_reqs, 1 + drafts]; a view, made once."""
        found = self._cached.get(("indices", group, num_reqs))
        if found is None:
            _, start, drafts = self._state(group)
            lines = self.all_indices[start : start + num_reqs * (1 + drafts)]
            found = keep(self._cached, ("indices", group, num_reqs), lines.reshape(num_reqs, 1 + drafts))
        return found

    def initial_indices(self, group: int, num_reqs: int) -> Any:
        """Block of the state before the step, int32 [num_reqs]; a view, made once."""
        found = self._cached.get(("initial", group, num_reqs))
        if found is None:
            line = self.all_initial[self._state(group)[0]]
            found = keep(self._cached, ("initial", group, num_reqs), line[:num_reqs])
        return found

    def columns(self, group: int, num_reqs: int) -> Any:
        """Last computed, first and last scheduled column, int32 [3, num_reqs]; a view, made once."""
        found = self._cached.get(("columns", group, num_reqs))
        if found is None:
            lines = self.all_columns[self._state(group)[0]]
            found = keep(self._cached, ("columns", group, num_reqs), lines[:, :num_reqs])
        return found

    def _state(self, group: int) -> tuple[int, int, int]:
        # (place among the state groups, start in the arena, drafts)
        check_int("group", group, 0, self._num_groups - 1)
        if group not in self._states:
            raise ValueError(
                f"group must hold recurrent states: one of {list(self._states)}, got {group} "
                "(give its KVCacheGroupSpec a state_mode)"
            )
        return self._states[group]
