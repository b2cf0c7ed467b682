"""StepKernels: the kernels of a step, bound to a table set's device arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pagedkv.backends.buffers import HostBuffer
from pagedkv.kernels import _grid as grids
from pagedkv.kernels._layout import WRITE_WORDS
from pagedkv.tables.device_tables import DeviceTables
from pagedkv.tables.geometry import Geometry
from pagedkv.tables.output_set import OutputSet
from pagedkv.tables.sizes import Sizes

__all__ = ["Staging", "StepKernels"]

_MOST_BOUND = 64
Launch = Callable[[tuple[int, int], Any], None]


class _Bound(NamedTuple):
    apply_writes: Launch
    gather_rows: Launch
    slot_mapping: Launch
    state_indices: Launch | None  # where there are groups of states


class Staging:
    """The device's end of the copy, and the kernels bound to it.

    Parameters
    ----------
    backend : backend
    num_words : int
        Words that it holds.
    """

    def __init__(self, backend: Any, num_words: int) -> None:
        self.words = backend.zeros(num_words, np.int32)
        self.bound: dict[Any, _Bound] = {}


class StepKernels:
    """Binds and launches apply_writes, gather_rows, slot_mapping and state_indices over one table set.

    Parameters
    ----------
    backend : backend
    geometry : Geometry
    with_views : bool
        Whether the stored tables are what attention kernels read (rows in batch order).
    """

    def __init__(self, backend: Any, geometry: Geometry, *, with_views: bool) -> None:
        self._backend, self._geometry = backend, geometry
        self.stored = DeviceTables(backend, geometry, with_views=with_views)
        self._groups, self._views = backend.asarray(geometry.groups), backend.asarray(geometry.views)
        self._no_ints, self._no_positions = backend.zeros(1, np.int32), backend.zeros(1, np.int64)
        self._states = backend.asarray(geometry.states)
        self._num_groups, self._num_states = len(geometry.groups), len(geometry.states)

    def run(self, buffer: HostBuffer, staging: Staging, sizes: Sizes, outputs: OutputSet, device: Any) -> Any:
        """Return ``run(stream)``, which enqueues the copy and the kernels of a step of these sizes.

        `device` holds the device forms of query_start_loc, num_computed_tokens and positions, or None
        for what the copy carries.
        """
        bound, max_num_reqs = self._kernels(staging, outputs, device), self._geometry.max_num_reqs

        def run(stream: Any) -> None:
            self._backend.copy(staging.words, buffer, sizes.words, stream)
            if sizes.writes:
                bound.apply_writes(grids.apply_writes(sizes.words // WRITE_WORDS), stream)
            if sizes.positions:
                bound.gather_rows(grids.gather_rows(sizes.positions, self._num_groups), stream)
            tokens = max(sizes.tokens, 1)
            bound.slot_mapping(grids.slot_mapping(tokens, max_num_reqs, self._num_groups), stream)
            if bound.state_indices is not None:
                bound.state_indices(grids.state_indices(max_num_reqs, self._num_states), stream)

        return run

    def apply_writes(self, staging: Staging, sizes: Sizes, outputs: OutputSet, stream: Any) -> None:
        """Launch apply_writes alone over a staging array that was copied."""
        bound = self._kernels(staging, outputs, (None, None, None))
        bound.apply_writes(grids.apply_writes(sizes.words // WRITE_WORDS), stream)

    def slot_mapping(
        self, staging: Staging, outputs: OutputSet, inputs: Any, scalars: tuple[int, ...], stream: Any
    ) -> None:
        """Launch slot_mapping alone: (query_start_loc, positions, rows) on the device, scalars given.

        The scalars are num_reqs, num_tokens, num_tokens_fill and has_rows.
        """
        query_start_loc, positions, rows = inputs
        rows = self._no_ints if rows is None else rows
        tables = (self.stored.tables, self.stored.num_blocks)
        launch = self._bind_slots(
            staging, outputs, (query_start_loc, self._no_ints, positions, rows), tables, scalars
        )
        launch(grids.slot_mapping(max(scalars[2], 1), 0, self._num_groups), stream)

    def _kernels(self, staging: Staging, outputs: OutputSet, device: Any) -> _Bound:
        key = (id(outputs), *(0 if array is None else array.data.ptr for array in device))
        bound = staging.bound.get(key)
        if bound is None:
            if len(staging.bound) >= _MOST_BOUND:  # device inputs that came once, and are kept alive here
                staging.bound.clear()
            bound = staging.bound[key] = self._bind(staging, outputs, device)
        return bound

    def _bind(self, staging: Staging, outputs: OutputSet, device: Any) -> _Bound:
        stored, shown = self.stored, outputs.shown
        defaults = (self._no_ints, self._no_ints, self._no_positions)
        inputs = tuple(d if a is None else a for a, d in zip(device, defaults, strict=True))
        of_step = (staging.words, self._groups, self._views)
        source, target = (stored.tables, stored.num_blocks), (shown.tables, shown.num_blocks)
        return _Bound(
            self._backend.bind(
                "apply_writes", (*of_step, shown.first_live, *source, *target, shown.kernel_tables)
            ),
            self._backend.bind(
                "gather_rows", (*of_step, inputs[1], *source, *target, shown.first_live, shown.kernel_tables)
            ),
            self._bind_slots(staging, outputs, (*inputs, self._no_ints), target, (-1, 0, 0, 0)),
            self._bind_states(staging, outputs, inputs[1], target) if self._num_states else None,
        )

    def _bind_states(self, staging: Staging, outputs: OutputSet, computed: Any, tables: Any) -> Launch:
        of_step, states = (staging.words, self._groups, self._states), outputs.states
        arrays = (states.all_indices, states.all_initial, states.all_columns)
        return self._backend.bind(  # type: ignore[no-any-return]
            "state_indices", (*of_step, computed, outputs.seq_lens, *tables, *arrays)
        )

    def _bind_slots(
        self, staging: Staging, outputs: OutputSet, inputs: Any, tables: Any, scalars: tuple[int, ...]
    ) -> Launch:
        of_tokens = (outputs.slots, outputs.positions)
        of_step = (outputs.seq_lens, outputs.query_start_loc, outputs.token_reqs, outputs.local_seq_lens)
        return self._backend.bind(  # type: ignore[no-any-return]
            "slot_mapping", (staging.words, self._groups, *inputs, *tables, *of_tokens, *of_step, *scalars)
        )
