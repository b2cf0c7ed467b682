"""may_split: a block that one request writes and another one reads in the same step keeps them in order."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.batch.micro_batches import MicroBatches
from pagedkv.batch.step_metadata import step_metadata
from tests.tables.models import shard

from .drawn import one_step, steps
from .test_micro_batches import WITHOUT_STATES, draw_cuts, rows_of, sizes_of


def reads_and_writes(drawn, g, rows, first, last):
    """Blocks of one group that a micro-batch finds whole, and those that it writes; token by token."""
    reads, writes = set(), set()
    size = drawn.specs[g].block_size * shard(drawn.specs[g], drawn.world)[0]
    for r in rows:
        tokens = range(*drawn.starts[r : r + 2])
        before = sum(t < first for t in tokens)
        known = drawn.computed[r] + before
        here = [known + i for i in range(sum(first <= t < last for t in tokens))]
        for column, block in enumerate(drawn.ids[g][r]):
            if (column + 1) * size <= known:
                reads.add(block)
            if any(p // size == column for p in here):
                writes.add(block)
    return reads, writes - {0}


@settings(max_examples=200, deadline=None)
@given(drawn=steps(specs=WITHOUT_STATES), data=st.data())
def test_no_part_may_read_what_a_later_one_writes(backend, drawn, data):
    shared = st.integers(0, 8)  # few ids, so that requests share blocks; NULL among them
    ids = [[[data.draw(shared) for _ in row] for row in rows] for rows in drawn.ids]
    drawn = dataclasses.replace(drawn, ids=ids)
    metadata = drawn.metadata(backend)
    num_reqs, num_tokens = sizes_of(drawn)
    cuts = draw_cuts(data, num_tokens)
    edges = [0, *cuts, num_tokens]
    all_rows = rows_of(drawn, cuts, num_reqs, num_tokens)

    given_rows = {"rows": drawn.rows} if drawn.stable else {}
    allowed = MicroBatches(drawn.table, 4).may_split(metadata, cuts, **given_rows)

    safe = True
    for g in range(len(drawn.specs)):
        parts = [
            reads_and_writes(drawn, g, [r for r in rows if r < drawn.num_reqs], first, last)
            for rows, (first, last) in zip(all_rows, pairwise(edges), strict=True)
        ]
        for k, (reads, _) in enumerate(parts):
            safe &= not any(reads & writes for _, writes in parts[k + 1 :])
    assert allowed == safe


def two_requests(backend, first, second, computed, **given):
    """Two requests of four tokens each, in blocks of four."""
    world = ContextParallel(given.pop("world_size", 1))
    table = MultiGroupBlockTable(
        [KVCacheGroupSpec(4, **given)], 2, 64, 16, context_parallel=world, backend=backend
    )
    for row, ids in enumerate((first, second)):
        table.add_row([ids], row)
    starts = [0, 4, 8]
    return step_metadata(table.commit(2, starts, computed), starts, computed), MicroBatches(table)


@pytest.mark.parametrize(
    ("first", "second", "computed", "allowed"),
    [
        ([7, 1], [7, 2], [0, 4], True),
        ([7, 1], [7, 2], [4, 0], False),
        ([1, 7], [7, 2], [0, 4], True),
        ([7, 1], [8, 2], [4, 0], True),
        ([0, 1], [0, 2], [4, 0], True),
        ([7, 1], [1, 2], [4, 0], True),
    ],
    ids=["writer first", "reader first", "nobody writes it", "not shared", "the null block", "not read yet"],
)
def test_a_prefix_that_is_written_and_read_in_one_step(backend, first, second, computed, allowed):
    metadata, buffers = two_requests(backend, first, second, computed)

    assert buffers.may_split(metadata, [4]) is allowed
    assert buffers.may_split(metadata, [])


def test_states_by_position_are_shared_and_running_ones_are_not(backend):
    for mode, allowed in (("align", False), ("all", False), ("none", True)):
        metadata, buffers = two_requests(backend, [7], [7], [4, 0], state_mode=mode)

        assert buffers.may_split(metadata, [4]) is allowed, mode


def test_a_request_without_tokens_writes_nothing(backend):
    table = MultiGroupBlockTable([4], 3, 64, 16, backend=backend)
    for row, ids in enumerate(([7], [8, 7], [9])):
        table.add_row([ids], row)
    starts, computed = [0, 4, 4, 8], [4, 6, 0]
    metadata = step_metadata(table.commit(3, starts, computed), starts, computed)

    assert MicroBatches(table).may_split(metadata, [4])


def test_a_column_is_whole_when_all_ranks_have_it(backend):
    """Of two ranks a column holds eight tokens; four leave it to the one request that goes on with it."""
    for computed, allowed in (([4, 0], True), ([8, 0], False)):
        metadata, buffers = two_requests(backend, [7, 1], [7, 2], computed, world_size=2)

        assert buffers.may_split(metadata, [4]) is allowed


def test_an_encoders_tokens_are_not_written_by_a_step(backend):
    metadata, buffers = two_requests(backend, [7], [7], [4, 0], max_num_encoder_tokens=16)

    assert buffers.may_split(metadata, [4])


@pytest.mark.parametrize("rows", [[2, 0], [2, -1], [0, 2]])
def test_stable_rows_name_the_requests(backend, rows):
    """Row 0 writes the block that row 2 reads: harmless where it comes first, or is a dummy."""
    table = MultiGroupBlockTable([4], 3, 64, 16, stable_rows=True, backend=backend)
    table.add_row([[7, 1]], 0)
    table.add_row([[7, 2]], 2)
    computed = [4 if row == 2 else 0 for row in rows]
    metadata = step_metadata(table.commit(2, [0, 4, 8], computed, rows=rows), [0, 4, 8], computed)

    assert MicroBatches(table).may_split(metadata, [4], np.array(rows, np.int32)) is (rows != [2, 0])


class TestRefusals:
    @pytest.mark.parametrize(("stable", "rows"), [(True, None), (False, [0, 1, 2])])
    def test_rows_go_with_stable_rows(self, backend, stable, rows):
        drawn = one_step(stable=stable)
        metadata = drawn.metadata(backend)

        with pytest.raises(ValueError, match=r"rows must be (given when|None unless) the table has"):
            MicroBatches(drawn.table).may_split(metadata, [3], rows)

    @pytest.mark.parametrize("rows", [[0, 1], [0, 1, 6], [0, -2, 1]])
    def test_rows_that_do_not_fit(self, backend, rows):
        drawn = one_step(stable=True)
        metadata = drawn.metadata(backend)

        with pytest.raises(ValueError, match="rows must"):
            MicroBatches(drawn.table).may_split(metadata, [3], rows)

    def test_cuts_that_split_refuses(self, backend):
        drawn = one_step()
        metadata = drawn.metadata(backend)

        with pytest.raises(ValueError, match="cuts must"):
            MicroBatches(drawn.table).may_split(metadata, [0])
