"""What slot_mapping writes beside the slots: each token's request, and each rank's share of the lengths."""

import numpy as np
import pytest
from hypothesis import given, settings

from .forms import EXAMPLES
from .test_slot_mapping import INT32, expected_local_length, expected_step, run_step, steps
from .world import ONE_BLOCK, STALE, Group, World, launches, narrow_launches


def decodes(groups, num_computed):
    """A step of one token for each request, all of it on the device."""
    num_reqs = len(num_computed)
    world = World(groups, num_reqs, slot_stride=num_reqs)
    return {
        "world": world,
        "arena": world.arena(),
        "counts": world.counts(),
        "query_start_loc": np.arange(num_reqs + 1, dtype=np.int32),
        "num_tokens": num_reqs,
        "max_num_tokens": num_reqs,
        "num_computed_tokens": np.array(num_computed, np.int32),
        "positions": None,
        "rows": None,
        "staged": set(),
        "counted_on_device": False,
        "num_tokens_fill": num_reqs,
        "num_reqs_fill": num_reqs,
        "slot_dtype": np.int64,
    }


def test_token_requests_that_start_off_a_pair_of_them(form):
    """Tokens go in pairs where all arrays allow it; what starts between two pairs is written one by one."""
    step = decodes([Group(16, width=1)], np.zeros(99))
    reqs = np.full(100, STALE, np.int32)

    run_step(form, step, ONE_BLOCK, step_token_reqs=reqs[1:])

    assert reqs.tolist() == [STALE, *range(99)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(step=steps(), shape=launches | narrow_launches)
def test_starts_and_positions_may_be_those_that_the_step_writes(form, step, shape):
    """Each element is overwritten with what it holds, whichever thread and group comes first."""
    if step["positions"] is None:
        step["positions"] = np.arange(step["num_tokens"])
    step["staged"] -= {"query_start_loc", "positions"}
    expected = expected_step(step)
    own = {
        "query_start_loc": np.full(step["world"].max_num_reqs + 1, STALE, np.int32),
        "positions": np.full(step["max_num_tokens"], STALE, np.int64),
    }
    for name, array in own.items():
        array[: len(step[name])] = step[name]
        step[name] = array[: len(step[name])]

    out = run_step(form, step, shape, **{f"step_{name}": array for name, array in own.items()})

    for name in expected:
        np.testing.assert_array_equal(expected[name], out[name], name)


class TestLocalLengths:
    """Of decodes of one token: a length is one more than what was computed."""

    @pytest.mark.parametrize(
        ("interleave", "shares"),
        [
            (1, {5: (3, 2), 9: (5, 4), 37: (19, 18), 0: (0, 0)}),
            (4, {5: (4, 1), 9: (5, 4), 37: (20, 17), 0: (0, 0)}),
        ],
    )
    def test_two_ranks_share_a_sequence(self, form, interleave, shares):
        groups = [Group(4, width=1, cp=(2, rank, interleave)) for rank in (0, 1)]
        step = decodes([*groups, Group(4, width=1)], [length - 1 for length in shares])

        local = run_step(form, step, ONE_BLOCK)["step_local_seq_lens"]

        assert [*zip(*local.tolist(), strict=True)] == [(*share, length) for length, share in shares.items()]

    @pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 1), (7, 5), (4, 16), (65_537, 1)])
    def test_the_longest_sequence_is_shared_out_to_its_last_token(self, form, world, interleave):
        lengths = [INT32.max, INT32.max - 1, INT32.max - world * interleave, 2**30, 2**24 + 1]
        ranks = [0, 1, world - 1]
        groups = [Group(interleave, width=1, cp=(world, rank, interleave)) for rank in ranks]
        step = decodes(groups, [length - 1 for length in lengths])

        local = run_step(form, step, ONE_BLOCK)["step_local_seq_lens"]

        for group, shares in zip(groups, local.tolist(), strict=True):
            assert shares == [expected_local_length(group, length) for length in lengths]

    def test_chunks_that_reach_past_32_bits(self, form):
        """Ranks 2, 3 and 4 start at 2**31 and later, past every length; rank 1 holds what lies past 2**30."""
        lengths = [INT32.max, 2**30 + 1, 2**30, 7]
        groups = [Group(2**30, width=1, cp=(5, rank, 2**30)) for rank in range(5)]
        step = decodes(groups, [length - 1 for length in lengths])

        local = run_step(form, step, ONE_BLOCK)["step_local_seq_lens"]

        assert local.tolist() == [[2**30, 2**30, 2**30, 7], [2**30 - 1, 1, 0, 0], *[[0] * 4] * 3]

    def test_a_length_that_garbage_makes_negative_has_no_share(self, form):
        groups = [Group(4, width=1), Group(4, width=1, cp=(2, 0, 2)), Group(4, width=1, cp=(2, 1, 2))]
        step = decodes(groups, [-1, -2, INT32.min, INT32.max])  # the last one wraps

        out = run_step(form, step, ONE_BLOCK)

        assert out["step_seq_lens"].tolist() == [0, -1, INT32.min + 1, INT32.min]
        assert out["step_local_seq_lens"].tolist() == [[0] * 4] * 3
