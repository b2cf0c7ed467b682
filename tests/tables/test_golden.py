"""Slot mappings computed by another engine's own kernels: single group, and all groups in one launch.

The files lie in the folder that PAGEDKV_GOLDEN names (beside the repository where it is not set).
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pagedkv import BlockTable, ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable

from .models import to_numpy

FOLDER = Path(os.environ.get("PAGEDKV_GOLDEN") or Path(__file__).resolve().parents[3] / "shared" / "golden")


def golden_cases(name):
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no {name} in {FOLDER} (set PAGEDKV_GOLDEN)")
    return json.loads(path.read_text())


def world_of(case):
    return ContextParallel(case["cp_world_size"], case["cp_rank"], case["cp_interleave"])


def test_single_group(backend):
    cases = golden_cases("slot_mapping_single_group.json")
    assert len(cases) == 60
    for case in cases:
        rows = case["block_table"]
        table = BlockTable(
            case["block_size"],
            len(rows),
            len(rows[0]),
            case["max_num_tokens"],
            context_parallel=world_of(case),
            backend=backend,
        )
        table.add_rows(range(len(rows)), [len(row) for row in rows], np.concatenate(rows))
        table.commit_block_table(len(rows))

        num_reqs = len(case["query_start_loc"]) - 1
        table.compute_slot_mapping(num_reqs, case["query_start_loc"], np.array(case["positions"], np.int64))

        np.testing.assert_array_equal(case["slot_mapping"], to_numpy(table.slot_mapping))


@pytest.mark.parametrize("fused", [False, True], ids=["separate calls", "one commit"])
def test_multi_group(backend, fused):
    cases = golden_cases("slot_mapping_multi_group.json")
    assert len(cases) == 40
    for case in cases:
        groups = [
            KVCacheGroupSpec(
                size, cp_sharded=sharded, slot_mapping=enabled, max_num_blocks_per_req=len(rows[0])
            )
            for size, sharded, enabled, rows in zip(
                case["block_sizes"],
                case["cp_sharded"],
                case["slot_mapping_enabled"],
                case["block_tables"],
                strict=True,
            )
        ]
        tables = case["block_tables"]
        num_rows = max(len(tables[0]), len(case["idx_mapping"]))
        table = MultiGroupBlockTable(
            groups,
            num_rows,
            max(size * len(rows[0]) for size, rows in zip(case["block_sizes"], tables, strict=True))
            * case["cp_world_size"],
            case["max_num_tokens"],
            context_parallel=world_of(case),
            token_alignment=None,
            stable_rows=True,
            backend=backend,
        )
        for row in range(len(tables[0])):
            table.add_row([group[row] for group in tables], row)
        rows, starts = case["idx_mapping"], np.array(case["query_start_loc"], np.int32)
        positions = np.array(case["positions"], np.int64)
        if fused:
            table.commit(len(rows), starts, np.zeros(len(rows), np.int32), rows=rows, positions=positions)
        else:
            table.commit_block_table()
            table.compute_slot_mapping(len(rows), starts, positions, rows=rows)

        for expected, group in zip(case["slot_mappings"], table, strict=True):
            np.testing.assert_array_equal(expected, to_numpy(group.slot_mapping))
