// What every kernel shares. pagedkv.kernels.source puts this text in front of each .cu; nothing is ever
// #included. The numbers are those of pagedkv/kernels/_layout.py (a test holds them equal).

#ifndef SLOT_T
#define SLOT_T long long
#endif
typedef SLOT_T slot_t;  // int where a table was built with int32 slots

enum sentinel { PAD_SLOT_ID = -1, NULL_BLOCK_ID = 0 };

enum header {
    NUM_REQS = 0,
    NUM_REQS_FILL = 1,
    NUM_TOKENS = 2,
    NUM_TOKENS_FILL = 3,
    NUM_WRITES = 4,
    WRITES = 5,
    PAYLOAD = 6,
    QUERY_START_LOC = 7,
    NUM_COMPUTED_TOKENS = 8,
    POSITIONS = 9,
    POSITIONS_GIVEN = 10,
    ROWS = 11,
    NUM_GATHER = 12,
    GATHER = 13,
    HEADER_WORDS = 16,
};

enum write_record {
    WRITE_TARGET = 0,
    WRITE_START = 1,
    WRITE_END = 2,
    WRITE_SOURCE = 3,
    WRITE_POSITION = 4,
    WRITE_WORDS = 5,
    WRITE_CHUNK = 256,
};

enum gather_word { KEEP = -2 };

enum group_geometry {
    TABLE_OFFSET = 0,
    WIDTH = 1,
    MAX_NUM_REQS = 2,
    BLOCK_SIZE = 3,
    CP_WORLD = 4,
    CP_RANK = 5,
    CP_INTERLEAVE = 6,
    SLOTS_ENABLED = 7,
    MAX_MODEL_LEN = 8,
    WINDOW_REACH = 9,
    FIRST_VIEW = 10,
    NUM_VIEWS = 11,
    SLOT_STRIDE = 12,
    REQ_STRIDE = 13,
    GEOMETRY_WORDS = 14,
};

enum kernel_view { VIEW_OFFSET = 0, VIEW_RATIO = 1, VIEW_STRIDE = 2, VIEW_WORDS = 3 };

enum state_group { STATE_GROUP = 0, STATE_BY_POSITION = 1, STATE_DRAFTS = 2, STATE_OFFSET = 3, STATE_WORDS = 4 };

// A section of the staging buffer, or the device array where the step does not carry it.
__device__ __forceinline__ const int* section(const int* staging, int word, const int* device_array)
{
    return staging[word] >= 0 ? staging + staging[word] : device_array;
}

// Division by a number that stays the same for a whole launch: a shift where it is a power of two, in 32
// bits always (64-bit division costs a GPU a hundred instructions).
struct divisor_t {
    unsigned value;
    int shift;  // -1: no power of two
};

__device__ __forceinline__ divisor_t divisor(unsigned value)
{
    return {value, value & (value - 1) ? -1 : 31 - __clz((int)value)};
}

__device__ __forceinline__ unsigned operator/(unsigned n, divisor_t by)
{
    return by.shift >= 0 ? n >> by.shift : n / by.value;
}

// The context-parallel world of a group, and this rank's place in it.
struct shard_t {
    unsigned world, rank, interleave;
    divisor_t by_interleave, by_world;
};

__device__ __forceinline__ shard_t shard_of(const long long* group)
{
    const unsigned world = (unsigned)group[CP_WORLD], interleave = (unsigned)group[CP_INTERLEAVE];
    return {world, (unsigned)group[CP_RANK], interleave, divisor(interleave), divisor(world)};
}

// Positions below `length` that lie on the rank: whole rounds over the ranks, and its part of the last.
__device__ __forceinline__ int local_length(int length, const shard_t& shard)
{
    if (shard.world == 1 || length <= 0) return max(length, 0);
    const unsigned round = (unsigned)length / shard.by_interleave / shard.by_world;
    const long long before = ((long long)round * shard.world + shard.rank) * shard.interleave;
    return (int)(round * shard.interleave + min(max(length - before, 0LL), (long long)shard.interleave));
}

// Write one manager block as kernel blocks into every view of its group; place = position * width + column.
__device__ __forceinline__ void expand_column(
    int block_id, long long place, const long long* group, const long long* views, int* kernel_tables)
{
    const long long* view = views + group[FIRST_VIEW] * VIEW_WORDS;
    for (int n = (int)group[NUM_VIEWS]; n > 0; --n, view += VIEW_WORDS) {
        const int ratio = (int)view[VIEW_RATIO], stride = (int)view[VIEW_STRIDE];
        int* to = kernel_tables + view[VIEW_OFFSET] + place * ratio;
        for (int j = 0; j < ratio; ++j) to[j] = block_id == NULL_BLOCK_ID ? NULL_BLOCK_ID : block_id * stride + j;
    }
}
