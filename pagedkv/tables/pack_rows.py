"""Packing stable rows: which batch positions keep their row, and which are gathered anew.

`batch` int64 [2, max_num_reqs] holds, for one output set, the row shown at each position and the row's
version then; `versions` int64 [2, max_num_reqs] holds, per row, how often its writes were sent and, while a
step is packed, the position that keeps it (-1 otherwise).
"""

from typing import Any

from pagedkv.compiled import compiled

__all__ = ["forget_rows", "place_rows", "show_rows"]

Array = Any


@compiled
def place_rows(
    out: Array, at: int, batch: Array, versions: Array, ranges: Array, rows: Array, seen: int, groups: int
) -> bool:
    """Write the gather section; returns whether any position changes its row."""
    # A position keeps its row if it shows that row as it was before this step's writes; those then come
    # by apply_writes. One position a row can be kept so: a repeated, changed row is gathered again.
    changed = False
    for i in range(rows.size):
        row = rows[i]
        kept = i < seen and batch[0, i] == row
        if kept and row >= 0:
            kept = batch[1, i] == versions[0, row]
            if kept and versions[1, row] < 0:
                versions[1, row] = i
            elif kept:
                for g in range(groups):
                    kept = kept and ranges[g * versions.shape[1] + row, 1] == 0
        out[at + i] = -(row + 2) if kept and row >= 0 else row
        changed = changed or not (kept or (row < 0 and (i >= seen or batch[0, i] < 0)))
    for i in range(rows.size, seen):
        out[at + i] = -1
        changed = changed or batch[0, i] >= 0
    return changed


@compiled
def forget_rows(versions: Array, rows: Array) -> None:
    """Forget which positions keep which rows: the packing is over, or was given up."""
    for i in range(rows.size):
        if rows[i] >= 0:
            versions[1, rows[i]] = -1


@compiled
def show_rows(batch: Array, versions: Array, rows: Array, seen: int) -> None:
    """Note what the step shows, once its writes were packed."""
    for i in range(rows.size):
        batch[0, i] = rows[i]
        if rows[i] >= 0:
            batch[1, i] = versions[0, rows[i]]
    forget_rows(versions, rows)
    for i in range(rows.size, seen):
        batch[0, i] = -1
