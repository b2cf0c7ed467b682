"""Word by word, what the host packs and the kernels read. `common.cuh` says the same in CUDA C.

Staging buffer: int32 words, a header of HEADER_WORDS, then sections that the header points to (offsets
in words from the start of the buffer, each a multiple of 4; -1 = the section is not there).
"""

from typing import Final

# --- header of the staging buffer -------------------------------------------------------------
NUM_REQS: Final = 0  # requests of the step
NUM_REQS_FILL: Final = 1  # seq_lens and query_start_loc are padded up to this request
NUM_TOKENS: Final = (
    2  # scheduled tokens; negative = query_start_loc[num_reqs] of the device, at most -this - 1
)
NUM_TOKENS_FILL: Final = 3  # slots and positions are padded up to this token
NUM_WRITES: Final = 4  # records of the writes section
WRITES: Final = 5  # offset of int32 [num_writes, WRITE_WORDS]
PAYLOAD: Final = 6  # offset of int32 [num_ids], the block ids that the writes carry
QUERY_START_LOC: Final = 7  # offset of int32 [num_reqs + 1]; -1 = the device array
NUM_COMPUTED_TOKENS: Final = 8  # offset of int32 [num_reqs]; -1 = the device array
POSITIONS: Final = 9  # offset of int64 [num_tokens]; -1 = the device array, or formed
POSITIONS_GIVEN: Final = 10  # 0 = positions are formed from num_computed_tokens
ROWS: Final = 11  # offset of int32 [num_reqs]; -1 = the device array, or row i for request i
NUM_GATHER: Final = 12  # batch positions that gather_rows looks at
GATHER: Final = 13  # offset of int32 [num_gather]
HEADER_WORDS: Final = 16

# --- one record of the writes section ---------------------------------------------------------
WRITE_TARGET: Final = 0  # group * max_num_reqs + row
WRITE_START: Final = 1  # first column
WRITE_END: Final = 2  # column past the last
WRITE_SOURCE: Final = 3  # 2 * (place of the first id in the payload, or -1 for NULL) + (sets the count)
WRITE_POSITION: Final = 4  # batch position that shows this row, or -1
WRITE_WORDS: Final = 5
WRITE_CHUNK: Final = 256  # columns of one record at most, so that long rows spread over many warps

# --- one word of the gather section -----------------------------------------------------------
# row >= 0: copy that row; -1: the position becomes NULL; -(row + 2): the position keeps its row
KEEP: Final = -2

# --- geometry, int64 [num_groups, GEOMETRY_WORDS] ---------------------------------------------
TABLE_OFFSET: Final = 0  # first element of the group's table in the arena
WIDTH: Final = 1  # columns
MAX_NUM_REQS: Final = 2  # rows
BLOCK_SIZE: Final = 3  # tokens in a manager block
CP_WORLD: Final = 4
CP_RANK: Final = 5
CP_INTERLEAVE: Final = 6
SLOTS_ENABLED: Final = 7  # 0 = all slots of the group are PAD
MAX_MODEL_LEN: Final = 8  # positions at or past it map to PAD
WINDOW_REACH: Final = 9  # sliding window - 1; -1 = no window
FIRST_VIEW: Final = 10  # first row of the views table
NUM_VIEWS: Final = 11
SLOT_STRIDE: Final = 12  # elements from one group's slots to the next in the slots array
REQ_STRIDE: Final = 13  # likewise in arrays that hold one element a request
GEOMETRY_WORDS: Final = 14

# --- kernel views, int64 [num_views, VIEW_WORDS] ----------------------------------------------
VIEW_OFFSET: Final = 0  # first element of the view's table in the kernel-table arena
VIEW_RATIO: Final = 1  # kernel blocks in a manager block
VIEW_STRIDE: Final = 2  # kernel blocks from one manager block to the next
VIEW_WORDS: Final = 3

# --- groups of recurrent states, int64 [num_states, STATE_WORDS] --------------------------------
STATE_GROUP: Final = 0
STATE_BY_POSITION: Final = 1  # 0 = one running state in column 0; 1 = position p's in column p // block_size
STATE_DRAFTS: Final = 2  # columns behind the running state, one for each draft token
STATE_OFFSET: Final = 3  # first element of its [max_num_reqs, 1 + drafts] table in the arena of indices
STATE_WORDS: Final = 4
