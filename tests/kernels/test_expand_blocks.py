"""expand_blocks against the formula, id by id."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from .forms import EXAMPLES
from .world import ONE_BLOCK, STALE, launches


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    ids=st.lists(st.just(0) | st.integers(1, 2**20), max_size=300),
    ratio=st.integers(1, 9),
    gap=st.integers(0, 3),
    shape=launches,
)
def test_each_id_becomes_ratio_ids_and_null_stays_null(form, ids, ratio, gap, shape):
    stride = ratio + gap
    expected = [b * stride + j if b else 0 for b in ids for j in range(ratio)]

    out = np.full(len(expected) + 2, STALE, np.int32)
    form.run("expand_blocks", (np.array(ids, np.int32), out, len(ids), ratio, stride), shape)

    assert out.tolist() == [*expected, STALE, STALE]


def test_the_last_id_that_fits(form):
    """Block ids are bounded so that their last kernel block is 2**31 - 1."""
    out = np.zeros(4, np.int32)

    form.run("expand_blocks", (np.array([2**29 - 1], np.int32), out, 1, 4, 4), ONE_BLOCK)

    assert out.tolist() == [2**31 - 4, 2**31 - 3, 2**31 - 2, 2**31 - 1]


def test_manager_blocks_of_128_tokens_in_kernel_blocks_of_64(form):  # vllm-ascend#7019
    out = np.zeros(4, np.int32)

    form.run("expand_blocks", (np.array([2, 5], np.int32), out, 2, 2, 2), ONE_BLOCK)

    assert out.tolist() == [4, 5, 10, 11]
