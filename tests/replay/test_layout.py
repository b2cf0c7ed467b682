"""Block arithmetic against counting positions one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.replay.layout import Layout
from pagedkv.specs import ContextParallel, KVCacheGroupSpec


@st.composite
def layouts(draw):
    world = draw(st.integers(1, 3))
    specs = [
        KVCacheGroupSpec(
            draw(st.integers(1, 5)),
            cp_sharded=draw(st.booleans()),
            sliding_window=draw(st.one_of(st.none(), st.integers(1, 12))),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Layout(specs, ContextParallel(world), draw(st.integers(1, 9)))


def span(layout, group):
    """Positions that one column stands for."""
    spec = layout.specs[group]
    return spec.block_size * (
        layout.context_parallel.world_size if spec.cp_sharded and not spec.sliding_window else 1
    )


@settings(deadline=None, max_examples=60)
@given(layouts(), st.lists(st.integers(0, 60), max_size=4))
def test_columns_cover_positions_and_first_ones_start_the_window(layout, lengths):
    lengths = np.array(lengths, np.int64)

    for group, spec in enumerate(layout.specs):
        columns = [len({p // span(layout, group) for p in range(n)}) for n in lengths]
        window = spec.sliding_window or 10**9
        attended = [min((p for p in range(n + 1) if n - window < p), default=0) for n in lengths]
        np.testing.assert_array_equal(columns, layout.num_columns(lengths)[group])
        np.testing.assert_array_equal(attended, layout.first_positions(lengths)[group])
        np.testing.assert_array_equal(
            [p // span(layout, group) for p in attended], layout.first_columns(lengths)[group]
        )


@settings(deadline=None, max_examples=60)
@given(layouts(), st.integers(1, 50), st.data())
def test_no_way_of_computing_holds_more_than_the_peak(layout, length, data):
    """Whatever the chunks, blocks that the step needs and that a window still holds stay within the peak."""
    most = np.zeros(layout.num_groups, np.int64)
    computed, chunks = 0, layout_chunks(layout, length, data)

    for chunk in chunks:
        now, computed = np.array([computed]), computed + chunk
        held = layout.num_columns(np.array([computed])) - layout.first_columns(now)
        most = np.maximum(most, held[:, 0])

    assert (most <= layout.peak_blocks(np.array([length]))[:, 0]).all()


def layout_chunks(layout, length, data):
    """Chunks of at most the step's tokens that add up to `length`."""
    chunks, left = [], length
    while left:
        chunks.append(data.draw(st.integers(1, min(left, layout.max_num_batched_tokens))))
        left -= chunks[-1]
    return chunks


def test_hits_are_whole_blocks_in_every_group():
    specs = [KVCacheGroupSpec(4), KVCacheGroupSpec(6), KVCacheGroupSpec(5, sliding_window=9)]

    layout = Layout(specs, ContextParallel(2), 8)

    assert layout.alignment == 120  # of 8, 12 and 5: windows are not sharded
    assert layout.worlds == [2, 2, 1]
