"""What tables are drawn from: groups, worlds, and step sizes, sentinels among them."""

from hypothesis import strategies as st

from pagedkv import ContextParallel, KVCacheGroupSpec

BLOCK_SIZES = [1, 2, 3, 4, 6, 12, 16, 24]


@st.composite
def kernel_views(draw, block_size):
    kernel = draw(st.sampled_from([k for k in range(1, block_size + 1) if block_size % k == 0]))
    ratio = block_size // kernel
    return draw(st.sampled_from([kernel, (kernel, ratio), (kernel, ratio + 3)]))


@st.composite
def group_specs(draw, interleave=1):
    sharded = draw(st.booleans())
    sizes = [size for size in BLOCK_SIZES if not sharded or size % interleave == 0]
    size = draw(st.sampled_from(sizes))
    state_mode = draw(st.sampled_from([None, None, None, "none", "align", "all"]))
    return KVCacheGroupSpec(
        size,
        tuple(draw(st.lists(kernel_views(size), max_size=2))),
        cp_sharded=sharded,
        slot_mapping=draw(st.integers(0, 5)) > 0,
        max_num_blocks_per_req=draw(st.none() | st.integers(1, 9)),
        sliding_window=draw(st.none() | st.integers(1, 40)) if state_mode is None else None,
        state_mode=state_mode,
        num_speculative_blocks=0 if state_mode is None else draw(st.integers(0, 2)),
    )


@st.composite
def worlds(draw, interleave):
    """Two ranks of one context-parallel world; the same one where there is no other."""
    world = draw(st.sampled_from([1, 1, 2, 3]))
    ranks = draw(st.tuples(st.integers(0, world - 1), st.integers(0, world - 1)))
    return [ContextParallel(world, rank, interleave) for rank in ranks]
