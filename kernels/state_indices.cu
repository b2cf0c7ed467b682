// state_indices: which blocks hold the recurrent states that a step reads and writes, for all state groups.
//
//   indices[i, j] = block_table[i, last_scheduled + j], initial_indices[i] = block_table[i, last_computed]
//   last_computed = (c - 1) / B, first_scheduled = c / B, last_scheduled = (L - 1) / B; 0 for a running state
//   -1, 0 and 0 where there are no tokens; NULL where the column is negative or at or past the row's count
//
// grid  (any, num_states)   threads stride over batch positions, padding included
// block (256,)
// Definition: state_indices_numpy.py.  Twin: state_indices_numba.py.
__device__ __forceinline__ int block_at(const int* row, long long count, long long column)
{
    return 0 <= column && column < count ? row[column] : NULL_BLOCK_ID;
}

extern "C" __global__ void __launch_bounds__(256) state_indices(
    const int* __restrict__ staging,              // [num_words]
    const long long* __restrict__ geometry,       // [num_groups, 14]
    const long long* __restrict__ states,         // [num_states, 4]
    const int* __restrict__ num_computed_tokens,  // [num_reqs]
    const int* __restrict__ seq_lens,             // [max_num_reqs]
    const int* __restrict__ tables,               // [num_elements]
    const int* __restrict__ num_blocks,           // [num_groups, max_num_reqs]
    int* __restrict__ indices,                    // [num_state_elements], out
    int* __restrict__ initial_indices,            // [num_states, req_stride], out
    int* __restrict__ columns)                    // [num_states, 3, req_stride], out
{
    const long long* state = states + blockIdx.y * STATE_WORDS;
    const long long* group = geometry + state[STATE_GROUP] * GEOMETRY_WORDS;
    const long long req_stride = group[REQ_STRIDE], width = group[WIDTH], size = group[BLOCK_SIZE];
    const long long num_written = 1 + state[STATE_DRAFTS];
    const bool by_position = state[STATE_BY_POSITION];
    const int* computed = section(staging, NUM_COMPUTED_TOKENS, num_computed_tokens);
    const int* counts = num_blocks + state[STATE_GROUP] * group[MAX_NUM_REQS];
    const int* table = tables + group[TABLE_OFFSET];
    int* to = indices + state[STATE_OFFSET];
    int* initial = initial_indices + blockIdx.y * req_stride;
    int* last_computed = columns + blockIdx.y * 3 * req_stride;
    int *first_scheduled = last_computed + req_stride, *last_scheduled = first_scheduled + req_stride;

    const int num_reqs = staging[NUM_REQS], num_reqs_fill = max(num_reqs, staging[NUM_REQS_FILL]);
    const long long num_threads = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < num_reqs_fill; i += num_threads) {
        long long before = -1, first = 0, last = 0, count = 0;
        if (i < num_reqs) {
            const long long c = computed[i], length = seq_lens[i];
            if (c > 0) before = by_position ? (c - 1) / size : 0;
            if (c > 0 && by_position) first = c / size;
            if (length > 0 && by_position) last = (length - 1) / size;
            count = min((long long)counts[i], width);
        }
        const int* row = table + i * width;
        for (long long j = 0; j < num_written; ++j) to[i * num_written + j] = block_at(row, count, last + j);
        initial[i] = block_at(row, count, before);
        last_computed[i] = (int)before, first_scheduled[i] = (int)first, last_scheduled[i] = (int)last;
    }
}
