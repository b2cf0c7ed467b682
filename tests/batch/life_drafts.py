"""Slots of the drafts that follow a step, mapped into an output set of their own."""

import numpy as np

from pagedkv import PAD_SLOT_ID
from tests.tables.models import slot_of, to_numpy

from .life_expect import equal
from .life_model import STALE


def map_drafts(world, expected, over, random):
    """Map a few positions after each request's tokens, and write there what the next step overwrites."""
    most = random.randint(0, 3)
    plans = expected.plans
    lengths = [random.choice([most, random.randint(0, most)]) for _ in plans]
    if not world.table.stable_rows:
        lengths = [n * (plan.request not in over) for n, plan in zip(lengths, plans, strict=True)]
    starts = np.minimum(np.cumsum([0, *lengths]), world.max_tokens).astype(np.int32)
    lengths = np.diff(starts).tolist()
    positions = [plan.request.computed + t for plan, n in zip(plans, lengths, strict=True) for t in range(n)]
    rows = rows_of(world, plans, over) if world.table.stable_rows else None
    before = [
        to_numpy(world.table.slot_mapping(g, world.max_tokens, 0)).copy() for g in range(len(world.specs))
    ]
    mapped = world.table.compute_slot_mapping(
        len(plans), starts, np.array(positions, np.int64), rows=rows, out=1
    )
    requests = [i for i, n in enumerate(lengths) for _ in range(n)]
    for g, spec in enumerate(world.specs):
        slots = [
            PAD_SLOT_ID
            if rows is not None and rows[i] < 0
            else slot_of(p, expected.rows[i][g], spec, world.context_parallel, world.max_model_len)
            for i, p in zip(requests, positions, strict=True)
        ]
        equal(slots, mapped[g], f"slots of drafts {g}")
        whole = to_numpy(world.table.slot_mapping(g, world.max_tokens, 1))
        assert (whole[len(slots) :] == PAD_SLOT_ID).all(), "past the drafts"
        equal(before[g], world.table.slot_mapping(g, world.max_tokens, 0), "the step keeps its slots")
        for i, slot in zip(requests, to_numpy(mapped[g]).tolist(), strict=True):
            if slot != PAD_SLOT_ID:
                assert slot // spec.block_size in world.blocks.live(plans[i].request)[g]
                world.memory.write(g, slot // spec.block_size, slot % spec.block_size, STALE)


def rows_of(world, plans, over):
    """Table row of each request; -1 for those that are over, which draft nothing."""
    rows = zip(world.batch.rows.tolist(), plans, strict=True)
    return np.array([-1 if plan.request in over else row for row, plan in rows], np.int32)
