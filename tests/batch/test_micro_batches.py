"""Micro-batches against the unsplit step: every token keeps its request, position and slot."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.batch.micro_batches import MicroBatches
from pagedkv.batch.step_metadata import step_metadata
from tests.tables.models import bytes_past_alignment, to_numpy

from .drawn import GROUPS, one_step, steps

WITHOUT_STATES = [spec for spec in GROUPS if spec.state_mode is None]


def rows_of(drawn, cuts, num_reqs, num_tokens):
    """Rows of each micro-batch: those with tokens in it; others where they stand; padding in the last."""
    found = []
    for first, last in pairwise([0, *cuts, num_tokens]):
        is_last = last == num_tokens
        rows = []
        for r, (start, end) in enumerate(pairwise(drawn.starts.tolist())):
            stands = first <= start < last or (is_last and start == last)
            if stands if start == end else max(start, first) < min(end, last):
                rows.append(r)
        found.append(rows + [*range(drawn.num_reqs, num_reqs)] * is_last)
    return found


def draw_cuts(data, num_tokens, most=3, among=None):
    inside = range(1, num_tokens) if among is None else among
    return sorted(data.draw(st.sets(st.sampled_from(list(inside)), max_size=most))) if len(inside) else []


def sizes_of(drawn):
    return drawn.num_reqs + drawn.padding[0], drawn.num_tokens + drawn.padding[1]


@settings(max_examples=120, deadline=None)
@given(drawn=steps(specs=WITHOUT_STATES), data=st.data())
def test_the_tokens_of_all_parts_are_those_of_the_step(backend, drawn, data):
    metadata = drawn.metadata(backend)
    num_reqs, num_tokens = sizes_of(drawn)
    cuts = draw_cuts(data, num_tokens)

    parts = metadata.split(cuts, MicroBatches(drawn.table, 4))

    tokens, all_rows = [], rows_of(drawn, cuts, num_reqs, num_tokens)
    assert [part.batch.ubatch for part in parts] == list(range(len(cuts) + 1))
    for part, rows in zip(parts, all_rows, strict=True):
        assert part.batch.num_reqs == len(rows)
        assert part.batch.num_reqs_unpadded == sum(r < drawn.num_reqs for r in rows)
        real = part.batch.num_tokens_unpadded
        reqs = to_numpy(part.batch.token_to_req_indices).tolist()
        assert set(reqs[real:]) <= {0}
        assert set(to_numpy(part.batch.positions)[real:].tolist()) <= {0}
        slots = [to_numpy(group.slot_mapping).tolist() for group in part]
        assert all(set(line[real:]) <= {-1} for line in slots)
        of_groups = zip(*(line[:real] for line in slots), strict=True) if slots else [()] * real
        for request, p, line in zip(reqs, to_numpy(part.batch.positions).tolist(), of_groups, strict=False):
            tokens.append((rows[request], p, *line))
        for g, group in enumerate(part):
            whole = to_numpy(metadata[g].block_table_tensor)
            np.testing.assert_array_equal(whole[rows], to_numpy(group.block_table_tensor))
            for v in range(len(drawn.specs[g].kernel_views)):
                whole = to_numpy(metadata[g].kernel_block_table(v))
                np.testing.assert_array_equal(whole[rows], to_numpy(group.kernel_block_table(v)))
    assert tokens == drawn.tokens
    assert sum(part.batch.num_actual_tokens for part in parts) == num_tokens
    assert sorted({r for rows in all_rows for r in rows}) == list(range(num_reqs))


@settings(max_examples=120, deadline=None)
@given(drawn=steps(specs=WITHOUT_STATES), data=st.data())
def test_the_rows_of_a_part_end_at_its_cut(backend, drawn, data):
    """Starts, lengths and computed tokens by brute force, on the host and on the device."""
    metadata = drawn.metadata(backend)
    num_reqs, num_tokens = sizes_of(drawn)
    cuts = draw_cuts(data, num_tokens)
    edges = list(pairwise([0, *cuts, num_tokens]))

    parts = metadata.split(cuts, MicroBatches(drawn.table, 4))

    for part, rows, (first, last) in zip(
        parts, rows_of(drawn, cuts, num_reqs, num_tokens), edges, strict=True
    ):
        starts, seq_lens, computed, prefilling = [0], [], [], []
        for r in rows:
            is_real = r < drawn.num_reqs
            tokens = range(*drawn.starts[r : r + 2]) if is_real else ()
            starts.append(starts[-1] + sum(first <= t < last for t in tokens))
            before = drawn.computed[r] if is_real else 0
            computed.append(before + sum(t < first for t in tokens))
            seq_lens.append(before + sum(t < last for t in tokens))
            prefilling.append(is_real and before < drawn.prompts[r])
        batch = part.batch
        assert batch.query_start_loc_cpu.tolist() == to_numpy(batch.query_start_loc).tolist() == starts
        assert batch.seq_lens_cpu_upper_bound.tolist() == to_numpy(batch.seq_lens).tolist() == seq_lens
        assert batch.num_computed_tokens_cpu.tolist() == computed
        assert batch.is_prefilling.tolist() == prefilling
        assert batch.max_query_len == max(np.diff(starts), default=0)
        assert batch.max_seq_len == max(seq_lens, default=0)
        for name in (
            "query_start_loc_cpu",
            "seq_lens_cpu_upper_bound",
            "num_computed_tokens_cpu",
            "is_prefilling",
        ):
            assert not getattr(batch, name).flags.writeable
        for g, group in enumerate(part):
            local = [drawn.local_length(g, length) for length in seq_lens]
            assert to_numpy(group.dcp_local_seq_lens).tolist() == local
            assert group.dcp_local_seq_lens_cpu_upper_bound().tolist() == local
            assert group.batch is batch


@settings(max_examples=60, deadline=None)
@given(drawn=steps(specs=WITHOUT_STATES), data=st.data())
def test_unpadded_parts_are_the_parts_of_the_unpadded_step(backend, drawn, data):
    metadata = drawn.metadata(backend)
    cuts = draw_cuts(data, drawn.num_tokens)
    first, second = MicroBatches(drawn.table, 4), MicroBatches(drawn.table, 4)

    padded = [part.unpadded() for part in metadata.split(cuts, first)]
    whole = metadata.unpadded().split(cuts, second)

    for part, other in zip(padded, whole, strict=True):
        for field in dataclasses.fields(part.batch):
            mine, its = (to_numpy(getattr(each.batch, field.name)) for each in (part, other))
            np.testing.assert_array_equal(mine, its, field.name)
        for group, of_other in zip(part, other, strict=True):
            for name in ("block_table_tensor", "slot_mapping", "dcp_local_seq_lens"):
                np.testing.assert_array_equal(
                    to_numpy(getattr(group, name)), to_numpy(getattr(of_other, name))
                )


@settings(max_examples=60, deadline=None)
@given(drawn=steps(specs=[spec for spec in GROUPS if spec.state_mode]), data=st.data())
def test_states_are_those_of_whole_requests(backend, drawn, data):
    metadata = drawn.metadata(backend)
    num_reqs, num_tokens = sizes_of(drawn)
    ends = sorted({t for t in drawn.starts.tolist() if 0 < t < num_tokens})
    cuts = draw_cuts(data, num_tokens, among=ends)

    parts = metadata.split(cuts, MicroBatches(drawn.table, 4))

    for part, rows in zip(parts, rows_of(drawn, cuts, num_reqs, num_tokens), strict=True):
        for g, group in enumerate(part):
            whole = metadata[g]
            np.testing.assert_array_equal(
                to_numpy(whole.state_indices())[rows], to_numpy(group.state_indices())
            )
            before = to_numpy(whole.initial_state_indices())
            np.testing.assert_array_equal(before[rows], to_numpy(group.initial_state_indices()))
            columns = to_numpy(whole.state_columns())
            np.testing.assert_array_equal(columns[:, rows], to_numpy(group.state_columns()))


def test_numbers_of_a_split_inside_two_requests(backend):
    """Requests of 1, 4 and 2 tokens behind 9, 0 and 5: cut behind two of the second, and one of the third."""
    drawn = one_step()

    first, second, third = drawn.metadata(backend).split([3, 6], MicroBatches(drawn.table, 3))

    assert first.batch.seq_lens_cpu_upper_bound.tolist() == [10, 2]
    assert second.batch.query_start_loc_cpu.tolist() == [0, 2, 3]
    assert second.batch.num_computed_tokens_cpu.tolist() == [2, 5]
    assert second.batch.seq_lens_cpu_upper_bound.tolist() == [4, 6]
    assert to_numpy(second.batch.token_to_req_indices).tolist() == [0, 0, 1]
    assert to_numpy(second.batch.positions).tolist() == [2, 3, 5]
    assert to_numpy(second[0].dcp_local_seq_lens).tolist() == [2, 2]  # rank 1 of 2, two tokens at a time
    assert third.batch.query_start_loc_cpu.tolist() == [0, 1, 1]
    assert third.batch.num_computed_tokens_cpu.tolist() == [6, 0]
    assert (third.batch.num_reqs, third.batch.num_reqs_unpadded) == (2, 1)
    assert (third.batch.num_actual_tokens, third.batch.num_tokens_unpadded) == (4, 1)


@pytest.mark.parametrize(
    ("cut", "rows", "real"), [(7, (3, 1), (3, 0)), (8, (3, 1), (3, 0)), (9, (3, 1), (3, 0))]
)
def test_a_cut_in_the_padding_leaves_the_padding_rows_to_the_last(backend, cut, rows, real):
    drawn = one_step()

    parts = drawn.metadata(backend).split([cut], MicroBatches(drawn.table))

    assert tuple(part.batch.num_reqs for part in parts) == rows
    assert tuple(part.batch.num_reqs_unpadded for part in parts) == real
    assert [part.batch.num_tokens_unpadded for part in parts] == [7, 0]
    assert to_numpy(parts[1].batch.token_to_req_indices).tolist() == [0] * (10 - cut)
    assert to_numpy(parts[1].batch.seq_lens).tolist() == [0]


def test_promised_bounds_are_promised_by_each_part(backend):
    drawn = one_step()
    metadata = drawn.metadata(backend, max_seq_len=64)
    parts = MicroBatches(drawn.table)

    assert [part.batch.max_seq_len for part in metadata.split([2], parts)] == [64, 64]
    promised = dataclasses.replace(metadata, batch=dataclasses.replace(metadata.batch, max_query_len=5))
    assert [part.batch.max_query_len for part in promised.split([2], parts)] == [5, 5]
    assert [part.batch.max_query_len for part in metadata.split([2], parts)] == [1, 3]


def address(array):
    return array.data.ptr if hasattr(array, "get") else array.__array_interface__["data"][0]


def test_a_split_copies_nothing_from_the_host_and_keeps_its_addresses(backend):
    drawn = one_step()
    metadata = drawn.metadata(backend)
    buffers, copies, seen = MicroBatches(drawn.table), drawn.table.num_h2d_copies, set()

    for cut in (3, 1, 6, 3):
        parts = metadata.split([cut], buffers)
        names = ("query_start_loc", "seq_lens", "token_to_req_indices")
        seen.add(tuple(address(getattr(part.batch, name)) for part in parts for name in names))

    assert len(seen) == 1
    assert drawn.table.num_h2d_copies == copies


def test_the_arrays_of_a_parts_own_are_aligned(backend):
    """The others are slices of the step's, which start at its cut."""
    drawn = one_step()

    for part in drawn.metadata(backend).split([3, 6], MicroBatches(drawn.table, 3)):
        arrays = [part.batch.query_start_loc, part.batch.seq_lens, part.batch.token_to_req_indices]
        arrays += [group.dcp_local_seq_lens for group in part]
        assert [bytes_past_alignment(array) for array in arrays] == [0] * 5


