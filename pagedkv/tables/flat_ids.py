"""Block ids as people write them, one list a group, as the flat arrays that the mirror takes."""

from typing import Any

import numpy as np

from pagedkv.checks import IntArray

__all__ = ["flat_ids"]


def flat_ids(block_ids: Any, num_groups: int) -> tuple[IntArray, IntArray]:
    """Return counts int32 [G, 1] (-1 for None) and the flat ids of one row: one list of ids a group."""
    if not hasattr(block_ids, "__len__"):
        raise TypeError(f"block_ids must hold one list a group, got {type(block_ids).__name__}")
    if len(block_ids) != num_groups:
        raise ValueError(
            f"block_ids must hold one list for each of {num_groups} groups, got {len(block_ids)}"
        )
    lists = [np.empty(0, np.int32) if ids is None else np.asarray(ids) for ids in block_ids]
    counts = [[-1 if ids is None else flat.size] for ids, flat in zip(block_ids, lists, strict=True)]
    filled = [flat for flat in lists if flat.size]
    for flat in filled:  # joined lists would hide a list of booleans
        if flat.dtype.kind not in "iu":
            raise TypeError(f"block_ids must hold integers, got dtype {flat.dtype}")
        if flat.ndim != 1:
            raise ValueError(f"block_ids must have one dimension, got shape {list(flat.shape)}")
    return np.array(counts, np.int32).reshape(num_groups, 1), (
        np.concatenate(filled) if filled else np.empty(0, np.int32)
    )
