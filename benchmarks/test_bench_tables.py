"""Block tables on the CPU, beside the plain ways in the same group.

The plain ways are what people write by hand in NumPy: whole rows of the batch are copied each step, rows
are written by slices, slots are mapped request by request in Python or all at once by fancy indexing.
They check nothing, keep no counts on the device and pad nothing but the slots; the tables do.
"""

import numpy as np
import pytest

from pagedkv import PAD_SLOT_ID, MultiGroupBlockTable

BLOCK_SIZE = 16


class Plain:
    """Tables of all groups in NumPy, a copy that stands in for the device's, and slots."""

    def __init__(self, num_groups, max_num_reqs, width, max_num_tokens):
        self.tables = np.zeros((num_groups, max_num_reqs, width), np.int32)
        self.counts = np.zeros((num_groups, max_num_reqs), np.int32)
        self.device = np.zeros_like(self.tables)
        self.slots = np.full((num_groups, max_num_tokens), PAD_SLOT_ID, np.int64)

    def append_one_by_one(self, rows, ids):
        """A slice of one id for each row and group."""
        k = 0
        for table, counts in zip(self.tables, self.counts, strict=True):
            for row in rows:
                start = counts[row]
                table[row, start : start + 1] = ids[k]
                counts[row] = start + 1
                k += 1

    def append_at_once(self, rows, ids):
        """Fancy indexing, group by group."""
        for g, (table, counts) in enumerate(zip(self.tables, self.counts, strict=True)):
            table[rows, counts[rows]] = ids[g * len(rows) : (g + 1) * len(rows)]
            counts[rows] += 1

    def copy_rows(self, num_reqs):
        """Every row of the batch, whole."""
        for device, table in zip(self.device, self.tables, strict=True):
            device[:num_reqs] = table[:num_reqs]

    def map_at_once(self, num_reqs, starts, positions):
        """All tokens of a group in one indexing."""
        request = np.repeat(np.arange(num_reqs), np.diff(starts))
        for device, slots in zip(self.device, self.slots, strict=True):
            blocks = device[request, positions // BLOCK_SIZE].astype(np.int64)
            slots[: len(positions)] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            slots[len(positions) :] = PAD_SLOT_ID

    def map_request_by_request(self, num_reqs, starts, positions):
        """A Python loop over the batch."""
        for device, slots in zip(self.device, self.slots, strict=True):
            for i in range(num_reqs):
                p = positions[starts[i] : starts[i + 1]]
                slots[starts[i] : starts[i + 1]] = (
                    device[i, p // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + p % BLOCK_SIZE
                )
            slots[len(positions) :] = PAD_SLOT_ID


def filled(num_reqs, context, num_groups, max_num_tokens):
    """(ours, plain) with `context` tokens in each request, and as much room again."""
    table = MultiGroupBlockTable(
        [BLOCK_SIZE] * num_groups, num_reqs, 2 * context, max_num_tokens, backend="numpy"
    )
    plain = Plain(num_groups, num_reqs, table.mirror.widths[0], max_num_tokens)
    num = context // BLOCK_SIZE
    ids = np.random.default_rng(0).permutation(num_groups * num_reqs * num).astype(np.int32) + 1
    table.add_rows(np.arange(num_reqs, dtype=np.int32), np.full((num_groups, num_reqs), num, np.int32), ids)
    plain.tables[:, :, :num] = ids.reshape(num_groups, num_reqs, num)
    plain.counts[:] = num
    table.commit_block_table()
    plain.copy_rows(num_reqs)
    return table, plain


# --- row operations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["append_rows", "append_row", "plain_slices", "plain_at_once"])
@pytest.mark.parametrize(("num_rows", "num_groups"), [(16, 1), (64, 4)])
def test_append_one_block_each(benchmark, num_rows, num_groups, form):
    benchmark.group = f"rows/one block for {num_rows} rows, {num_groups} groups"
    table, plain = filled(256, 4096, num_groups, 256)
    rows = np.arange(0, 256, 256 // num_rows, dtype=np.int32)
    counts, ids = np.ones((num_groups, num_rows), np.int32), np.arange(1, num_rows * num_groups + 1)
    ids = ids.astype(np.int32)
    lists = [[[int(i)] for i in ids[row::num_rows]] for row in range(num_rows)]

    def one_by_one():
        for row, of_groups in zip(rows, lists, strict=True):
            table.append_row(of_groups, row)

    def take_back():
        for group in range(num_groups):
            table.mirror.truncate_rows(rows, np.full(num_rows, 256, np.int32), group)
        plain.counts[:] = 256

    run = {
        "append_rows": lambda: table.append_rows(rows, counts, ids),
        "append_row": one_by_one,
        "plain_slices": lambda: plain.append_one_by_one(rows, ids),
        "plain_at_once": lambda: plain.append_at_once(rows, ids),
    }[form]
    benchmark.pedantic(run, setup=take_back, rounds=200, warmup_rounds=5)

    held = plain.counts if form.startswith("plain") else table.mirror.counts
    assert (held[:, rows] == 257).all()


@pytest.mark.parametrize("form", ["add_row", "plain_slice"])
@pytest.mark.parametrize("num_blocks", [128, 4096])
def test_replace_a_row(benchmark, num_blocks, form):
    """A prompt's blocks take over a row: what is longer than the prompt becomes NULL."""
    benchmark.group = f"rows/replace by {num_blocks} blocks"
    table, plain = filled(8, 65536, 1, 64)
    ids = np.arange(1, num_blocks + 1, dtype=np.int32)

    def slice_in():
        plain.tables[0, 3, :num_blocks] = ids
        plain.tables[0, 3, num_blocks : plain.counts[0, 3]] = 0
        plain.counts[0, 3] = num_blocks

    benchmark({"add_row": lambda: table.add_row((ids,), 3), "plain_slice": slice_in}[form])

    held = plain.tables[0] if form == "plain_slice" else table[0].get_numpy_array()
    np.testing.assert_array_equal(ids, held[3][held[3] > 0])


@pytest.mark.parametrize("form", ["move_rows", "move_row", "plain_slices"])
def test_condense(benchmark, form):
    """The last 16 rows of 256 move into holes; each round moves them there or back."""
    benchmark.group = "rows/move 16 rows of 512 blocks"
    table, plain = filled(256, 8192, 1, 256)
    table.clear_rows(range(0, 160, 10))
    here, there = np.arange(240, 256, dtype=np.int32), np.arange(0, 160, 10, dtype=np.int32)

    def one_by_one(srcs, tgts):
        for src, tgt in zip(srcs, tgts, strict=True):
            table.move_row(src, tgt)

    def slices(srcs, tgts):
        for src, tgt in zip(srcs, tgts, strict=True):
            num = plain.counts[0, src]
            plain.tables[0, tgt, :num] = plain.tables[0, src, :num]
            plain.tables[0, src, :num] = 0
            plain.counts[0, tgt], plain.counts[0, src] = num, 0

    move = {"move_rows": table.move_rows, "move_row": one_by_one, "plain_slices": slices}[form]

    def there_and_back():
        move(here, there)
        move(there, here)

    benchmark(there_and_back)

    assert (plain.counts if form == "plain_slices" else table.mirror.counts)[0, 240] == 512


# --- a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["commit", "plain_rows_at_once", "plain_rows_and_loop"])
@pytest.mark.parametrize(
    ("num_reqs", "context", "num_groups"),
    [(32, 4096, 1), (256, 8192, 1), (256, 8192, 4), (256, 131_072, 1), (1024, 8192, 1)],
)
def test_decode_step(benchmark, num_reqs, context, num_groups, form):
    """One token for every request; one in sixteen, others each step, has just taken a block.

    The new blocks are appended outside the timer, in the plain forms as well.
    """
    benchmark.group = f"commit/{num_reqs} requests, {context} tokens, {num_groups} groups"
    table, plain = filled(num_reqs, context, num_groups, num_reqs)
    starts = np.arange(num_reqs + 1, dtype=np.int32)
    computed = np.full(num_reqs, context - 1, np.int32)
    positions = np.full(num_reqs, context - 1, np.int64)
    state = {"step": 0}

    def take_blocks():
        rows = np.arange(state["step"] % 16, num_reqs, 16, dtype=np.int32)
        ids = np.arange(1, len(rows) * num_groups + 1, dtype=np.int32)
        if form == "commit":
            table.append_rows(rows, np.ones((num_groups, len(rows)), np.int32), ids)
        else:
            plain.append_at_once(rows, ids)
        state["step"] += 1

    def plain_step(map_slots):
        plain.copy_rows(num_reqs)
        map_slots(num_reqs, starts, positions)

    run = {
        "commit": lambda: table.commit(num_reqs, starts, computed),
        "plain_rows_at_once": lambda: plain_step(plain.map_at_once),
        "plain_rows_and_loop": lambda: plain_step(plain.map_request_by_request),
    }[form]
    before = table.num_h2d_bytes
    rounds = 30 if context > 65536 else 100
    benchmark.pedantic(run, setup=take_blocks, rounds=rounds, warmup_rounds=3)

    if form == "commit":
        benchmark.extra_info["bytes"] = (table.num_h2d_bytes - before) // state["step"]
        slots, device = table[0].slot_mapping, table[0].get_device_tensor(num_reqs)
        np.testing.assert_array_equal(table[0].get_numpy_array(), device)
    else:
        benchmark.extra_info["bytes"] = plain.tables.nbytes
        slots, device = plain.slots[0], plain.device[0]
    at = context // BLOCK_SIZE - 1
    np.testing.assert_array_equal(device[:, at].astype(np.int64) * BLOCK_SIZE + BLOCK_SIZE - 1, slots)


@pytest.mark.parametrize("form", ["compute_slot_mapping", "plain_at_once", "plain_loop"])
@pytest.mark.parametrize("prefill", [0, 8192, 131_072])
def test_slot_mapping(benchmark, prefill, form):
    """255 decodes, and a prefill (or one more decode)."""
    benchmark.group = f"slot_mapping/255 decodes and {prefill or 1} tokens"
    num_reqs, context = 256, max(prefill, 4096)
    lengths = np.array([*[1] * 255, prefill or 1])
    num_tokens = int(lengths.sum())
    table, plain = filled(num_reqs, context, 1, num_tokens)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(255) * 16 % context, np.arange(prefill or 1)])
    run = {
        "compute_slot_mapping": lambda: table.compute_slot_mapping(num_reqs, starts, positions),
        "plain_at_once": lambda: plain.map_at_once(num_reqs, starts, positions),
        "plain_loop": lambda: plain.map_request_by_request(num_reqs, starts, positions),
    }[form]

    benchmark(run)

    plain.map_at_once(num_reqs, starts, positions)
    expected = plain.slots[0].copy()
    run()
    actual = table[0].slot_mapping if form == "compute_slot_mapping" else plain.slots[0]
    np.testing.assert_array_equal(expected, actual)
