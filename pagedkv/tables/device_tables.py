"""DeviceTables: all groups' tables in device memory, and cached views of them."""

from typing import Any

import numpy as np

from pagedkv.checks import check_int, check_view
from pagedkv.tables.geometry import Geometry
from pagedkv.tables.kept import Kept, keep

__all__ = ["DeviceTables"]


class DeviceTables:
    """Flat arenas of all groups' tables, and of their kernel views, at addresses that never change.

    Parameters
    ----------
    backend : backend
        Where the arrays live.
    geometry : Geometry
        Shapes and places.
    with_views : bool
        False for tables that no attention kernel reads (the stored half of stable rows).
    """

    def __init__(self, backend: Any, geometry: Geometry, *, with_views: bool) -> None:
        rows = (len(geometry.groups), geometry.max_num_reqs)
        self._geometry = geometry
        self.tables = backend.zeros(max(geometry.table_offsets[-1], 1), np.int32)
        self.num_blocks = backend.zeros(rows, np.int32)
        self.first_live = backend.zeros(rows, np.int32)
        self.kernel_tables = backend.zeros(geometry.num_kernel_elements if with_views else 0, np.int32)
        self._cached: Kept = {}

    def block_table(self, group: int, num_rows: int) -> Any:
        """Rows [0, num_rows) of a group's table, int32 [num_rows, width]; a view, made once."""
        view = self._cached.get((group, None, num_rows))
        if view is None:
            check_int("group", group, 0, len(self._geometry.specs) - 1)
            width, start = self._geometry.widths[group], self._geometry.table_offsets[group]
            rows = self.tables[start : start + num_rows * width].reshape(num_rows, width)
            view = keep(self._cached, (group, None, num_rows), rows)
        return view

    def kernel_block_table(self, group: int, view: int, num_rows: int) -> Any:
        """Rows [0, num_rows) in a view's kernel blocks, int32 [num_rows, width * ratio]; made once."""
        found = self._cached.get((group, view, num_rows))
        if found is None:
            check_int("group", group, 0, len(self._geometry.specs) - 1)
            check_view(group, view, len(self._geometry.view_offsets[group]))
            ratio, _ = self._geometry.specs[group].views()[view]
            width, start = (
                self._geometry.widths[group] * ratio,
                self._geometry.view_offsets[group][view],
            )
            rows = self.kernel_tables[start : start + num_rows * width].reshape(num_rows, width)
            found = keep(self._cached, (group, view, num_rows), rows)
        return found
