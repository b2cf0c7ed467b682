"""split_batch: one micro-batch of a step, cut out of the step's arrays: tokens [first_token, last_token).

For its row i, which is row r = first_req + i of the step, and its token t, with t0 = first_token,
t1 = last_token and n = last_req - first_req, in 64 bits:

    part_query_start_loc[i] = clip(query_start_loc[r], t0, t1) - t0             for 0 <= i <= n
    beyond                  = the request's tokens at or past t1
    part_seq_lens[i]        = seq_lens[r] - beyond
    part_token_reqs[t]      = clip(token_reqs[t0 + t] - first_req, 0, n - 1)    for 0 <= t < t1 - t0

So a request that is cut has a row in both micro-batches: the earlier one ends its sequence at the cut,
and in the later one the tokens before the cut count as computed. Rows of padding stay as they are,
without tokens. Tokens of the padding, whose token_reqs is 0, belong to row 0.

part_local_seq_lens[g, i] is the share of part_seq_lens[i] that lies on the group's rank, as in slot_mapping.
"""

import numpy as np
from pagedkv.kernels.slot_mapping_numpy import local_lengths

from pagedkv.kernels._spec import I32, I64, Array, OutI32, Scalar


def split_batch(
    geometry: I64[Array, "num_groups 14"],
    query_start_loc: I32[Array, "num_reqs+1"],
    seq_lens: I32[Array, "num_reqs"],
    token_reqs: I32[Array, "num_tokens"],
    part_query_start_loc: OutI32[Array, "max_num_reqs+1"],
    part_seq_lens: OutI32[Array, "max_num_reqs"],
    part_token_reqs: OutI32[Array, "max_num_tokens"],
    part_local_seq_lens: OutI32[Array, "num_groups req_stride"],
    first_req: Scalar,
    last_req: Scalar,
    first_token: Scalar,
    last_token: Scalar,
) -> None:
    n = last_req - first_req
    starts = query_start_loc[first_req : last_req + 1].astype(np.int64)
    part_query_start_loc[: n + 1] = np.clip(starts, first_token, last_token) - first_token
    beyond = np.diff(np.maximum(starts, last_token))
    part_seq_lens[:n] = seq_lens[first_req:last_req] - beyond
    reqs = token_reqs[first_token:last_token].astype(np.int64) - first_req
    part_token_reqs[: last_token - first_token] = np.clip(reqs, 0, max(n - 1, 0))
    for g, group in enumerate(geometry):
        part_local_seq_lens[g, :n] = local_lengths(group, part_seq_lens[:n])
