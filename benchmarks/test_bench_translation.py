"""Two claims about block tables: batch translation pays, and translation is a tiny share of a step.

The share is of an assumed decode step of 20 ms; it is in `extra_info`, beside the time, so that it can
be set against any other step.
"""

import numpy as np
import pytest

from pagedkv.allocation import BlockPool, FullAttentionSpec, KVCacheManager, SequenceBlockTable

BLOCK_SIZE = 16
STEP_SECONDS = 0.020
NUM_SEQUENCES = 1024


@pytest.fixture(scope="module")
def shuffled_pool():
    """A pool whose free queue has no order left."""
    pool = BlockPool(65_536)
    blocks = pool.allocate(65_535)
    np.random.default_rng(0).shuffle(blocks)
    pool.free(blocks)
    return pool


@pytest.fixture
def table(shuffled_pool):
    table = SequenceBlockTable(shuffled_pool, BLOCK_SIZE)
    table.append(8192 * BLOCK_SIZE)
    yield table
    table.free()


@pytest.fixture
def decoding(shuffled_pool):
    """1,024 sequences of 1 to 1,000 tokens, and the position that each writes next."""
    tables = [SequenceBlockTable(shuffled_pool, BLOCK_SIZE) for _ in range(NUM_SEQUENCES)]
    lengths = np.random.default_rng(1).integers(1, 1000, NUM_SEQUENCES)
    for table, length in zip(tables, lengths, strict=True):
        table.append(int(length))
    yield tables, lengths - 1
    for table in tables:
        table.free()


def managed(positions):
    """A manager with sequences of the same lengths."""
    manager = KVCacheManager(
        [FullAttentionSpec(BLOCK_SIZE)],
        65_536,
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    seqs = np.array([manager.add([1] * int(position + 1)) for position in positions], np.int64)
    manager.allocate_slots(seqs, positions + 1)
    return manager, seqs


def share_of_a_step(benchmark):
    if benchmark.stats is not None:
        benchmark.extra_info["percent_of_a_20_ms_step"] = 100 * benchmark.stats["median"] / STEP_SECONDS


@pytest.mark.parametrize("num_blocks", [64, 1024, 8192])
@pytest.mark.parametrize("form", ["one_by_one", "batch"])
def test_translate_blocks(benchmark, table, num_blocks, form):
    benchmark.group = f"translate/{num_blocks} logical blocks of one sequence"
    logical = np.random.default_rng(2).permutation(8192)[:num_blocks]
    one_by_one = logical.tolist()
    run = {
        "one_by_one": lambda: [table.translate(block) for block in one_by_one],
        "batch": lambda: table.translate_batch(logical),
    }[form]

    result = benchmark(run)

    assert np.array_equal(table.block_ids[logical], result)


@pytest.mark.parametrize("form", ["table_by_table", "batch_numpy", "batch_manager"])
def test_translate_decode_step(benchmark, decoding, form):
    """One slot for each of 1,024 sequences: from their own tables, or from one table of all rows."""
    benchmark.group = f"translate/decode step of {NUM_SEQUENCES} sequences"
    tables, positions = decoding
    wanted = [np.array([position]) for position in positions]
    rows = np.zeros((NUM_SEQUENCES, 64), np.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: table.num_blocks] = table.block_ids
    every_row = np.arange(NUM_SEQUENCES)

    def table_by_table():
        return np.array([table.slots(position)[0] for table, position in zip(tables, wanted, strict=True)])

    def batch_numpy():
        blocks, offsets = np.divmod(positions, BLOCK_SIZE)
        return rows[every_row, blocks].astype(np.int64) * BLOCK_SIZE + offsets

    def batch_manager():
        return manager.translate(seqs, positions)

    manager, seqs = managed(positions)
    forms = {"table_by_table": table_by_table, "batch_numpy": batch_numpy, "batch_manager": batch_manager}

    result = benchmark(forms[form])

    share_of_a_step(benchmark)
    if form != "batch_manager":  # which has blocks of its own
        assert np.array_equal(table_by_table(), result)
    assert (result >= BLOCK_SIZE).all()


@pytest.mark.parametrize("num_tokens", [1, 2000])
def test_append(benchmark, shuffled_pool, num_tokens):
    """Per call: a decoded token (1 of 16 takes a block), and a prompt that is appended and freed."""
    benchmark.group = f"append/{num_tokens} tokens"
    grown = SequenceBlockTable(shuffled_pool, BLOCK_SIZE)

    def decode():
        grown.append(1)

    def admit():
        table = SequenceBlockTable(shuffled_pool, BLOCK_SIZE)
        table.append(num_tokens)
        table.free()

    benchmark.pedantic(decode if num_tokens == 1 else admit, rounds=200, iterations=100, warmup_rounds=2)

    grown.free()
    assert shuffled_pool.num_free_blocks == 65_535