def test_other_buffers_keep_the_parts_of_a_step_in_flight(backend):
    drawn = one_step()
    metadata = drawn.metadata(backend)
    first = metadata.split([3], MicroBatches(drawn.table))
    before = to_numpy(first[1].batch.seq_lens).tolist()

    metadata.split([6], MicroBatches(drawn.table))

    assert to_numpy(first[1].batch.seq_lens).tolist() == before


def test_an_output_set_of_another_number_is_split_as_well(backend):
    drawn = one_step()
    drawn.commit(backend, out=1)
    arrays = ([0, 2, 4, 6], [1, 1, 1])
    buffers = MicroBatches(drawn.table)
    steps_of_sets = [drawn.table.commit(3, *arrays, out=1), drawn.table.commit(3, [0, 1, 5, 6], [2, 2, 2])]

    first, _ = step_metadata(steps_of_sets[0], *arrays).split([3], buffers)
    assert to_numpy(first.batch.seq_lens).tolist() == [3, 2]
    first, _ = step_metadata(steps_of_sets[1], [0, 1, 5, 6], [2, 2, 2]).split([3], buffers)
    assert to_numpy(first.batch.seq_lens).tolist() == [3, 4]


def test_the_same_cut_of_steps_with_more_and_less_padding(backend):
    drawn = one_step()
    drawn.commit(backend)
    buffers, sizes = MicroBatches(drawn.table), {"num_reqs_padded": 4, "num_tokens_padded": 10}
    for starts in ([0, 1, 5, 7], [0, 1, 5, 9], [0, 1, 5, 7]):
        step = drawn.table.commit(3, starts, drawn.computed, **sizes)

        _, second = step_metadata(step, starts, drawn.computed).split([3], buffers)

        assert second.step.num_tokens == second.batch.num_tokens_unpadded == starts[-1] - 3
        assert second.step.num_reqs == second.batch.num_reqs_unpadded == 2


