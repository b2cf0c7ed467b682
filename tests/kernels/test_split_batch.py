"""split_batch against a batch of tokens that is dealt out to the micro-batches one by one."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .forms import EXAMPLES
from .world import ONE_BLOCK, STALE, Group, World, launches, narrow_launches, worlds

INT32 = np.iinfo(np.int32)
OUTPUTS = ("query_start_loc", "seq_lens", "token_reqs", "local_seq_lens")


def stale(world, max_num_tokens):
    return {
        "query_start_loc": np.full(world.max_num_reqs + 1, STALE, np.int32),
        "seq_lens": np.full(world.max_num_reqs, STALE, np.int32),
        "token_reqs": np.full(max_num_tokens, STALE, np.int32),
        "local_seq_lens": np.full((len(world.groups), world.req_stride), STALE, np.int32),
    }


def run(form, world, step, part, max_num_tokens, shape=ONE_BLOCK):
    out = stale(world, max_num_tokens)
    args = (world.geometry, step["query_start_loc"], step["seq_lens"], step["token_reqs"])
    form.run("split_batch", (*args, *out.values(), *part), shape.with_groups(len(world.groups)))
    return out


def expected(world, step, part, max_num_tokens):
    """Each row counts its tokens: those before the cut, those of the part, and those behind it."""
    first_req, last_req, first_token, last_token = part
    out = stale(world, max_num_tokens)
    out["query_start_loc"][0] = 0
    for i, r in enumerate(range(first_req, last_req)):
        tokens = range(step["query_start_loc"][r], step["query_start_loc"][r + 1])
        inside = sum(first_token <= t < last_token for t in tokens)
        length = int(step["seq_lens"][r]) - sum(t >= last_token for t in tokens)
        out["query_start_loc"][i + 1] = out["query_start_loc"][i] + inside
        out["seq_lens"][i] = length
        for g, group in enumerate(world.groups):
            ranks, rank, interleave = group.cp
            out["local_seq_lens"][g, i] = sum((p // interleave) % ranks == rank for p in range(length))
    for t in range(first_token, last_token):
        is_padding = t >= step["query_start_loc"][-1]
        out["token_reqs"][t - first_token] = 0 if is_padding else step["token_reqs"][t] - first_req
    return out


@st.composite
def steps(draw):
    """A world and a step in it: query lengths, zeros among them, then padding rows and padding tokens."""
    world = draw(worlds())
    num_reqs = draw(st.integers(0, world.max_num_reqs))
    lens = [draw(st.integers(0, 9)) for _ in range(num_reqs)]
    computed = [draw(st.integers(0, 60)) for _ in range(num_reqs)]
    padding = world.max_num_reqs - num_reqs
    total, fill = sum(lens), draw(st.integers(0, 4))
    starts = np.cumsum([0, *lens, *[0] * padding])
    token_reqs = np.concatenate([np.repeat(np.arange(num_reqs), lens), np.zeros(fill)])
    lengths = [c + n for c, n in zip(computed, lens, strict=True)] + [0] * padding
    step = {
        "query_start_loc": starts.astype(np.int32),
        "seq_lens": np.array(lengths, np.int32),
        "token_reqs": token_reqs.astype(np.int32),
    }
    return world, step, total + fill


def parts_of(starts, cuts, num_tokens):
    """(first_req, last_req, first_token, last_token) by brute force: every request that a part touches.

    Requests without tokens, padding among them, go with the tokens at or behind their start.
    """
    edges = [0, *cuts, num_tokens]
    parts = []
    for first, last in pairwise(edges):
        is_last = last == num_tokens
        rows = [
            r
            for r in range(len(starts) - 1)
            if max(starts[r], first) < min(starts[r + 1], last)
            or (starts[r] == starts[r + 1] and first <= starts[r] and (starts[r] < last or is_last))
        ]
        parts.append((rows[0], rows[-1] + 1, first, last) if rows else (0, 0, first, last))
    return parts


@settings(max_examples=3 * EXAMPLES, deadline=None)
@given(drawn=steps(), data=st.data(), shape=launches | narrow_launches)
def test_each_part_holds_its_tokens_and_touches_nothing_else(form, drawn, data, shape):
    world, step, num_tokens = drawn
    inside = st.integers(1, num_tokens - 1) if num_tokens > 1 else st.nothing()
    cuts = sorted(data.draw(st.sets(inside, max_size=3))) if num_tokens > 1 else []

    for part in parts_of(step["query_start_loc"].tolist(), cuts, num_tokens):
        out = run(form, world, step, part, num_tokens + 2, shape)

        for name, array in expected(world, step, part, num_tokens + 2).items():
            np.testing.assert_array_equal(array, out[name], f"{name} of {part}")


def step_of(lens, computed):
    starts = np.cumsum([0, *lens]).astype(np.int32)
    return {
        "query_start_loc": starts,
        "seq_lens": np.add(lens, computed).astype(np.int32),
        "token_reqs": np.repeat(np.arange(len(lens)), lens).astype(np.int32),
    }


@pytest.mark.parametrize(
    ("part", "starts", "lengths", "reqs", "local"),
    [
        ((0, 2, 0, 5), [0, 2, 5], [12, 23], [0, 0, 1, 1, 1], [6, 12]),
        ((1, 3, 5, 9), [0, 3, 4], [26, 31], [0, 0, 0, 1], [13, 16]),
        ((1, 2, 3, 4), [0, 1], [22], [0], [11]),
    ],
    ids=["cut at its end", "cut at its start", "inside one request"],
)
def test_numbers_of_a_cut_request(form, part, starts, lengths, reqs, local):
    """Requests of 2, 6 and 1 tokens behind 10, 20 and 30 computed ones; rank 0 of 2, one token each."""
    world = World([Group(16, width=2, cp=(2, 0, 1))], 3)

    out = run(form, world, step_of([2, 6, 1], [10, 20, 30]), part, 9)

    n, tokens = len(lengths), len(reqs)
    assert out["query_start_loc"][: n + 1].tolist() == starts
    assert out["seq_lens"][:n].tolist() == lengths
    assert out["token_reqs"][:tokens].tolist() == reqs
    assert out["local_seq_lens"][0, :n].tolist() == local
    assert {int(value) for name in OUTPUTS for value in out[name].ravel()[-1:]} <= {
        STALE,
        *starts,
        *reqs,
        *local,
    }


def test_a_part_without_rows_has_tokens_of_row_0(form):
    """Cut in the padding: the tokens behind the cut belong to nobody."""
    world = World([Group(16, width=2)], 1)
    step = step_of([2], [0]) | {"token_reqs": np.zeros(8, np.int32)}

    out = run(form, world, step, (1, 1, 6, 8), 8)

    assert out["query_start_loc"].tolist() == [0, STALE]
    assert out["seq_lens"].tolist() == [STALE]
    assert out["token_reqs"].tolist() == [0, 0, *[STALE] * 6]


@pytest.mark.parametrize("value", [INT32.min, -5, 3, INT32.max])
def test_garbage_on_the_device_stays_inside_the_part(form, value):
    """Starts are clipped into the part's tokens, and each token's request into its rows."""
    world = World([Group(16, width=2, cp=(3, 1, 2))], 4)
    garbage = {
        "query_start_loc": np.full(5, value, np.int32),
        "seq_lens": np.full(4, value, np.int32),
        "token_reqs": np.full(9, value, np.int32),
    }

    out = run(form, world, garbage, (1, 3, 4, 9), 9)

    assert all(0 <= start <= 5 for start in out["query_start_loc"][:3].tolist())
    assert all(0 <= request < 2 for request in out["token_reqs"][:5].tolist())
    assert out["seq_lens"][:2].tolist() == [value, value]


def test_lengths_wrap_as_int32_where_starts_are_garbage(form):
    world = World([Group(16, width=2)], 1)
    step = {
        "query_start_loc": np.array([0, INT32.max], np.int32),
        "seq_lens": np.array([INT32.min], np.int32),
        "token_reqs": np.zeros(2, np.int32),
    }

    out = run(form, world, step, (0, 1, 0, 1), 2)

    assert out["seq_lens"].tolist() == [2]  # -2**31 - (2**31 - 2), in 32 bits
    assert out["local_seq_lens"].tolist() == [[2]]
