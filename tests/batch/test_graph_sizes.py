"""GraphSizes: every batch runs in the smallest graph that was captured for it, or in none."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedkv.batch.graph_sizes import GraphMode, GraphShape, GraphSizes

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL


def is_uniform(query_lens, uniform_query_len):
    """Each request has as many tokens as uniform batches have."""
    return all(n == uniform_query_len for n in query_lens)


def smallest(capture_sizes, max_num_reqs, max_num_tokens, uniform_query_len, mixed, query_lens):
    """The shape of a batch, by trying the sizes one after the other."""
    sizes = [size for size in sorted(capture_sizes) if sum(query_lens) <= size <= max_num_tokens]
    if query_lens and is_uniform(query_lens, uniform_query_len):
        for size in sizes:
            if size % uniform_query_len == 0:
                num_reqs = min(size // uniform_query_len, max_num_reqs)
                return GraphShape(FULL, size, num_reqs, uniform_query_len)
    for size in sizes:
        num_reqs = min(size, max_num_reqs)
        if mixed is FULL and num_reqs >= len(query_lens):
            return GraphShape(FULL, size, num_reqs)
        if mixed is PIECEWISE:
            return GraphShape(PIECEWISE, size)
    return GraphShape(NONE, sum(query_lens))


def dispatched(sizes, query_lens):
    return sizes.dispatch(len(query_lens), sum(query_lens), max(query_lens, default=0))


@st.composite
def sizes_and_batches(draw):
    """Arguments of GraphSizes and batches within its limits; many are uniform, some have empty requests."""
    max_num_reqs = draw(st.integers(1, 9))
    max_num_tokens = draw(st.integers(1, 40))
    uniform = draw(st.none() | st.integers(1, min(5, max_num_tokens)))
    capture_sizes = draw(st.lists(st.integers(1, 48)))
    if uniform is not None and capture_sizes:
        capture_sizes.append(uniform * draw(st.integers(1, max_num_tokens // uniform)))
    mixed = draw(st.sampled_from(GraphMode))
    query_len = st.just(uniform) if uniform and draw(st.booleans()) else st.integers(0, max_num_tokens)
    batches = []
    for drawn in draw(st.lists(st.lists(query_len, max_size=max_num_reqs), max_size=5)):
        query_lens = list(drawn)
        while sum(query_lens) > max_num_tokens:
            query_lens.pop()
        batches.append(query_lens)
    return (capture_sizes, max_num_reqs, max_num_tokens, uniform, mixed), batches


def built(capture_sizes, max_num_reqs, max_num_tokens, uniform_query_len, mixed):
    return GraphSizes(
        capture_sizes, max_num_reqs, max_num_tokens, uniform_query_len=uniform_query_len, mixed=mixed
    )


@given(sizes_and_batches())
@example((([8], 6, 8, None, FULL), [[0, 0, 0, 1]]))
@example((([2, 8], 6, 8, None, FULL), [[0, 0, 0, 1]]))  # the graph of two tokens has too few requests
@example((([3, 6, 9], 2, 9, 3, NONE), [[3], [3, 3], [3, 2]]))
def test_a_batch_runs_in_the_smallest_graph_that_holds_it(case):
    arguments, batches = case
    sizes = built(*arguments)

    for query_lens in batches:
        assert dispatched(sizes, query_lens) == smallest(*arguments, query_lens)


@given(sizes_and_batches())
def test_a_shape_was_captured_and_is_no_smaller_than_its_batch(case):
    arguments, batches = case
    sizes = built(*arguments)

    for query_lens in batches:
        shape = dispatched(sizes, query_lens)
        if shape.mode is NONE:
            assert shape == GraphShape(NONE, sum(query_lens), None, None)
            continue
        assert shape in sizes.captures()
        assert shape.num_tokens_padded >= sum(query_lens)
        assert (shape.num_reqs_padded is None) == (shape.mode is PIECEWISE)
        assert shape.num_reqs_padded is None or len(query_lens) <= shape.num_reqs_padded <= arguments[1]
        if shape.uniform_query_len is not None:
            assert is_uniform(query_lens, shape.uniform_query_len)


@given(sizes_and_batches())
def test_captures_are_distinct_largest_first_and_each_full_one_is_run_by_some_batch(case):
    arguments, _ = case
    sizes = built(*arguments)
    captures = sizes.captures()
    tokens = [shape.num_tokens_padded for shape in captures]

    assert len(set(captures)) == len(captures)
    assert tokens == sorted(tokens, reverse=True)
    for shape in captures:
        if shape.uniform_query_len is not None:
            num_reqs = shape.num_reqs_padded
            assert dispatched(sizes, [shape.uniform_query_len] * num_reqs) == shape
        elif shape.mode is FULL:
            num_tokens = shape.num_tokens_padded
            assert sizes.dispatch(1, num_tokens, num_tokens + 1) == shape  # a bound that is not reached


def test_full_graphs_for_decoding_and_piecewise_graphs_for_the_rest():
    sizes = GraphSizes([4, 1, 16, 8, 8], max_num_reqs=6, max_num_tokens=12)

    assert sizes.captures() == (  # 16 tokens fit no buffer; 8 hold every decode batch
        GraphShape(PIECEWISE, 8),
        GraphShape(FULL, 8, 6, 1),
        GraphShape(PIECEWISE, 4),
        GraphShape(FULL, 4, 4, 1),
        GraphShape(PIECEWISE, 1),
        GraphShape(FULL, 1, 1, 1),
    )
    assert sizes.dispatch(5, 5, 1) == GraphShape(FULL, 8, 6, 1)
    assert sizes.dispatch(2, 4, 3) == GraphShape(PIECEWISE, 4)
    assert sizes.dispatch(2, 9, 8) == GraphShape(NONE, 9)


def test_uniform_sizes_are_multiples_of_the_query_length():
    """Batches of 3 tokens a request: 4 and 8 serve mixed batches only."""
    sizes = GraphSizes([3, 4, 6, 8, 12], 10, 40, uniform_query_len=3)

    assert [s.num_reqs_padded for s in sizes.captures() if s.mode is FULL] == [4, 2, 1]
    assert sizes.dispatch(1, 3, 3) == GraphShape(FULL, 3, 1, 3)
    assert sizes.dispatch(3, 9, 3) == GraphShape(FULL, 12, 4, 3)
    assert sizes.dispatch(2, 4, 3) == GraphShape(PIECEWISE, 4)  # 3 and 1
    assert sizes.dispatch(3, 3, 1) == GraphShape(PIECEWISE, 3)  # uniform, but of another length


def test_a_uniform_batch_too_large_for_its_graphs_runs_as_all_others():
    sizes = GraphSizes([2, 4, 5], 8, 8, uniform_query_len=2)

    assert sizes.dispatch(2, 4, 2) == GraphShape(FULL, 4, 2, 2)
    assert GraphSizes([2, 5, 7], 8, 8, uniform_query_len=2).dispatch(2, 4, 2) == GraphShape(PIECEWISE, 5)
    assert GraphSizes([2], 8, 8, uniform_query_len=2).dispatch(2, 4, 2) == GraphShape(NONE, 4)


def test_no_uniform_graph_is_larger_than_the_smallest_that_holds_every_batch():
    between = GraphSizes([2, 4, 8, 16, 32], max_num_reqs=6, max_num_tokens=64, mixed=NONE)
    exact = GraphSizes([2, 4, 8, 16, 32], max_num_reqs=4, max_num_tokens=64, mixed=NONE)

    assert [shape[1:] for shape in between.captures()] == [(8, 6, 1), (4, 4, 1), (2, 2, 1)]
    assert [shape[1:] for shape in exact.captures()] == [(4, 4, 1), (2, 2, 1)]


def test_full_graphs_for_all_batches():
    """The graph of 2 tokens has 2 requests, so 3 requests with one token in all need the next."""
    sizes = GraphSizes([2, 4, 16], 6, 16, uniform_query_len=None, mixed=FULL)

    assert sizes.captures() == (GraphShape(FULL, 16, 6), GraphShape(FULL, 4, 4), GraphShape(FULL, 2, 2))
    assert sizes.dispatch(2, 2, 1) == GraphShape(FULL, 2, 2)
    assert sizes.dispatch(3, 1, 1) == GraphShape(FULL, 4, 4)
    assert sizes.dispatch(5, 5, 1) == GraphShape(FULL, 16, 6)


def test_without_requests_or_tokens_the_smallest_graph_is_run():
    """Such a batch reads and writes nothing."""
    assert GraphSizes([4, 2], 6, 8).dispatch(0, 0, 0) == GraphShape(PIECEWISE, 2)
    assert GraphSizes([4, 2], 6, 8, mixed=NONE).dispatch(0, 0, 0) == GraphShape(NONE, 0)
    assert GraphSizes([4, 2], 6, 8, mixed=FULL).dispatch(0, 0, 0) == GraphShape(FULL, 2, 2)


def test_without_sizes_nothing_is_captured():
    for capture_sizes in ([], [9, 10]):
        sizes = GraphSizes(capture_sizes, 4, 8)

        assert sizes.captures() == ()
        assert sizes.dispatch(2, 2, 1) == GraphShape(NONE, 2)


def test_sizes_of_one():
    sizes = GraphSizes([1], 1, 1)

    assert sizes.dispatch(1, 1, 1) == GraphShape(FULL, 1, 1, 1)
    assert sizes.dispatch(1, 0, 0) == GraphShape(PIECEWISE, 1)


def test_numbers_may_be_numpys_and_come_back_as_ints():
    sizes = GraphSizes(np.array([2, 4]), np.int64(4), np.int32(16))
    shape = sizes.dispatch(np.int32(2), np.int64(5), np.int32(3))

    assert shape == GraphShape(NONE, 5)
    assert type(shape.num_tokens_padded) is int
    assert {type(s.num_tokens_padded) for s in sizes.captures()} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], 4, 8), r"capture_sizes must lie in \[1, 2147483647\], got 0"),
        (([4, -1], 4, 8), r"capture_sizes must lie in \[1, 2147483647\], got -1"),
        (([4], 0, 8), r"max_num_reqs must lie in \[1, 2147483647\], got 0"),
        (([4], 4, 0), r"max_num_tokens must lie in \[1, 2147483647\], got 0"),
    ],
)
def test_a_size_out_of_range_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GraphSizes(*arguments)


@pytest.mark.parametrize("uniform_query_len", [0, 9])
def test_a_uniform_query_length_out_of_range_is_refused(uniform_query_len):
    with pytest.raises(ValueError, match=rf"uniform_query_len must lie in \[1, 8\], got {uniform_query_len}"):
        GraphSizes([4], 4, 8, uniform_query_len=uniform_query_len)


def test_sizes_without_a_multiple_of_the_uniform_query_length_are_refused():
    with pytest.raises(ValueError, match=r"a multiple of uniform_query_len 3, got \[1, 4\].*pass uniform_q"):
        GraphSizes([4, 1, 9], 4, 8, uniform_query_len=3)  # 9 fits no buffer

    assert GraphSizes([4, 1, 9], 4, 8, uniform_query_len=None).dispatch(1, 3, 3) == GraphShape(PIECEWISE, 4)


@pytest.mark.parametrize("wrong", ["sizes", [1.0], [True], [None]])
def test_sizes_that_are_no_ints_are_refused(wrong):
    with pytest.raises(TypeError, match="capture_sizes must be an int, got"):
        GraphSizes(wrong, 4, 8)


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(TypeError, match="mixed must be a GraphMode, got str"):
        GraphSizes([4], 4, 8, mixed="full")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((5, 5, 1), r"num_reqs must lie in \[0, 4\], got 5"),
        ((-1, 5, 1), r"num_reqs must lie in \[0, 4\], got -1"),
        ((4, 9, 3), r"num_tokens must lie in \[0, 8\], got 9"),
        ((4, -1, 3), r"num_tokens must lie in \[0, 8\], got -1"),
        ((4, 4, -1), r"max_query_len must lie in \[0, 2147483647\], got -1"),
    ],
)
def test_a_batch_out_of_range_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        GraphSizes([2, 4], 4, 8).dispatch(*batch)


@pytest.mark.parametrize("batch", [(1.0, 1, 1), (1, 1.0, 1), (1, 1, True), (None, 1, 1)])
def test_a_batch_of_no_ints_is_refused(batch):
    with pytest.raises(TypeError, match="must be an int, got"):
        GraphSizes([2, 4], 4, 8).dispatch(*batch)
