"""The blocks of recurrent states that a step hands out, beside attention groups and other state groups."""

import numpy as np
import pytest

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.backends.numpy_backend import NumpyBackend
from pagedkv.kernels import _layout as layout

from .models import assert_unchanged, everything, states_of, to_numpy

ATTENTION = KVCacheGroupSpec(16, (8,))
ALIGNED = KVCacheGroupSpec(4, state_mode="align", num_speculative_blocks=2)
RUNNING = KVCacheGroupSpec(32, state_mode="none", num_speculative_blocks=1)
EVERY = KVCacheGroupSpec(6, state_mode="all")
GROUPS = [ATTENTION, ALIGNED, RUNNING, KVCacheGroupSpec(6), EVERY]
STATES = [g for g, spec in enumerate(GROUPS) if spec.state_mode is not None]

ROW_MODES = pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])


def table_of(backend, stable_rows, groups=GROUPS, num_rows=8, max_model_len=96):
    """A table in which group g's row r holds the blocks 1000 * g + 100 * r + 1 and on, all that fit."""
    table = MultiGroupBlockTable(
        groups, num_rows, max_model_len, 64, token_alignment=None, stable_rows=stable_rows, backend=backend
    )
    for row in range(num_rows):
        table.add_row([ids_of(table, g, row) for g in range(len(groups))], row)
    return table


def ids_of(table, g, row):
    first = 1000 * g + 100 * row + 1
    return list(range(first, first + table.mirror.widths[g]))


def check(step, table, rows, computed, lengths, padding=0):
    """A step's states equal brute force; `rows` are the table rows of its requests, -1 for a dummy."""
    for g, group in enumerate(table):
        spec = group._spec
        if spec.state_mode is None:
            continue
        mirror, counts = group.get_numpy_array(), group.num_blocks_per_row
        held = [mirror[row, : counts[row]].tolist() if row >= 0 else [] for row in rows]
        requests = zip(held, computed, lengths, strict=True)
        expected = [states_of(spec, *request) for request in requests] + [states_of(spec, [], 0, 0)] * padding
        assert [line for line, _, _ in expected] == to_numpy(step.state_indices(g)).tolist()
        assert [block for _, block, _ in expected] == to_numpy(step.initial_state_indices(g)).tolist()
        assert [list(line) for _, _, line in expected] == to_numpy(step.state_columns(g)).T.tolist()


@ROW_MODES
def test_each_state_group_counts_in_its_own_blocks(backend, stable_rows):
    """Batches that grow, shrink and are padded, over rows of every length."""
    table, rng = table_of(backend, stable_rows), np.random.default_rng(3)
    table.outputs(2)
    for i in range(30):
        num, padded = sorted(rng.integers(0, 9, 2).tolist())
        for row in range(8):
            counts = [int(rng.integers(0, width + 1)) for width in table.mirror.widths]
            lists = [ids_of(table, g, row)[:count] for g, count in enumerate(counts)]
            table.add_row(lists if stable_rows or row < num else [[]] * len(GROUPS), row)
        rows = rng.integers(-1, 8, num).tolist() if stable_rows else range(num)
        lengths = rng.integers(0, 8, num)
        computed = rng.integers(0, 89, num) * (rng.random(num) > 0.2)

        step = table.commit(
            num,
            np.cumsum([0, *lengths]).astype(np.int32),
            computed.astype(np.int32),
            rows=rows if stable_rows else None,
            num_reqs_padded=padded,
            out=i % 2,
        )

        assert to_numpy(step.state_indices(1)).shape == (padded, 3)
        check(step, table, rows, computed.tolist(), (computed + lengths).tolist(), padded - num)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_holds_all_states(backend, world):
    """A model length of 512 in blocks of 16: state 31 is in column 31, however many ranks there are."""
    for rank in range(world):
        table = MultiGroupBlockTable(
            [KVCacheGroupSpec(16, state_mode="align"), 16],
            1, 512, 8, context_parallel=ContextParallel(world, rank), backend=backend,
        )  # fmt: skip
        table.add_row((range(1, 33), [40]), 0)
        step = table.commit(1, [0, 1], [511])
        assert to_numpy(step.state_indices(0)).tolist() == [[32]]
        assert to_numpy(step.slot_mapping(0)).tolist() == [-1]


@ROW_MODES
def test_padding_is_the_null_block_and_keeps_nothing(backend, stable_rows):
    """Six requests, then three of eight padded: the padding keeps no block of the six."""
    table = table_of(backend, stable_rows, [KVCacheGroupSpec(4, state_mode="align"), 4])
    shown = []
    for num in (6, 3):
        if not stable_rows:
            table.clear_rows(range(num, 8))
        rows = {"rows": list(range(num))} if stable_rows else {}
        step = table.commit(num, range(num + 1), [5] * num, num_reqs_padded=8, **rows)
        shown.append(to_numpy(step.state_indices(0))[:, 0].tolist())
    assert shown == [[2, 102, 202, 302, 402, 502, 0, 0], [2, 102, 202, 0, 0, 0, 0, 0]]
    assert to_numpy(step.initial_state_indices(0)).tolist() == [2, 102, 202, 0, 0, 0, 0, 0]
    assert to_numpy(step.state_columns(0)).tolist() == [
        [1, 1, 1, -1, -1, -1, -1, -1],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
    ]


