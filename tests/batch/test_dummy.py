"""Padded and dummy steps: rows NULL, slots PAD, addresses that stay, and requests that come back."""

import numpy as np
import pytest

from pagedkv import PagedKVError
from tests.tables.models import expand, to_numpy

from .scenes import BLOCK_SIZES, KINDS, scene_of

EIGHT = {name: 3 + i for i, name in enumerate("ABCDEFGH")}


@pytest.fixture(params=KINDS)
def scene(request, backend):
    """Eight requests, in groups with kernel views."""
    scene = scene_of(request.param, backend, max_num_tokens=96, views=True)
    scene.step(new=EIGHT)
    check(scene, list(EIGHT))
    return scene


def check(scene, order, **options):
    """Check a commit, its kernel views too."""
    step = scene.check(order, **options)
    for group in step:
        manager_blocks = to_numpy(group.block_table_tensor)
        np.testing.assert_array_equal(expand(manager_blocks, 2, 2), to_numpy(group.kernel_block_table()))
    return step


def arrays_of(step):
    batch = step.batch
    found = [batch.query_start_loc, batch.seq_lens, batch.positions, batch.token_to_req_indices]
    for group in step:
        found += [group.block_table_tensor, group.kernel_block_table(), group.slot_mapping]
        found += [group.dcp_local_seq_lens]
    return found


def address(array):
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


def check_dummy(step, num_reqs, num_tokens):
    """Nothing but the null block can be hit, whatever a consumer reads of the step."""
    assert (step.batch.num_reqs, step.batch.num_actual_tokens) == (num_reqs, num_tokens)
    for group in step:
        assert to_numpy(group.block_table_tensor).shape[0] == num_reqs
        assert not to_numpy(group.block_table_tensor).any()
        assert not to_numpy(group.kernel_block_table()).any()
        assert to_numpy(group.slot_mapping).tolist() == [-1] * num_tokens
    assert not step.batch.is_prefilling.any()


def test_a_smaller_batch_leaves_no_id_in_the_padding(scene):
    scene.step(["C", "E", "H"], finished=list("ABDFG"))
    for padded in (4, 8, 3):
        step = check(scene, ["H", "E", "C"], num_reqs_padded=padded, num_tokens_padded=padded)
        for group in step:
            assert not to_numpy(group.block_table_tensor)[3:].any()
            assert not to_numpy(group.kernel_block_table())[3:].any()
            assert (to_numpy(group.slot_mapping)[3:] == -1).all()


def test_a_dummy_step_after_a_real_one_shows_no_row_of_it(scene):
    check_dummy(scene.batch.dummy(8, 8), 8, 8)
    check_dummy(scene.batch.dummy(3, 96), 3, 96)
    check_dummy(scene.batch.dummy(8, 8), 8, 8)


def test_a_dummy_step_after_a_padded_one_shows_no_row_of_either(scene):
    scene.step(["C", "E", "H"], finished=list("ABDFG"))
    check(scene, ["H", "E", "C"], num_reqs_padded=4)
    check_dummy(scene.batch.dummy(8, 8), 8, 8)


def test_requests_come_back_with_their_blocks(scene):
    scene.step(["A", "C", "H"])  # the others rest already
    scene.batch.commit()
    order = scene.batch.req_ids
    check_dummy(scene.batch.dummy(8, 8), 8, 8)
    if scene.is_stable:
        check(scene, order)  # they were not touched
    else:
        assert scene.batch.req_ids == []
        assert len(scene.batch) == 8
    scene.step(["A", "C", "H", "F"])
    check(scene, [*(order if scene.is_stable else ["A", "C", "H"]), "F"])
    scene.step(dict.fromkeys(EIGHT, 2))
    scene.check(scene.batch.req_ids)
    assert set(scene.batch.req_ids) == set(EIGHT)


def test_others_come_and_go_after_a_dummy_step(scene):
    scene.batch.dummy(2, 2)
    names = list("ABDEFGH")
    scene.step(names, new={"X": 5}, finished=["C"])
    check(scene, list("ABXDEFGH") if scene.is_stable else ["X", *names])
    scene.batch.dummy(0, 0)
    scene.step(finished=[*names, "X"])
    check(scene, [], num_reqs_padded=8)


def test_a_dummy_step_in_a_batch_with_holes(scene):
    scene.batch.remove_request("B")
    scene.batch.remove_request("H")
    if scene.batch.manager is not None:
        scene.manager.free(scene.handles("BH"))
    for req_id in "BH":
        del scene.requests[req_id]
    check_dummy(scene.batch.dummy(4, 4), 4, 4)
    if scene.is_stable:
        with pytest.raises(PagedKVError, match="no holes"):
            scene.batch.commit()
    scene.step(list("ACDEFG"))
    check(scene, list("AGCDEF") if scene.is_stable else list("ACDEFG"))


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "lengths"),
    [(4, 10, [3, 3, 2, 2]), (3, 2, [1, 1, 0]), (1, 7, [7]), (8, 8, [1] * 8), (2, 0, [0, 0]), (0, 0, [])],
)
def test_tokens_are_spread_evenly(scene, num_reqs, num_tokens, lengths):
    step = scene.batch.dummy(num_reqs, num_tokens)
    check_dummy(step, num_reqs, num_tokens)
    starts = np.cumsum([0, *lengths]).tolist()
    assert to_numpy(step.batch.query_start_loc).tolist() == starts
    assert step.batch.query_start_loc_cpu.tolist() == starts
    assert to_numpy(step.batch.seq_lens).tolist() == lengths
    assert step.batch.num_computed_tokens_cpu.tolist() == [0] * num_reqs
    assert (step.batch.max_query_len, step.batch.max_seq_len) == (max(lengths, default=0),) * 2
    assert to_numpy(step.batch.positions).tolist() == [p for n in lengths for p in range(n)]


def test_a_dummy_step_with_context_has_it_in_all_lengths(scene):
    step = scene.batch.dummy(3, 4, seq_len=40, max_seq_len=48)
    check_dummy(step, 3, 4)
    assert to_numpy(step.batch.seq_lens).tolist() == [40] * 3
    assert step.batch.seq_lens_cpu_upper_bound.tolist() == [40] * 3
    assert step.batch.num_computed_tokens_cpu.tolist() == [38, 39, 39]
    assert to_numpy(step.batch.positions).tolist() == [38, 39, 39, 39]
    assert (step.batch.max_query_len, step.batch.max_seq_len) == (2, 48)


def test_addresses_stay_over_a_hundred_steps(scene):
    expected = [address(array) for array in arrays_of(scene.batch.commit(num_reqs_padded=8))]
    for i in range(100):
        if i % 5 == 4:
            check_dummy(step := scene.batch.dummy(8, 8), 8, 8)
        else:
            names = list(EIGHT)[i % 3 : 3 + i % 5]
            over = [name for name in names if scene.requests[name].length + 1 > 40]
            scene.step(
                [name for name in names if name not in over], new=dict.fromkeys(over, 2), finished=over
            )
            step = check(scene, scene.batch.req_ids, num_reqs_padded=8, num_tokens_padded=24)
        assert [address(array) for array in arrays_of(step)] == expected


def test_a_dummy_step_keeps_another_output_set(scene):
    scene.table.outputs(2)
    step = check(scene, list(EIGHT), out=0)
    slots = [to_numpy(group.slot_mapping).copy() for group in step]
    check_dummy(scene.batch.dummy(8, 8, out=1), 8, 8)
    for expected, group in zip(slots, step, strict=True):
        np.testing.assert_array_equal(expected, to_numpy(group.slot_mapping))
    assert len(slots) == len(BLOCK_SIZES)
