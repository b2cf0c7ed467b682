"""Per-step values: means, quantiles and phases."""

import numpy as np

from pagedkv.replay.step_log import PHASES, StepLog

NAMES = ("num_reqs", "num_tokens", "utilization_reserved", "utilization_pow2", "h2d_copies", "h2d_bytes")


def recorded(count):
    log = StepLog()
    for step in range(count):
        log.start()
        log.lap("commit")
        log.record(time=step, utilization=step / 10, full_upload_bytes=0, **dict.fromkeys(NAMES, 1))
    return log


def test_values_are_kept_past_the_first_allocation():
    log = recorded(3000)

    np.testing.assert_array_equal(np.arange(3000), log.column("time"))
    assert log.mean("utilization") == np.mean(np.arange(3000) / 10)


def test_an_empty_log_has_means_of_zero():
    log = StepLog()

    assert log.mean("utilization") == 0
    assert set(log.host_us()) == {*PHASES, "total"}
    assert log.host_us()["total"]["p99"] == 0


def test_laps_add_up_to_the_total():
    log = StepLog()
    log.start()
    for phase in ("schedule", "commit", "schedule"):
        log.lap(phase)
    log.record(time=0, utilization=0, full_upload_bytes=0, **dict.fromkeys(NAMES, 1))

    us = log.host_us()
    assert us["commit"]["p50"] >= 0
    assert us["verify"]["p50"] == 0
    np.testing.assert_allclose(us["total"]["mean"], sum(us[phase]["mean"] for phase in PHASES), atol=0.05)
