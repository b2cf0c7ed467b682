"""Every array that a step hands out starts on 256 bytes, as consumers of DLPack expect."""

import numpy as np
import pytest

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from tests.gpu.pairs import arrays_of

from .models import bytes_past_alignment

GROUPS = [
    KVCacheGroupSpec(3, (1,)),
    KVCacheGroupSpec(6, state_mode="all", num_speculative_blocks=2),
    KVCacheGroupSpec(4, (2, (4, 5)), sliding_window=6),
    KVCacheGroupSpec(5, state_mode="none"),
    KVCacheGroupSpec(7, state_mode="align", num_speculative_blocks=1),
    KVCacheGroupSpec(7),
]


@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
@pytest.mark.parametrize("max_num_reqs", [1, 3, 64, 65])
def test_every_array_of_a_step_is_aligned(backend, max_num_reqs, stable_rows, slot_dtype):
    """Whatever its sizes and its number of groups, which are no multiples of 64; in every output set."""
    table = MultiGroupBlockTable(
        GROUPS,
        max_num_reqs,
        50,
        max_num_reqs + 7,
        context_parallel=ContextParallel(2, 1),
        token_alignment=None,
        stable_rows=stable_rows,
        backend=backend,
        slot_dtype=slot_dtype,
    )
    table.outputs(2)
    rows = {"rows": np.arange(max_num_reqs, dtype=np.int32)} if stable_rows else {}
    starts, computed = np.arange(max_num_reqs + 1, dtype=np.int32), np.zeros(max_num_reqs, np.int32)

    for out in (0, 1):
        arrays = arrays_of(table.commit(max_num_reqs, starts, computed, **rows, out=out), table)

        assert len(arrays) == 4 + 3 * len(GROUPS) + 3 + 5 * 3
        assert {name: bytes_past_alignment(array) for name, array in arrays.items()} == dict.fromkeys(
            arrays, 0
        )
        assert all(array.flags.c_contiguous for array in arrays.values())
