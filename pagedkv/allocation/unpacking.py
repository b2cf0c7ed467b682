"""The manager's arrays as compiled calls take them: one table of addresses for pool, mirror and manager."""

from typing import Any

import numpy as np

from pagedkv.addresses import address_table, int32_1d, int32_2d, int32_3d, int64_1d, int64_2d
from pagedkv.allocation.block_records import PoolArrays
from pagedkv.allocation.sequence_state import Array, ManagerArrays
from pagedkv.compiled import compiled
from pagedkv.mirror import MirrorState

__all__ = ["pack", "unpack"]


def pack(pool: PoolArrays, mirror: MirrorState, manager: ManagerArrays) -> Any:
    """Write the addresses down; whoever does keeps the arrays alive, and packs anew when one is replaced."""
    return address_table(*pool, *mirror, *manager)


@compiled
def unpack(state: Array) -> tuple[PoolArrays, MirrorState, ManagerArrays]:
    """Make the arrays again, in the order of `pack`."""
    pool = PoolArrays(
        records=int32_2d(state, 0),
        counters=int64_1d(state, 1),
        keys=int64_2d(state, 2).view(np.uint64),
        twins=int32_2d(state, 3),
        entries=int32_1d(state, 4),
        log=int64_2d(state, 5).view(np.uint64),
    )
    mirror = MirrorState(
        blocks=int32_1d(state, 6),
        layout=int64_2d(state, 7),
        counts=int32_2d(state, 8),
        ranges=int32_3d(state, 9),
        dirty=int32_2d(state, 10),
    )
    manager = ManagerArrays(
        groups=int64_2d(state, 11),
        sequences=int32_2d(state, 12),
        cursors=int32_3d(state, 13),
        tokens=int32_1d(state, 14),
        keys=int64_2d(state, 15).view(np.uint64),
        extras=int64_2d(state, 16).view(np.uint64),
        rows=int32_1d(state, 17),
        copies=int32_2d(state, 18),
        limits=int64_1d(state, 19),
        recent=int64_2d(state, 20),
        batch_handles=int64_1d(state, 21),
        batch_places=int32_1d(state, 22),
        totals=int64_1d(state, 23),
    )
    return pool, mirror, manager
