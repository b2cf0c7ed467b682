"""Small requests and whole runs, for the tests of the replay."""

from hypothesis import strategies as st

from pagedkv.replay.engine import Engine
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.requests import HASH_BLOCK_SIZE, RequestsBuilder
from pagedkv.specs import KVCacheGroupSpec


def requests_of(*rows):
    """Requests from (arrival, prompt, output, hash ids...) rows."""
    builder = RequestsBuilder()
    for arrival, prompt, output, *hash_ids in rows:
        builder.add(arrival, prompt, output, hash_ids)
    return builder.build()


def options_of(**changes):
    """Options of a small engine; groups may be given as block sizes."""
    groups = tuple(
        g if isinstance(g, KVCacheGroupSpec) else KVCacheGroupSpec(g) for g in changes.pop("groups", (4,))
    )
    sizes = {
        "num_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "backend": "numpy",
        "num_samples": 8,
    }
    return ReplayOptions(groups=groups, **(sizes | changes))


def run(requests, **changes):
    """Run an engine to its end and return it."""
    engine = Engine(requests, options_of(**changes))
    engine.run()
    return engine


@st.composite
def traffic(draw, max_requests=8):
    """Requests of which many share hash ids; short ones, and some longer than a hash block."""
    builder, arrival = RequestsBuilder(), 0.0
    for _ in range(draw(st.integers(1, max_requests))):
        arrival += draw(st.sampled_from([0.0, 0.001, 0.3]))
        prompt = draw(st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, 700, 1024, 1100])))
        num_ids = -(-prompt // HASH_BLOCK_SIZE) * draw(st.booleans())
        hash_ids = draw(st.lists(st.integers(0, 2), min_size=num_ids, max_size=num_ids))
        # a partial block has an id of its own for every length, as in real traces
        if hash_ids and prompt % HASH_BLOCK_SIZE:
            hash_ids[-1] = 10 * prompt + hash_ids[-1]
        builder.add(arrival, prompt, draw(st.integers(0, 12)), hash_ids)
    return builder.build()


def held_blocks(engine):
    """{(group, place): ids} of the non-NULL entries of the tables' mirror."""
    mirror = engine.tables.mirror
    return {
        (group, place): [int(b) for b in mirror.block_table(group)[row, : mirror.num_blocks(group)[row]] if b]
        for group in range(engine.layout.num_groups)
        for place, row in enumerate(engine.batch.row)
    }


def assert_all_free(engine):
    """Nothing is left behind: no row, no block, no count."""
    assert engine.batch.num_reqs == 0
    assert engine.num_blocks - 1 == engine.memory.num_free
    assert not engine.memory.manager.pool.ref_counts.any()
    assert engine.memory.manager.stats().num_sequences == 0
    mirror = engine.tables.mirror
    for group in range(engine.layout.num_groups):
        assert not mirror.block_table(group).any()
        assert not mirror.num_blocks(group).any()