def test_a_split_takes_its_turn_among_the_calls_of_its_table(backend, monkeypatch):
    """It waits for the commit on another stream, and the next commit waits for it."""
    drawn = one_step()
    metadata, buffers, calls = drawn.metadata(backend), MicroBatches(drawn.table), []
    committer = drawn.table._committer
    launch = buffers._launch
    for name in ("order", "finish"):
        real = getattr(committer, name)
        monkeypatch.setattr(committer, name, lambda *a, n=name, r=real: (calls.append(n), r(*a)))
    monkeypatch.setattr(buffers, "_launch", lambda *a: (calls.append("split"), launch(*a)))

    metadata.split([3], buffers)
    metadata.split([3], buffers, enqueue=False)

    assert calls == ["split", "order", "finish"]


def test_no_more_cuts_are_remembered_than_a_limit(backend, monkeypatch):
    monkeypatch.setattr("pagedkv.batch.micro_batches._MOST_MADE", 4)
    drawn = one_step()
    metadata, buffers = drawn.metadata(backend), MicroBatches(drawn.table)

    for _ in range(2):
        for cut in range(1, 10):
            parts = metadata.split([cut], buffers)
            assert [part.batch.num_actual_tokens for part in parts] == [cut, 10 - cut]
            assert len(buffers._made) <= 4


