"""slot_mapping against slot mappings that vLLM's own kernels computed (PAGEDKV_GOLDEN names their folder)."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from .test_slot_mapping import map_slots
from .world import Group, World

DEFAULT = Path(__file__).parents[2].parent / "shared" / "golden"


def cases(name):
    path = Path(os.environ.get("PAGEDKV_GOLDEN", DEFAULT)) / name
    if not path.is_file():
        pytest.skip(f"no golden file {name} (set PAGEDKV_GOLDEN to its folder)")
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded["cases"] if isinstance(loaded, dict) else loaded


def tables(world, rows_by_group):
    arena, counts = world.arena(), world.counts()
    for g, rows in enumerate(rows_by_group):
        for i, row in enumerate(rows):
            world.table(arena, g)[i, : len(row)] = row
            counts[g, i] = len(row)
    return arena, counts


def test_one_group(form):
    for case in cases("slot_mapping_single_group.json"):
        cp = case["cp_world_size"], case["cp_rank"], case["cp_interleave"]
        rows = case["block_table"]
        world = World([Group(case["block_size"], width=max(map(len, rows)), cp=cp)], len(rows))
        inputs = {name: case[name] for name in ("query_start_loc", "positions")}

        slots = map_slots(form, world, *tables(world, [rows]), **inputs, fill=case["max_num_tokens"])

        np.testing.assert_array_equal(case["slot_mapping"], slots[0])


def test_many_groups(form):
    for case in cases("slot_mapping_multi_group.json"):
        cp = case["cp_world_size"], case["cp_rank"], case["cp_interleave"]
        groups = [
            Group(size, width=max(map(len, rows)), cp=cp if sharded else (1, 0, 1), has_slots=enabled)
            for size, rows, sharded, enabled in zip(
                case["block_sizes"],
                case["block_tables"],
                case["cp_sharded"],
                case["slot_mapping_enabled"],
                strict=True,
            )
        ]
        world = World(groups, len(case["block_tables"][0]))
        inputs = {name: case[name] for name in ("query_start_loc", "positions")}
        fill = len(case["slot_mappings"][0])

        arena, counts = tables(world, case["block_tables"])
        slots = map_slots(form, world, arena, counts, **inputs, rows=case["idx_mapping"], fill=fill)

        np.testing.assert_array_equal(case["slot_mappings"], slots)
