// slot_mapping: where in the KV cache each scheduled token is written, for all groups in one launch.
//
//   slot = block_table[row, b] * B + (o / (W * I)) * I + o % I,   b = p / (B * W), o = p - b * B * W
//   PAD where p is not in [0, min(max_model_len, count * B * W)), the block is NULL or (o / I) % W != rank
//
// grid  (any, num_groups)   threads stride over tokens, two neighbours at a time where there are more
//                           tokens than threads, so that one long prefill fills the GPU; each finds its
//                           token's request in query_start_loc; row 0 also writes the step's arrays, and
//                           each row the local lengths of its group
// block (256,)
// Definition: slot_mapping_numpy.py.  Twin: slot_mapping_numba.py.
constexpr long long MAX_INT32 = 2147483647;

// Last request that starts at or before `token`. Device input is not trusted: whatever query_start_loc
// holds, the result lies in [0, num_reqs). `guess` is right where all queries have one length.
__device__ __forceinline__ int find_request(const int* query_start_loc, int num_reqs, int token, int guess)
{
    const int here = query_start_loc[guess], next = query_start_loc[guess + 1];  // both loads at once
    if (here <= token && token < next) return guess;
    int low = here > token ? 0 : guess, high = here > token ? guess : num_reqs;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (query_start_loc[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

// Neighbouring values of one thread, moved at once: two slots or positions are the 16 bytes that pay.
template <class T, int TILE>
struct alignas(sizeof(T) * TILE) tile_t {
    T at[TILE];
};

struct group_t : shard_t {
    const long long* geometry;
    long long block_size, virtual_size, max_position;  // positions fit 31 bits below, and divide in 32
    divisor_t by_virtual_size;
};

struct request_t {
    int index;                 // in the batch
    int start, next;           // its tokens
    long long first_position;  // in this step
    long long limit;           // positions at or past it are PAD
    const int* blocks;         // its row
};

struct inputs_t {
    const int *query_start_loc, *num_computed_tokens, *rows, *tables, *num_blocks;
    const long long* positions;  // NULL where they are formed
    int num_reqs, num_tokens;
};

__device__ __forceinline__ group_t group_of(const long long* geometry)
{
    group_t group = {shard_of(geometry), geometry};
    group.block_size = geometry[BLOCK_SIZE], group.virtual_size = group.block_size * group.world;
    group.max_position = geometry[SLOTS_ENABLED] ? min(geometry[MAX_MODEL_LEN], MAX_INT32) : 0;
    group.by_virtual_size = divisor((unsigned)min(group.virtual_size, MAX_INT32));
    return group;
}

__device__ __forceinline__ request_t request_of(int token, const inputs_t& in, const group_t& group)
{
    request_t found;
    const float reqs_per_token = (float)in.num_reqs / max(in.num_tokens, 1);
    const int guess = min((int)((token + 0.5f) * reqs_per_token), in.num_reqs - 1);
    const int request = find_request(in.query_start_loc, in.num_reqs, token, guess);
    const int row = in.rows ? in.rows[request] : request;
    const bool is_live = row >= 0 && row < group.geometry[MAX_NUM_REQS];
    const long long first_count = blockIdx.y * group.geometry[MAX_NUM_REQS];
    found.index = request;
    found.start = in.query_start_loc[request], found.next = in.query_start_loc[request + 1];
    found.first_position = in.positions ? 0 : in.num_computed_tokens[request];
    found.limit = min(group.max_position, (is_live ? in.num_blocks[first_count + row] : 0) * group.virtual_size);
    found.blocks = in.tables + group.geometry[TABLE_OFFSET] + (is_live ? row * group.geometry[WIDTH] : 0);
    return found;
}

// IS_PLAIN: one rank, and a block size that is a power of two.
template <bool IS_PLAIN>
__device__ __forceinline__ long long slot_of(long long p, const request_t& request, const group_t& group)
{
    if ((unsigned long long)p >= (unsigned long long)request.limit) return PAD_SLOT_ID;  // negative: very large
    const unsigned b = IS_PLAIN ? (unsigned)p >> group.by_virtual_size.shift : (unsigned)p / group.by_virtual_size;
    unsigned offset = (unsigned)p - b * (unsigned)group.virtual_size;
    if (!IS_PLAIN && group.world > 1) {
        const unsigned chunk = offset / group.by_interleave, round = chunk / group.by_world;
        if (chunk - round * group.world != group.rank) return PAD_SLOT_ID;
        offset -= (chunk - round) * group.interleave;
    }
    const int block_id = request.blocks[b];
    return block_id == NULL_BLOCK_ID ? PAD_SLOT_ID : block_id * group.block_size + offset;
}

template <int TILE, bool IS_PLAIN>
__device__ __forceinline__ void map_tokens(
    int total, const inputs_t& in, const group_t& group, slot_t* slots, long long* step_positions, int* step_token_reqs)
{
    request_t request = {0, 0, 0, 0, 0, in.tables};
    const unsigned step = gridDim.x * blockDim.x * TILE;
    for (unsigned t = (blockIdx.x * blockDim.x + threadIdx.x) * TILE; t < (unsigned)total; t += step) {
        tile_t<long long, TILE> p = {};
        tile_t<slot_t, TILE> out;
        tile_t<int, TILE> reqs = {};
        const bool is_whole = t + TILE <= (unsigned)in.num_tokens;
        if (in.positions && is_whole) p = *(const tile_t<long long, TILE>*)(in.positions + t);
#pragma unroll
        for (int k = 0; k < TILE; ++k) {
            const int token = (int)t + k;
            out.at[k] = PAD_SLOT_ID;
            if (!is_whole && token >= in.num_tokens) continue;
            if (token >= request.next) request = request_of(token, in, group);
            reqs.at[k] = request.index;
            if (!in.positions) p.at[k] = request.first_position + (token - request.start);
            else if (!is_whole) p.at[k] = in.positions[token];
            out.at[k] = (slot_t)slot_of<IS_PLAIN>(p.at[k], request, group);
        }
        if (t + TILE <= (unsigned)total) {
            *(tile_t<slot_t, TILE>*)(slots + t) = out;
            if (!step_positions) continue;
            *(tile_t<long long, TILE>*)(step_positions + t) = p;
            *(tile_t<int, TILE>*)(step_token_reqs + t) = reqs;
        } else {
            slots[t] = out.at[0];  // TILE is 2, and the last token has no neighbour
            if (step_positions) step_positions[t] = p.at[0], step_token_reqs[t] = reqs.at[0];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 5) slot_mapping(
    const int* __restrict__ staging,              // [num_words]
    const long long* __restrict__ geometry,       // [num_groups, 14]
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
    int* __restrict__ step_token_reqs,            // [max_num_tokens], out
    int* __restrict__ step_local_seq_lens,        // [num_groups, req_stride], out
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
    if (num_tokens < 0) num_tokens = min(max(query_start_loc[num_reqs], 0), ~num_tokens);
    if (!num_reqs) num_tokens = 0;

    const group_t group = group_of(geometry + blockIdx.y * GEOMETRY_WORDS);
    const inputs_t in = {query_start_loc, num_computed_tokens, has_rows ? rows : 0, tables, num_blocks,
                         is_given ? positions : 0, num_reqs, num_tokens};
    const int total = max(num_tokens, num_tokens_fill);
    slot_t* out = slots + blockIdx.y * group.geometry[SLOT_STRIDE];
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;
    long long* out_positions = writes_step ? step_positions : 0;
    const unsigned long long addresses = (unsigned long long)out | (unsigned long long)out_positions;
    const unsigned long long others = (unsigned long long)in.positions | (unsigned long long)step_token_reqs;
    const bool is_aligned = ((addresses | others) & 15) == 0;
    const bool is_plain = group.world == 1 && group.by_virtual_size.shift >= 0;
    int* reqs = step_token_reqs;
    if ((unsigned)total <= num_threads || !is_aligned) map_tokens<1, false>(total, in, group, out, out_positions, reqs);
    else if (is_plain) map_tokens<2, true>(total, in, group, out, out_positions, reqs);
    else map_tokens<2, false>(total, in, group, out, out_positions, reqs);

    if (!is_step) return;
    const int num_reqs_fill = max(num_reqs, staging[NUM_REQS_FILL]);
    int* local_seq_lens = step_local_seq_lens + blockIdx.y * group.geometry[REQ_STRIDE];
    for (unsigned i = thread; i <= (unsigned)num_reqs_fill; i += num_threads) {
        const int here = query_start_loc[min((int)i, num_reqs)];
        if (writes_step) step_query_start_loc[i] = here;
        if (i == (unsigned)num_reqs_fill) continue;
        const bool is_live = i < (unsigned)num_reqs;
        const int length = is_live ? (int)((long long)num_computed_tokens[i] + query_start_loc[i + 1] - here) : 0;
        if (writes_step) step_seq_lens[i] = length;
        local_seq_lens[i] = local_length(length, group);
    }
}
