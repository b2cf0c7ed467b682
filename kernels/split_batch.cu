// split_batch: one micro-batch of a step, cut out of the step's arrays: tokens [first_token, last_token).
//
//   part_query_start_loc[i] = clip(query_start_loc[first_req + i], first_token, last_token) - first_token
//   part_seq_lens[i]        = seq_lens[first_req + i] - the request's tokens at or past last_token
//   part_token_reqs[t]      = clip(token_reqs[first_token + t] - first_req, 0, rows - 1)
//   part_local_seq_lens     = the rank's share of part_seq_lens, for each group
//
// grid  (any, num_groups)   threads stride over rows, and over tokens; row 0 writes what all groups share
// block (256,)
// Definition: split_batch_numpy.py.  Twin: split_batch_numba.py.
extern "C" __global__ void __launch_bounds__(256) split_batch(
    const long long* __restrict__ geometry,   // [num_groups, 14]
    const int* __restrict__ query_start_loc,  // [num_reqs + 1]
    const int* __restrict__ seq_lens,         // [num_reqs]
    const int* __restrict__ token_reqs,       // [num_tokens]
    int* __restrict__ part_query_start_loc,   // [max_num_reqs + 1], out
    int* __restrict__ part_seq_lens,          // [max_num_reqs], out
    int* __restrict__ part_token_reqs,        // [max_num_tokens], out
    int* __restrict__ part_local_seq_lens,    // [num_groups, req_stride], out
    int first_req,
    int last_req,
    int first_token,
    int last_token)
{
    const long long* group = geometry + blockIdx.y * GEOMETRY_WORDS;
    const shard_t shard = shard_of(group);
    const bool writes_shared = blockIdx.y == 0;
    const unsigned num_reqs = last_req - first_req, num_tokens = last_token - first_token;
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;
    int* local_seq_lens = part_local_seq_lens + blockIdx.y * group[REQ_STRIDE];
    query_start_loc += first_req, seq_lens += first_req, token_reqs += first_token;

    for (unsigned i = thread; i <= num_reqs; i += num_threads) {
        const int here = query_start_loc[i];
        if (writes_shared) part_query_start_loc[i] = min(max(here, first_token), last_token) - first_token;
        if (i == num_reqs) continue;
        const long long beyond = (long long)max(query_start_loc[i + 1], last_token) - max(here, last_token);
        const int length = (int)(seq_lens[i] - beyond);
        if (writes_shared) part_seq_lens[i] = length;
        local_seq_lens[i] = local_length(length, shard);
    }
    if (!writes_shared) return;
    for (unsigned t = thread; t < num_tokens; t += num_threads) {
        const long long request = (long long)token_reqs[t] - first_req;
        part_token_reqs[t] = (int)max(min(request, (long long)num_reqs - 1), 0LL);
    }
}
