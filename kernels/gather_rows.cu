// gather_rows: bring stable rows into batch order, touching only positions that changed.
//
//   batch_table[group][i, c] = block_table[group][row, c] where live <= c < count, else NULL
//   live = max(p - reach, 0) / (block_size * cp_world) under a sliding window, else 0; p = num_computed_tokens[i]
//
// The columns touched: all up to the larger of the old and new counts where the position's row changed (word
// >= -1), those between the old and new `live` where it stayed (word <= -2).
//
// grid  (any, num_groups)   a block takes 4 positions at a time: one thread each decides and keeps the
//                           counts (no other thread reads them), then all threads copy the columns
// block (256,)
// Definition: gather_rows_numpy.py.  Twin: gather_rows_numba.py.
enum { GATHER_TILE = 4 };

extern "C" __global__ void __launch_bounds__(256) gather_rows(
    const int* __restrict__ staging,              // [num_words]
    const long long* __restrict__ geometry,       // [num_groups, 14]
    const long long* __restrict__ views,          // [num_views, 3]
    const int* __restrict__ num_computed_tokens,  // [num_reqs]
    const int* __restrict__ tables,               // [num_elements]
    const int* __restrict__ num_blocks,           // [num_groups, max_num_reqs]
    int* __restrict__ batch_tables,               // [num_elements], out
    int* __restrict__ batch_num_blocks,           // [num_groups, max_num_reqs], out
    int* __restrict__ batch_first_live,           // [num_groups, max_num_reqs], out
    int* __restrict__ kernel_tables)              // [num_kernel_elements], out
{
    __shared__ int rows[GATHER_TILE], starts[GATHER_TILE], ends[GATHER_TILE], lives[GATHER_TILE], counts[GATHER_TILE];
    const int* words = staging + staging[GATHER];
    const int* computed = section(staging, NUM_COMPUTED_TOKENS, num_computed_tokens);
    const int num_gather = staging[NUM_GATHER], num_reqs = staging[NUM_REQS];
    const long long* geo = geometry + blockIdx.y * GEOMETRY_WORDS;
    const long long width = geo[WIDTH], first_count = blockIdx.y * geo[MAX_NUM_REQS];

    for (int first = blockIdx.x * GATHER_TILE; first < num_gather; first += gridDim.x * GATHER_TILE) {
        const int tile = min((int)GATHER_TILE, num_gather - first);
        for (int k = threadIdx.x; k < tile; k += blockDim.x) {
            const int i = first + k, word = words[i], row = word <= KEEP ? -word - 2 : word;
            const int count = row >= 0 ? num_blocks[first_count + row] : 0;
            const int before = batch_num_blocks[first_count + i], dead = batch_first_live[first_count + i];
            long long live = 0;
            if (geo[WINDOW_REACH] >= 0 && i < num_reqs) {
                live = max(computed[i] - geo[WINDOW_REACH], 0LL) / (geo[BLOCK_SIZE] * geo[CP_WORLD]);
                live = min(live, (long long)count);
            }
            rows[k] = row, counts[k] = count, lives[k] = (int)live;
            starts[k] = word <= KEEP ? min(dead, (int)live) : 0;
            ends[k] = min(word <= KEEP ? max(dead, (int)live) : width, (long long)max(count, before));
            batch_num_blocks[first_count + i] = count;
            batch_first_live[first_count + i] = (int)live;
        }
        __syncthreads();
        for (int k = 0; k < tile; ++k) {
            const int* stored = tables + geo[TABLE_OFFSET] + (rows[k] >= 0 ? rows[k] * width : 0);
            const long long place = (first + k) * width;
            for (int c = starts[k] + threadIdx.x; c < ends[k]; c += blockDim.x) {
                const int block_id = lives[k] <= c && c < counts[k] ? stored[c] : NULL_BLOCK_ID;
                batch_tables[geo[TABLE_OFFSET] + place + c] = block_id;
                expand_column(block_id, place + c, geo, views, kernel_tables);
            }
        }
        __syncthreads();
    }
}
