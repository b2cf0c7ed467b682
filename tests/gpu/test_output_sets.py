"""Output sets: steps in flight on one stalled stream do not overwrite each other's arrays."""

import numpy as np
import pytest

from .pairs import Decoding, assert_same, values_of

pytestmark = pytest.mark.gpu


def test_micro_batches_in_flight_keep_their_own_arrays(gpu_backend, stall, stream):
    """Three micro-batches of a table with stable rows, committed before any of them runs."""
    pair = Decoding(gpu_backend, stable_rows=True, staging_depth=3)
    pair.do("outputs", 3)
    batches = [np.array(rows, np.int32) for rows in ([4, 1, 7], [0, 2], [3, -1, 6, 5])]

    def commit(shift):
        given = []
        for out, rows in enumerate(batches):
            pair.do("append_row", ([40 + out + shift], [60 + out + shift]), int(rows[0]))
            starts = np.arange(0, 2 * len(rows) + 1, 2, dtype=np.int32)
            computed = np.full(len(rows), shift + out, np.int32)
            given.append(
                pair.commit(
                    len(rows), starts, computed, rows=rows, num_tokens_padded=16, out=out, stream=stream
                )
            )
        return given

    for shift in range(4):
        commit(shift)
    stream.synchronize()
    stalled = stall(stream)
    steps = commit(8)
    assert not any(step.ready.done for _, step in steps), "all three are in flight"
    stalled.release()
    stream.synchronize()
    for out, (expected, step) in enumerate(steps):
        assert_same(expected, values_of(step, pair.device), f"micro-batch {out}")


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
def test_draft_steps_leave_the_target_steps_arrays_alone(gpu_backend, stall, stream, stable_rows):
    """A target step over four tokens a request, then two draft steps of one token each, all in flight."""
    pair = Decoding(gpu_backend, stable_rows=stable_rows, staging_depth=3)
    pair.do("outputs", 3)
    rows = {"rows": np.arange(8, dtype=np.int32)} if stable_rows else {}

    def commit(computed):
        given = []
        for out, length in enumerate((4, 1, 1)):
            starts = np.arange(0, 8 * length + 1, length, dtype=np.int32)
            at = np.full(8, computed + 4 * (out > 0) + (out == 2), np.int32)
            given.append(pair.commit(8, starts, at, **rows, out=out, stream=stream))
        return given

    for computed in range(4):
        commit(computed)
    stream.synchronize()
    stalled = stall(stream)
    steps = commit(3)
    stalled.release()
    stream.synchronize()
    for out, (expected, step) in enumerate(steps):
        assert_same(expected, values_of(step, pair.device), f"output set {out}")
