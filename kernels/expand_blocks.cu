// expand_blocks: manager block ids as the attention kernel's smaller blocks.
//
//   kernel_block_ids[i * ratio + j] = block_ids[i] * stride + j,   0 <= j < ratio; NULL stays NULL
//
// grid  (any,)   threads stride over the kernel block ids, so that the writes are coalesced
// block (256,)
// Definition: expand_blocks_numpy.py.  Twin: expand_blocks_numba.py.
extern "C" __global__ void __launch_bounds__(256) expand_blocks(
    const int* __restrict__ block_ids,   // [num_ids]
    int* __restrict__ kernel_block_ids,  // [num_ids * ratio], out
    int num_ids,
    int ratio,
    int stride)
{
    const divisor_t by_ratio = divisor(ratio);
    const long long num_kernel_ids = (long long)num_ids * ratio, step = (long long)gridDim.x * blockDim.x;

    for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < num_kernel_ids; k += step) {
        const long long i = k >> 32 ? k / ratio : (unsigned)k / by_ratio;
        const int block_id = block_ids[i], j = (int)(k - i * ratio);
        kernel_block_ids[k] = block_id == NULL_BLOCK_ID ? NULL_BLOCK_ID : block_id * stride + j;
    }
}
