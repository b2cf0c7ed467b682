// slot_mapping: where in the KV cache each scheduled token is written, for all groups in one launch.
//
//   slot = block_table[row, b] * B + (o / (W * I)) * I + o % I,   b = p / (B * W), o = p - b * B * W
//   PAD where p is not in [0, min(max_model_len, count * B * W)), the block is NULL or (o / I) % W != rank
//
// grid  (any, num_groups)   threads stride over tokens, so that one long prefill fills the GPU; each finds
//                           its token's request in query_start_loc; row 0 also writes the step's arrays
// block (256,)
// Definition: slot_mapping_numpy.py.  Twin: slot_mapping_numba.py.
constexpr long long MAX_INT32 = 2147483647;

// Last request that starts at or before `token`. Device input is not trusted: whatever query_start_loc
// holds, the result lies in [0, num_reqs). `guess` is right where all queries have one length.
__device__ __forceinline__ int find_request(const int* query_start_loc, int num_reqs, int token, int guess)
{
    int low = 0, high = num_reqs;
    if (query_start_loc[guess] > token) high = guess;
    else if (query_start_loc[guess + 1] > token) return guess;
    else low = guess;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (query_start_loc[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256) slot_mapping(
    const int* __restrict__ staging,              // [num_words]
    const long long* __restrict__ geometry,       // [num_groups, 13]
    const int* __restrict__ query_start_loc,      // [num_reqs + 1]
    const int* __restrict__ num_computed_tokens,  // [num_reqs]
    const long long* __restrict__ positions,      // [num_tokens]
    const int* __restrict__ rows,                 // [num_reqs]
    const int* __restrict__ tables,               // [num_elements]
    const int* __restrict__ num_blocks,           // [num_groups, max_num_reqs]
    slot_t* __restrict__ slots,                   // [num_groups, slot_stride], out
    long long* __restrict__ step_positions,       // [max_num_tokens], out
    int* __restrict__ step_seq_lens,              // [max_num_reqs], out
    int* __restrict__ step_query_start_loc,       // [max_num_reqs + 1], out
    int num_reqs,
    int num_tokens,
    int num_tokens_fill,
    int has_rows)
{
    const bool is_step = num_reqs < 0, writes_step = is_step && blockIdx.y == 0;
    bool is_given = true;
    if (is_step) {
        num_reqs = staging[NUM_REQS], num_tokens = staging[NUM_TOKENS], num_tokens_fill = staging[NUM_TOKENS_FILL];
        is_given = staging[POSITIONS_GIVEN];
        query_start_loc = section(staging, QUERY_START_LOC, query_start_loc);
        num_computed_tokens = section(staging, NUM_COMPUTED_TOKENS, num_computed_tokens);
        positions = (const long long*)section(staging, POSITIONS, (const int*)positions);
        has_rows = has_rows || staging[ROWS] >= 0;
        rows = section(staging, ROWS, rows);
    }
    if (num_tokens < 0) num_tokens = num_reqs ? min(max(query_start_loc[num_reqs], 0), ~num_tokens) : 0;

    const long long* geo = geometry + blockIdx.y * GEOMETRY_WORDS;
    const unsigned world = (unsigned)geo[CP_WORLD], rank = (unsigned)geo[CP_RANK];
    const unsigned interleave = (unsigned)geo[CP_INTERLEAVE];
    const long long virtual_size = geo[BLOCK_SIZE] * world;  // below, positions fit 31 bits, and so may divide in 32
    const divisor_t by_virtual_size = divisor((unsigned)min(virtual_size, MAX_INT32));
    const divisor_t by_interleave = divisor(interleave), by_world = divisor(world);
    const long long max_position = geo[SLOTS_ENABLED] ? min(geo[MAX_MODEL_LEN], MAX_INT32) : 0;
    const float reqs_per_token = (float)num_reqs / max(num_tokens, 1);
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;

    int start = 0, next = 0;       // tokens [start, next) belong to the request that the variables describe
    long long first_position = 0;  // of that request in this step
    long long limit = 0;           // positions at or past it are PAD
    const int* blocks = tables;    // the request's row
    for (unsigned t = thread; t < (unsigned)max(num_tokens, num_tokens_fill); t += num_threads) {
        const int token = (int)t;
        long long p = 0, slot = PAD_SLOT_ID;
        if (token < num_tokens && num_reqs) {
            if (token >= next) {
                const int guess = min((int)((token + 0.5f) * reqs_per_token), num_reqs - 1);
                const int request = find_request(query_start_loc, num_reqs, token, guess);
                const int row = has_rows ? rows[request] : request;
                const bool is_live = row >= 0 && row < geo[MAX_NUM_REQS];
                start = query_start_loc[request], next = query_start_loc[request + 1];
                if (!is_given) first_position = num_computed_tokens[request];
                const long long count = is_live ? num_blocks[blockIdx.y * geo[MAX_NUM_REQS] + row] : 0;
                limit = min(max_position, count * virtual_size);
                if (is_live) blocks = tables + geo[TABLE_OFFSET] + row * geo[WIDTH];
            }
            p = is_given ? positions[token] : first_position + ((long long)token - start);
            if (p >= 0 && p < limit) {
                const unsigned b = (unsigned)p / by_virtual_size;
                unsigned offset = (unsigned)(p - b * virtual_size);
                bool is_local = true;
                if (world > 1) {
                    const unsigned chunk = offset / by_interleave, round = chunk / by_world;
                    is_local = chunk - round * world == rank;
                    offset -= (chunk - round) * interleave;
                }
                const int block_id = is_local ? blocks[b] : NULL_BLOCK_ID;
                if (block_id != NULL_BLOCK_ID) slot = block_id * geo[BLOCK_SIZE] + offset;
            }
        }
        slots[blockIdx.y * geo[SLOT_STRIDE] + t] = (slot_t)slot;
        if (writes_step) step_positions[t] = p;
    }

    if (!writes_step) return;
    const int num_reqs_fill = max(num_reqs, staging[NUM_REQS_FILL]);
    for (unsigned i = thread; i <= (unsigned)num_reqs_fill; i += num_threads) {
        const int here = query_start_loc[min((int)i, num_reqs)];
        step_query_start_loc[i] = here;
        if (i == (unsigned)num_reqs_fill) continue;
        const bool is_live = i < (unsigned)num_reqs;
        step_seq_lens[i] = is_live ? (int)((long long)num_computed_tokens[i] + query_start_loc[i + 1] - here) : 0;
    }
}
