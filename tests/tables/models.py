"""Tables, slots and steps by brute force, written without the library's own arithmetic."""

import numpy as np

from pagedkv import NULL_BLOCK_ID, PAD_SLOT_ID


def to_numpy(array):
    """The host form of an array of any backend."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def bytes_past_alignment(array):
    """How far an array starts past 256 bytes; on the host counted from its allocation."""
    if hasattr(array, "get"):
        return array.data.ptr % 256
    owner = array
    while owner.base is not None:
        owner = owner.base
    return (array.ctypes.data - owner.ctypes.data) % 256


def table_of(rows, width):
    """Lists of block ids as a table: NULL in every column past a row's count."""
    table = np.full((len(rows), width), NULL_BLOCK_ID, np.int32)
    for line, ids in zip(table, rows, strict=True):
        line[: len(ids)] = ids
    return table


def expand(table, ratio, stride):
    """A table in kernel blocks, one entry at a time."""
    rows = [[b * stride + j if b else 0 for b in row for j in range(ratio)] for row in table.tolist()]
    return np.array(rows, np.int32).reshape(len(table), table.shape[1] * ratio)


def shard(spec, context_parallel):
    """(world, rank, interleave) in which a group lives."""
    if not spec.cp_sharded or spec.state_mode is not None:
        return 1, 0, 1
    return context_parallel.world_size, context_parallel.rank, context_parallel.interleave


def slot_of(position, block_ids, spec, context_parallel, max_model_len):
    """Where a token is written: the tokens of a virtual block are dealt out to the ranks one by one."""
    world, rank, interleave = shard(spec, context_parallel)
    column, offset = divmod(position, spec.block_size * world)
    if not spec.slot_mapping or spec.state_mode is not None or not 0 <= position < max_model_len:
        return PAD_SLOT_ID
    if column >= len(block_ids) or block_ids[column] == NULL_BLOCK_ID:
        return PAD_SLOT_ID
    mine = [o for o in range(spec.block_size * world) if (o // interleave) % world == rank]
    return block_ids[column] * spec.block_size + mine.index(offset) if offset in mine else PAD_SLOT_ID


def below_window(num_computed, count, spec, context_parallel):
    """Leading columns none of whose positions the token at `num_computed` sees."""
    if spec.sliding_window is None:
        return 0
    size = spec.block_size * shard(spec, context_parallel)[0]
    first_seen = num_computed - spec.sliding_window + 1
    return sum((column + 1) * size - 1 < first_seen for column in range(count))


def local_length(length, spec, context_parallel):
    """How many of a sequence's positions this rank holds, counted one by one."""
    world, rank, interleave = shard(spec, context_parallel)
    return sum((p // interleave) % world == rank for p in range(length))


def states_of(spec, block_ids, num_computed, length):
    """One request's states: blocks written, block before the step, columns (before, first, last written)."""
    size = 2**62 if spec.state_mode == "none" else spec.block_size  # or all tokens lie in column 0

    def block(column):
        return block_ids[column] if 0 <= column < len(block_ids) else NULL_BLOCK_ID

    before = (num_computed - 1) // size if num_computed > 0 else -1
    first, last = max(num_computed, 0) // size, max(length - 1, 0) // size
    written = [block(last + j) for j in range(1 + spec.num_speculative_blocks)]
    return written, block(before), (before, first, last)


def requests_of(query_start_loc):
    """Request of each token."""
    return [i for i, n in enumerate(np.diff(query_start_loc).tolist()) for _ in range(n)]


def positions_of(query_start_loc, num_computed):
    """Position of each token of a step that continues its requests."""
    return [
        start + t for start, n in zip(num_computed, np.diff(query_start_loc), strict=True) for t in range(n)
    ]


def everything(table):
    """Copies of all that a refused call must leave alone: mirror, counts, dirty ranges, device, outputs."""
    committer, state = table._committer, table.mirror.state
    device = [committer.stored.tables, committer.stored.num_blocks, committer.stored.kernel_tables]
    for outputs in committer.outputs:
        device += [outputs.shown.tables, outputs.shown.kernel_tables, outputs.shown.num_blocks]
        device += [outputs.slots, outputs.positions, outputs.seq_lens, outputs.query_start_loc]
        device += [outputs.token_reqs, outputs.local_seq_lens]
        device += [outputs.states.all_indices, outputs.states.all_initial, outputs.states.all_columns]
    host = [*state, committer.versions]
    host += [array for outputs in committer.outputs for array in (outputs.batch, outputs.seen)]
    counters = [table.num_h2d_copies, table.num_h2d_bytes]
    return [a.copy() for a in host] + [to_numpy(a).copy() for a in device] + [counters]


def assert_unchanged(before, table):
    """Nothing of `everything` has changed."""
    for expected, actual in zip(before, everything(table), strict=True):
        np.testing.assert_array_equal(expected, actual)