def test_a_row_without_blocks_has_no_state(backend):
    table = table_of(backend, True)
    table.clear_rows([2])
    step = table.commit(3, [0, 1, 2, 3], [40, 40, 40], rows=[2, -1, 0])
    for g in STATES:
        assert not to_numpy(step.state_indices(g))[:2].any()
        assert to_numpy(step.initial_state_indices(g)).tolist()[:2] == [0, 0]
    check(step, table, [2, -1, 0], [40] * 3, [41] * 3)


@pytest.mark.parametrize(
    ("size", "other", "computed", "column"), [(2176, 128, 100_096, 45), (64, 16, 130, 2), (64, 16, 0, -1)]
)
def test_the_earlier_state_is_found_in_the_state_groups_blocks(backend, size, other, computed, column):
    groups = [other, KVCacheGroupSpec(size, state_mode="align")]
    table = MultiGroupBlockTable(groups, 1, 100_200, 8, backend=backend)
    table.add_row([range(1, width + 1) for width in table.mirror.widths], 0)
    step = table.commit(1, [0, 1], [computed])
    assert to_numpy(step.state_columns(1))[0].tolist() == [column]
    assert to_numpy(step.initial_state_indices(1)).tolist() == [column + 1]


def test_numbers_at_the_edges_of_a_block(backend):
    """Blocks of 4 and two drafts: with 0 to 4 tokens the state is in column 0, with 5 in column 1."""
    table = table_of(backend, False, [ALIGNED], num_rows=1)
    for length, first in ((0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        step = table.commit(1, [0, length], [0])
        assert to_numpy(step.state_indices(0)).tolist() == [[first + 1, first + 2, first + 3]]


@ROW_MODES
def test_computed_tokens_that_the_device_corrected(backend, stable_rows):
    """From a buffer of the device, where there is one, that holds other counts each time."""
    table = table_of(backend, stable_rows)
    module = np if backend == "numpy" else pytest.importorskip("cupy")
    buffer = module.zeros(12, np.int32)
    rows = [5, 0, 3, 3, 1, 2, 7, 6] if stable_rows else range(8)
    for i in range(6):
        computed = [(17 * i + 5 * k) % 90 for k in range(7)] + [-1 if i % 2 else 0]
        buffer[:8] = module.asarray(computed, np.int32)
        step = table.commit(8, range(0, 17, 2), buffer[:8], rows=rows if stable_rows else None)
        check(step, table, rows, computed, [c + 2 for c in computed])


@ROW_MODES
def test_a_captured_step_shows_the_states_of_each_packed_step(backend, stable_rows):
    table = table_of(backend, stable_rows)
    if not stable_rows:
        table.clear_rows(range(3, 8))
    table.commit_block_table()
    captured = table.captured_step(8, 32)
    for i in range(8):
        rows = [(i + k) % 8 for k in range(3)] if stable_rows else range(3)
        computed = [(13 * i + 7 * k) % 90 for k in range(3)]
        step = captured.pack(3, [0, 1, 2, 3], computed, rows=rows if stable_rows else None)
        captured.enqueue()
        captured.mark_replayed()
        check(step, table, rows, computed, [c + 1 for c in computed], padding=5)


@ROW_MODES
def test_output_sets_keep_their_states(backend, stable_rows):
    table = table_of(backend, stable_rows)
    table.outputs(2)
    rows = {"rows": list(range(8))} if stable_rows else {}
    first = table.commit(8, range(9), [10] * 8, **rows)
    kept = [to_numpy(first.state_indices(g)).copy() for g in STATES]
    table.commit(8, range(9), [50] * 8, out=1, **rows)
    for g, expected in zip(STATES, kept, strict=True):
        np.testing.assert_array_equal(expected, to_numpy(first.state_indices(g)))


def test_views_are_made_once_and_tables_start_on_256_bytes(backend):
    table = table_of(backend, False)
    first, second = (table.commit(8, range(9), [n] * 8) for n in (1, 30))
    for g in STATES:
        assert first.state_indices(g) is second.state_indices(g)
        assert first.initial_state_indices(g) is second.initial_state_indices(g)
        assert first.state_columns(g) is second.state_columns(g)
    places = table._committer.geometry.states[:, layout.STATE_OFFSET]
    assert (4 * places % 256 == 0).all()


@pytest.mark.parametrize("name", ["state_indices", "initial_state_indices", "state_columns"])
def test_a_group_without_states_has_none_to_hand_out(backend, name):
    step = table_of(backend, False).commit(8, range(9), [0] * 8)
    with pytest.raises(ValueError, match=r"group must hold recurrent states: one of \[1, 2, 4\], got 3 \("):
        getattr(step, name)(3)
    for group in (-1, 5):
        with pytest.raises(ValueError, match=rf"group must lie in \[0, 4\], got {group}"):
            getattr(step, name)(group)
    with pytest.raises(TypeError, match="group must be an int, got float"):
        getattr(step, name)(1.0)


def test_a_table_without_states_launches_nothing_for_them(monkeypatch):
    bound, bind = [], NumpyBackend.bind

    def record(self, op, args):
        bound.append(op)
        return bind(self, op, args)

    monkeypatch.setattr(NumpyBackend, "bind", record)
    for groups, expected in (([16], False), ([], False), ([16, ALIGNED], True)):
        bound.clear()
        MultiGroupBlockTable(groups, 2, 64, 8, backend="numpy").commit(0, [0], [])
        assert ("state_indices" in bound) == expected


def test_a_refused_step_leaves_the_states_alone(backend):
    table = table_of(backend, False)
    table.commit(8, range(9), [30] * 8)
    before = everything(table)
    with pytest.raises(ValueError, match="must not decrease"):
        table.commit(2, [0, 2, 1], [0, 0])
    assert_unchanged(before, table)