def test_the_kernels_can_be_left_to_a_graph_that_holds_them(backend):
    """With enqueue=False the host's side is made, and the device's is left as it is."""
    drawn = one_step()
    metadata, buffers = drawn.metadata(backend), MicroBatches(drawn.table)
    parts = metadata.split([3], buffers)
    starts, computed = [0, 1, 5, 7], [4, 5, 6]
    step = drawn.table.commit(3, starts, computed, num_reqs_padded=4, num_tokens_padded=10)

    host = step_metadata(step, starts, computed).split([3], buffers, enqueue=False)

    assert [part.batch.seq_lens_cpu_upper_bound.tolist() for part in host] == [[5, 7], [9, 8, 0]]
    assert [to_numpy(part.batch.seq_lens).tolist() for part in host] == [[10, 2], [4, 7, 0]]
    for (_, launch), stream in zip(
        buffers._made.values(), [drawn.table._committer.backend.stream(None)] * 2, strict=True
    ):
        launch((1, 2), stream)  # the replay
    assert [to_numpy(part.batch.seq_lens).tolist() for part in parts] == [[5, 7], [9, 8, 0]]


class TestRefusals:
    @pytest.mark.parametrize(
        ("cuts", "error", "message"),
        [
            ([0], ValueError, r"cuts must lie in \[1, 9\], got 0"),
            ([10], ValueError, r"cuts must lie in \[1, 9\], got 10"),
            ([3, 3], ValueError, "cuts must increase, got 3 after 3"),
            ([5, 3], ValueError, "cuts must increase, got 3 after 5"),
            ([1, 2, 3], ValueError, "cuts must be at most 2 for 3 micro-batches, got 3"),
            ([2.0], TypeError, "cuts must be an int, got float"),
        ],
    )
    def test_cuts_that_are_none(self, backend, cuts, error, message):
        drawn = one_step()
        metadata, buffers = drawn.metadata(backend), MicroBatches(drawn.table, 3)
        before = [to_numpy(part.batch.seq_lens).tolist() for part in metadata.split([4], buffers)]

        with pytest.raises(error, match=message):
            metadata.split(cuts, buffers)

        after = metadata.split([4], buffers, enqueue=False)
        assert [to_numpy(part.batch.seq_lens).tolist() for part in after] == before

    def test_a_step_without_tokens_has_no_cut(self, backend):
        table = MultiGroupBlockTable([4], 2, 64, 8, backend=backend)
        metadata = step_metadata(table.commit(0, [0], []), [0], [])

        (part,) = metadata.split([], MicroBatches(table))
        assert part.batch.num_actual_tokens == 0
        with pytest.raises(ValueError, match="cuts must lie in"):
            metadata.split([1], MicroBatches(table))

    def test_a_micro_batch_is_not_split_again(self, backend):
        drawn = one_step()
        metadata = drawn.metadata(backend)
        buffers = MicroBatches(drawn.table)
        _, second = metadata.split([3], buffers)

        with pytest.raises(ValueError, match="must be of a whole step, got micro-batch 1"):
            second.split([2], buffers)

    def test_steps_of_another_table(self, backend):
        drawn, other = one_step(), one_step()
        other.commit(backend)

        with pytest.raises(ValueError, match="must be of a step of the table"):
            drawn.metadata(backend).split([3], MicroBatches(other.table))

    def test_no_request_is_cut_where_a_group_holds_states(self, backend):
        specs = [KVCacheGroupSpec(4), KVCacheGroupSpec(4, state_mode="align")]
        drawn = one_step(specs=specs)
        metadata, buffers = drawn.metadata(backend), MicroBatches(drawn.table)

        with pytest.raises(
            ValueError, match=r"cuts must lie between requests .* got 3 inside request 1 \(group 1\)"
        ):
            metadata.split([3], buffers)
        assert [part.batch.num_reqs for part in metadata.split([5], buffers)] == [2, 2]

    @pytest.mark.parametrize(("num", "error"), [(0, ValueError), (1.5, TypeError)])
    def test_a_number_of_micro_batches_that_is_none(self, backend, num, error):
        with pytest.raises(error, match="number of micro-batches must"):
            MicroBatches(MultiGroupBlockTable([4], 2, 64, 8, backend=backend), num)
