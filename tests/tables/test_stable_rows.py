"""Stable rows: the batch-order tables that steps hand out, whatever kept, moved, repeated or left rows."""

import numpy as np
import pytest

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable

from .models import below_window, expand, table_of, to_numpy


class Steps:
    """A table of stable rows, its lists of ids, and a check of each step."""

    def __init__(self, backend, num_outputs=1, window=None):
        spec = KVCacheGroupSpec(4, (2,), sliding_window=window)
        self.spec, self.ids = spec, [[10 * row + k + 1 for k in range(row + 1)] for row in range(4)]
        self.table = MultiGroupBlockTable(
            [spec], 4, 64, 16, token_alignment=None, stable_rows=True, backend=backend
        )
        self.table.outputs(num_outputs)
        for row, ids in enumerate(self.ids):
            self.table.add_row((ids,), row)

    def append(self, row, *ids):
        self.table.append_row((ids,), row)
        self.ids[row] = [*self.ids[row], *ids]

    def set(self, row, ids):
        self.table.add_row((ids,), row)
        self.ids[row] = ids

    def step(self, rows, out=0, computed=None, padded=None):
        num = len(rows)
        computed = [0] * num if computed is None else computed
        step = self.table.commit(
            num, np.zeros(num + 1, np.int32), np.array(computed, np.int32), rows=np.array(rows, np.int32),
            num_reqs_padded=padded, out=out,
        )  # fmt: skip
        shown = []
        for row, p in zip(rows, computed, strict=True):
            ids = self.ids[row] if row >= 0 else []
            dead = below_window(p, len(ids), self.spec, ContextParallel())
            shown.append([0] * dead + ids[dead:])
        expected = table_of(shown + [[]] * ((padded or num) - num), 16)
        np.testing.assert_array_equal(expected, to_numpy(step.block_table()))
        np.testing.assert_array_equal(expand(expected, 2, 2), to_numpy(step.kernel_block_table()))


def test_rows_in_any_order_repeated_and_dummy(backend):
    steps = Steps(backend)
    for rows in ([2, 0], [0, 2], [0, 0, 0], [-1, 3, -1], [3], [], [1, 1, 2, 3], [-1]):
        steps.step(rows, padded=4)


def test_a_kept_row_takes_its_changes(backend):
    steps = Steps(backend)
    steps.step([2, 0])
    steps.append(0, 91)
    steps.step([2, 0])
    steps.set(2, [5])
    steps.step([2, 0])
    steps.append(2, 6, 7)
    steps.step([0, 2])
    steps.append(2, 8)
    steps.step([0, 2])


def test_a_repeated_row_takes_its_changes_in_every_place(backend):
    steps = Steps(backend)
    steps.step([2, 2, 0, 2])
    steps.append(2, 91)
    steps.step([2, 2, 0, 2])
    steps.set(2, [])
    steps.step([2, 2, 0, 2])
    steps.step([2, 2, 0, 2])


def test_changes_that_another_output_set_took(backend):
    steps = Steps(backend, num_outputs=2)
    steps.step([2, 0], out=0)
    steps.append(2, 91)
    steps.step([2, 0], out=1)
    steps.step([2, 0], out=0)
    steps.set(0, [9, 8])
    steps.step([1], out=0)  # row 0 is in no step, and its change is sent
    steps.step([2, 0], out=1)
    steps.step([2, 0], out=0)


def test_changes_that_were_sent_alone(backend):
    steps = Steps(backend)
    steps.step([2, 0])
    steps.append(2, 91)
    steps.table.commit_block_table()
    steps.step([2, 0])
    steps.set(0, [])
    steps.table.commit_block_table()
    steps.append(2, 92)
    steps.step([2, 0])


def test_a_row_that_left_and_came_back(backend):
    steps = Steps(backend)
    steps.step([2, 0, 3])
    steps.step([2], padded=3)
    steps.append(0, 91)
    steps.step([2], padded=4)
    steps.step([2, 0, 3])
    steps.step([-1, 0, -1])
    steps.step([2, 0, 3])


