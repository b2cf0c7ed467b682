"""expand_blocks: manager block ids as the attention kernel's smaller blocks.

    kernel_block_ids[i * ratio + j] = block_ids[i] * stride + j    for 0 <= j < ratio

NULL (0) stays NULL in all `ratio` places. stride = ratio unless the cache is packed.
"""

import numpy as np

from pagedkv.kernels._spec import I32, Array, OutI32, Scalar


def expand_blocks(
    block_ids: I32[Array, "num_ids"],
    kernel_block_ids: OutI32[Array, "num_ids*ratio"],
    num_ids: Scalar,
    ratio: Scalar,
    stride: Scalar,
) -> None:
    ids = block_ids[:num_ids, None]
    kernel_block_ids[: num_ids * ratio] = np.where(ids != 0, ids * stride + np.arange(ratio), 0).ravel()
