"""Whose rows a batch has: which kind they are, and one batch over each mirror."""

import weakref
from typing import Any

from pagedkv.batch.managed_rows import ManagedRows
from pagedkv.batch.rows import Rows
from pagedkv.batch.states import RequestStates
from pagedkv.batch.written_rows import BatchOrderRows, StableRows
from pagedkv.mirror import HostMirror
from pagedkv.tables.multi_group import MultiGroupBlockTable

__all__ = ["join", "rows_of"]


def join(mirror: HostMirror, batch: Any) -> None:
    """Make a batch the mirror's; raises ValueError while another one is: they would use the same rows."""
    if mirror.batch is not None and mirror.batch() is not None:
        raise ValueError(
            "table must have one InputBatch, got a second one while another over the same mirror lives "
            "(use that one, or drop it)"
        )
    mirror.batch = weakref.ref(batch)


def rows_of(table: MultiGroupBlockTable, manager: Any, states: RequestStates) -> Rows:
    """Return the rows of a batch; raises ValueError where somebody else writes the table."""
    if manager is not None:
        if getattr(manager, "mirror", None) is not table.mirror:
            raise ValueError("table must commit the manager's mirror, got another (mirror=manager.mirror)")
        if table.max_model_len < manager.max_model_len:
            raise ValueError(
                f"table must have at least the manager's max_model_len {manager.max_model_len}, "
                f"got {table.max_model_len}: later tokens would have no slots"
            )
        if not table.stable_rows:
            raise ValueError(
                "table must have stable rows with a manager, got rows in batch order (stable_rows=True)"
            )
        return ManagedRows(manager, states)
    if table.mirror.owner is not None:
        raise ValueError(f"manager must be given: {table.mirror.owner} writes the table's mirror")
    return StableRows(table.mirror, states) if table.stable_rows else BatchOrderRows(table.mirror, states)