@pytest.mark.parametrize("window", [1, 4, 5, 9])
def test_columns_below_the_window_follow_the_computed_tokens(backend, window):
    steps = Steps(backend, window=window)
    steps.set(3, list(range(1, 13)))
    for computed in (0, 3, 4, 5, 9, 30, 47, 60, 20, 8, 0, 60):  # back again as well: rejected drafts
        steps.step([3, 0], computed=[computed, 2])
        steps.append(0, 50)
    for first in (60, 80):  # other ids in the columns below the window
        steps.set(3, list(range(first, first + 12)))
        steps.step([3, 0], computed=[40, 2])
    steps.table.mirror.set_blocks([3], [0], [5])
    steps.ids[3][0] = 5
    steps.step([3, 0], computed=[40, 2])
    steps.step([3, 0], computed=[0, 2])
    steps.set(3, [7])
    steps.step([3, 0], computed=[40, 40])
    steps.set(3, [5, 6, 7])
    steps.step([3, 0], computed=[40, 3])
    steps.step([3, 0], computed=[0, 3])


def test_numbers_of_a_window_of_64_tokens(backend):
    spec = KVCacheGroupSpec(16, sliding_window=64)
    table = MultiGroupBlockTable([spec], 2, 256, 16, stable_rows=True, backend=backend)
    table.add_row((range(1, 9),), 0)
    for computed, num_null in ((100, 2), (79, 1), (78, 0), (20, 0)):
        step = table.commit(1, [0, 1], [computed], rows=[0])
        row = to_numpy(step.block_table())[0, :8]
        np.testing.assert_array_equal([0] * num_null + list(range(num_null + 1, 9)), row)
        np.testing.assert_array_equal(range(1, 9), to_numpy(table[0].get_device_tensor(1))[0, :8])
        slot = (computed // 16 + 1) * 16 + computed % 16
        assert to_numpy(step.slot_mapping()).tolist() == [slot]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("sharded", "nulls"), [(True, {100: 1, 95: 1, 94: 0}), (False, {100: 2, 79: 1, 78: 0})]
)
def test_a_window_of_several_ranks_keeps_each_column_of_which_any_rank_sees_a_position(
    backend, rank, sharded, nulls
):
    """A sharded column holds 16 positions on each of two ranks: it goes once all 32 are below the window."""
    spec = KVCacheGroupSpec(16, sliding_window=64, cp_sharded=sharded)
    world = ContextParallel(2, rank, 4)
    table = MultiGroupBlockTable(
        [spec], 2, 256, 16, stable_rows=True, backend=backend, context_parallel=world
    )
    table.add_row((range(1, 9),), 0)
    size = 32 if sharded else 16
    for computed, num_null in nulls.items():
        seen = {position // size for position in range(computed - 63, computed + 1)}
        assert num_null == min(seen), "by brute force: the first column with a position that is seen"
        row = to_numpy(table.commit(1, [0, 1], [computed], rows=[0]).block_table())[0, :8]
        np.testing.assert_array_equal([0] * num_null + list(range(num_null + 1, 9)), row)


def test_a_step_says_what_it_is(backend):
    steps = Steps(backend)
    step = steps.table.commit(2, [0, 3, 4], [0, 0], rows=[1, 2], num_reqs_padded=3, num_tokens_padded=8)
    assert (step.num_reqs, step.num_reqs_padded) == (2, 3)
    assert (step.num_tokens, step.num_tokens_padded) == (4, 8)
    step.ready.synchronize()
    assert step.ready.done
    step = steps.table.commit(1, [0, 2], [0], rows=[1])
    assert (step.num_reqs, step.num_reqs_padded, step.num_tokens, step.num_tokens_padded) == (1, 1, 2, 2)
    assert to_numpy(step.query_start_loc).tolist() == [0, 2]
