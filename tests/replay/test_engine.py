"""Whole runs: everything completes, everything is verified, nothing is left behind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.replay.engine import Engine
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

from .runs import assert_all_free, options_of, requests_of, run, traffic


@st.composite
def engine_options(draw):
    """Small engines of every kind: chunks, pools that are tight, windows, worlds and kernel views."""
    interleave = draw(st.integers(1, 2))
    groups = tuple(
        KVCacheGroupSpec(
            interleave * draw(st.integers(1, 3)),
            kernel_views=(1, (interleave, 7)) if draw(st.booleans()) else (),
            cp_sharded=draw(st.booleans()),
            sliding_window=draw(st.one_of(st.none(), st.integers(1, 30))),
        )
        for _ in range(draw(st.integers(1, 3)))
    )
    return options_of(
        groups=groups,
        context_parallel=ContextParallel(draw(st.integers(1, 3)), 0, interleave),
        num_blocks=draw(st.integers(60, 1500)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.sampled_from([9, 64, 600])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        prefix_caching=draw(st.booleans()),
        hash=draw(st.sampled_from(["siphash", "sha256"])),
        compact_every=draw(st.sampled_from([0, 1, 3])),
        arrivals=draw(st.sampled_from(["trace", "immediate"])),
        num_samples=3,
    )


@settings(deadline=None, max_examples=60)
@given(traffic(max_requests=5), engine_options())
def test_any_traffic_completes_verified_on_any_engine(requests, options):
    engine = Engine(requests, options)
    engine.run()

    assert engine.findings.examples == []
    assert engine.findings.num_mismatches == 0
    assert engine.tally.num_completed + engine.tally.num_rejected == len(requests)
    assert_all_free(engine)
    assert (engine.log.column("num_tokens") <= options.max_num_batched_tokens).all()
    assert (engine.log.column("num_reqs") <= options.max_num_seqs).all()
    utilization = engine.log.column("utilization")
    assert ((utilization > 0) & (utilization <= 1)).all()


def stats_of(engine):
    return engine.memory.manager.stats()


def test_a_request_takes_its_chunks_then_a_token_a_step():
    engine = run(requests_of((0.0, 20, 4)), max_num_batched_tokens=16)

    assert engine.log.column("num_tokens").tolist() == [16, 4, 1, 1, 1]
    assert engine.tally.num_scheduled_tokens == 20 + 4 - 1  # the last output is sampled, not computed


@pytest.mark.parametrize(("output", "tokens"), [(0, [16, 4]), (1, [16, 4]), (2, [16, 4, 1])])
def test_short_outputs(output, tokens):
    engine = run(requests_of((0.0, 20, output)), max_num_batched_tokens=16)

    assert engine.log.column("num_tokens").tolist() == tokens
    assert engine.tally.num_completed == 1


def test_a_step_may_hold_one_token_and_one_sequence():
    requests = requests_of((0.0, 5, 2), (0.0, 1, 3))
    engine = run(
        requests, max_num_batched_tokens=1, max_num_seqs=1, groups=(1, KVCacheGroupSpec(1, sliding_window=1))
    )

    assert engine.log.column("num_tokens").tolist() == [1] * (6 + 3)
    assert (engine.tally.num_completed, engine.findings.num_mismatches) == (2, 0)


def test_running_sequences_come_first_and_the_rest_of_the_budget_admits():
    engine = run(requests_of((0.0, 10, 3), (0.0, 10, 3), (0.0, 10, 3)), max_num_batched_tokens=16)

    # 10 + 6 | 1 + 4 + 10 | 1 + 1 + 1 (the first is done) | 1 + 1 | 1
    assert engine.log.column("num_tokens").tolist()[:2] == [16, 15]
    assert engine.log.column("num_reqs").tolist()[:2] == [2, 3]
    assert engine.tally.num_scheduled_tokens == 3 * 12


def test_the_oldest_get_tokens_first_when_the_budget_is_short():
    requests = requests_of(*((0.0, 2, 9) for _ in range(4)))
    engine = Engine(requests, options_of(max_num_batched_tokens=3))
    engine.arrivals.update()
    seen = []

    for _ in range(4):
        engine.step()
        seen.append(dict(zip(engine.batch.request.tolist(), engine.batch.computed.tolist(), strict=True)))

    assert seen == [{0: 2, 1: 1}, {0: 3, 1: 2, 2: 1}, {0: 4, 1: 3, 2: 2}, {0: 5, 1: 4, 2: 3}]


def test_the_newest_is_preempted_and_recomputed():
    """Two sequences of 6 blocks in the end, a pool of 9: the second gives way, and comes back."""
    requests = requests_of((0.0, 8, 16), (0.0, 8, 16))

    engine = run(requests, num_blocks=10, watermark=0.0)

    assert stats_of(engine).num_preemptions == 1
    assert engine.tally.num_completed == 2
    assert engine.findings.num_mismatches == 0
    assert stats_of(engine).num_queried_tokens == 16  # counted at first admission alone
    assert engine.tally.num_scheduled_tokens + stats_of(engine).num_rehit_tokens > 2 * 23
    assert_all_free(engine)


def test_what_never_fits_is_rejected_and_the_run_goes_on():
    requests = requests_of((0.0, 30, 11), (0.0, 20, 20), (0.0, 30, 10), (0.0, 1, 1))

    by_length = run(requests, max_model_len=40)
    by_blocks = run(requests, num_blocks=11)  # ten blocks of 4 tokens

    for engine in (by_length, by_blocks):
        assert (engine.tally.num_rejected, engine.tally.num_completed) == (1, 3)
        assert engine.findings.num_mismatches == 0


def test_a_trace_of_which_nothing_fits_takes_no_step():
    engine = run(requests_of((0.0, 30, 1)), max_model_len=8)

    assert (engine.log.num_steps, engine.tally.num_rejected) == (0, 1)


@pytest.mark.parametrize(
    ("arrival", "changes", "hit"),
    [
        (0.3, {}, 512),  # both live
        (500.0, {}, 512),  # the prefix outlives its holder
        (500.0, {"prefix_caching": False}, 0),
        (500.0, {"num_blocks": 180}, 512),
    ],
)
def test_prefixes_survive_their_last_holder(arrival, changes, hit):
    first, second = (0.0, 600, 40, 1, 2), (arrival, 700, 5, 1, 3)
    engine = run(requests_of(first, second), **({"num_blocks": 900, "max_num_batched_tokens": 64} | changes))

    assert stats_of(engine).num_hit_tokens == hit
    assert engine.tally.num_scheduled_tokens == 600 + 39 + 700 + 4 - hit
    assert engine.findings.num_mismatches == 0


def test_a_prefix_whose_blocks_were_handed_out_is_computed_again():
    """A pool of 179 blocks; the one in between takes 175 of them, all that the first left behind."""
    first, between, second = (0.0, 600, 40, 1, 2), (500.0, 690, 11, 5, 6), (900.0, 700, 5, 1, 3)
    engine = run(requests_of(first, between, second), num_blocks=180, max_num_batched_tokens=64)

    assert stats_of(engine).num_hit_tokens < 512
    assert stats_of(engine).pool.num_evictions > 100
    assert engine.findings.num_mismatches == 0


def test_the_trace_clock_waits_and_skips_idle_time():
    requests = requests_of((0.0, 10, 1), (0.0, 10, 1), (60.0, 10, 1))

    engine = run(requests, step_ms=10, token_us=1000)

    np.testing.assert_allclose([0.026, 0.026 + 0.014, 60.02], engine.log.column("time"))


def test_immediate_arrivals_all_wait_from_the_start():
    requests = requests_of((0.0, 4, 1), (60.0, 4, 1))

    engine = run(requests, arrivals="immediate")

    assert engine.log.num_steps == 1
    assert engine.log.column("num_reqs").tolist() == [2]


def test_every_live_position_is_read_when_a_sequence_finishes():
    engine = run(requests_of((0.0, 20, 4)), num_samples=1)

    assert engine.findings.num_verified == 23 + engine.log.num_steps


def test_a_moved_row_is_read_whole():
    """The first sequence ends after its prefill; the second moves into its row, and is read there."""
    engine = run(requests_of((0.0, 8, 1), (0.0, 8, 3)), num_samples=1, compact_every=1)

    moved = 9  # tokens in the cache of the second after the step that committed the move
    assert engine.findings.num_verified == engine.log.num_steps + 8 + moved + 10


def test_verification_can_be_off():
    engine = run(requests_of((0.0, 20, 4)), verify=False)

    assert engine.oracle is None
    assert (engine.findings.num_verified, engine.tally.num_completed) == (0, 1)


def test_every_step_is_one_copy_and_only_changes_travel():
    requests = requests_of(*((0.0, 100, 30) for _ in range(4)))
    engine = run(requests, num_blocks=900, max_model_len=4096)

    assert engine.log.column("h2d_copies").max() == 1
    assert engine.log.column("full_upload_bytes").max() == 4 * 4096 // 4 * 4
    assert engine.log.mean("h2d_bytes") * 10 < engine.log.mean("full_upload_bytes")


def test_utilization_beside_reserving():
    """One sequence of 10 to 13 tokens in blocks of 4, of a model of 64 tokens."""
    engine = run(requests_of((0.0, 10, 4)), max_model_len=64)

    lengths = np.array([10, 11, 12, 13])
    np.testing.assert_allclose(lengths / [12, 12, 12, 16], engine.log.column("utilization"))
    np.testing.assert_allclose(lengths / 64, engine.log.column("utilization_reserved"))
    np.testing.assert_allclose(lengths / 16, engine.log.column("utilization_pow2"))
