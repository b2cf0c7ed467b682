// apply_writes: put a step's changed columns into the device tables of all groups.
//
//   block_table[group][row, c]                    = payload[source + c - start], start <= c < end
//   batch_table[group][position, c]               = the same; NULL below the position's first live column
//   kernel_table[view][position, c * ratio + j]   = id * stride + j; NULL stays NULL
//
// grid  (any,)   one warp per record; warps stride over the records, lanes over a record's columns
// block (256,)
// Definition: apply_writes_numpy.py.  Twin: apply_writes_numba.py.
//
// tables and batch_tables may be one array (rows in batch order), hence no __restrict__ on them.
extern "C" __global__ void __launch_bounds__(256) apply_writes(
    const int* __restrict__ staging,           // [num_words]
    const long long* __restrict__ geometry,    // [num_groups, 14]
    const long long* __restrict__ views,       // [num_views, 3]
    const int* __restrict__ batch_first_live,  // [num_groups, max_num_reqs]
    int* tables,                               // [num_elements], out
    int* num_blocks,                           // [num_groups, max_num_reqs], out
    int* batch_tables,                         // [num_elements], out
    int* batch_num_blocks,                     // [num_groups, max_num_reqs], out
    int* kernel_tables)                        // [num_kernel_elements], out
{
    const int lane = threadIdx.x % 32, num_warps = gridDim.x * (blockDim.x / 32);
    const int num_writes = staging[NUM_WRITES], max_num_reqs = (int)geometry[MAX_NUM_REQS];
    const int* writes = staging + staging[WRITES];
    const int* payload = staging + staging[PAYLOAD];

    for (int w = (blockIdx.x * blockDim.x + threadIdx.x) / 32; w < num_writes; w += num_warps) {
        const int* record = writes + (long long)w * WRITE_WORDS;
        const int target = record[WRITE_TARGET], start = record[WRITE_START], end = record[WRITE_END];
        const int position = record[WRITE_POSITION], source = record[WRITE_SOURCE] >> 1;  // -1: NULL
        const bool sets_count = record[WRITE_SOURCE] & 1, is_shown = position >= 0;

        const int group = target / max_num_reqs, row = target - group * max_num_reqs;
        const long long* geo = geometry + group * GEOMETRY_WORDS;
        const long long counts = (long long)group * max_num_reqs, place = position * geo[WIDTH];
        int* table = tables + geo[TABLE_OFFSET] + row * geo[WIDTH];
        int* batch_table = batch_tables + geo[TABLE_OFFSET];
        const int first_live = is_shown ? batch_first_live[counts + position] : 0;

        for (int c = start + lane; c < end; c += 32) {
            int block_id = source >= 0 ? payload[source + c - start] : NULL_BLOCK_ID;
            table[c] = block_id;
            if (!is_shown) continue;
            if (c < first_live) block_id = NULL_BLOCK_ID;
            batch_table[place + c] = block_id;
            expand_column(block_id, place + c, geo, views, kernel_tables);
        }
        if (sets_count && lane == 0) {
            const int count = source >= 0 ? end : start;
            num_blocks[counts + row] = count;
            if (is_shown) batch_num_blocks[counts + position] = count;
        }
    }
}
