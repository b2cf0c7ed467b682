"""Inputs on the device: read when the step runs, not when it is committed; and garbage in them.

That they give what host arrays give is tested with the tables (tests/tables/test_device_inputs.py).
"""

import numpy as np
import pytest

from .pairs import Decoding, Keeper, assert_same, values_of

pytestmark = pytest.mark.gpu

NO_INT = np.iinfo(np.int32)
MODES = pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])


@MODES
def test_a_correction_on_the_device_reaches_the_step_behind_it(gpu_backend, cupy, stall, stream, stable_rows):
    """The host commits what it scheduled; how many tokens were rejected is known on the device alone."""
    pair = Decoding(gpu_backend, stable_rows=stable_rows)
    rows = {"rows": np.arange(8, dtype=np.int32)[::-1].copy()} if stable_rows else {}
    scheduled = {"starts": np.arange(0, 36, 4, dtype=np.int32), "computed": np.full(8, 5, np.int32)}
    rejected = {"starts": np.array([0, 0, 1, 3, 3, 3, 6, 7, 9], np.int32), "computed": np.arange(8) % 4}
    corrected = {name: (array - rejected[name]).astype(np.int32) for name, array in scheduled.items()}
    padding = {"num_reqs_padded": 8, "num_tokens_padded": 40}
    device = {name: cupy.asarray(array) for name, array in scheduled.items()}
    less = {name: cupy.asarray(array.astype(np.int32)) for name, array in rejected.items()}
    cupy.cuda.runtime.deviceSynchronize()

    def commit():
        return pair.device.commit(8, device["starts"], device["computed"], **rows, **padding, stream=stream)

    def subtract(sign):
        with stream:
            for name, array in device.items():
                cupy.add(array, sign * less[name], out=array)

    for _ in range(4):  # graphs, views and CuPy's own kernels are made ahead
        subtract(-1)
        step = commit()
        subtract(+1)
    keeper = Keeper(step, pair.device)
    for sign in (-1, +1):
        stalled = stall(stream)
        if sign == -1:
            subtract(sign)
        step = commit()
        assert step.num_tokens is None, "only the device knows"
        keeper.keep(step, pair.device, stream)
        if sign == +1:
            subtract(sign)  # a change behind the step comes too late for it
        stalled.release()
        stream.synchronize()
        host = pair.host.commit(8, corrected["starts"], corrected["computed"], **rows, **padding)
        assert_same(values_of(host, pair.host), keeper.values(), f"the step before {sign:+d}")


GARBAGE = {
    "starts": [NO_INT.min, -1, 0, 1, 7, 63, 64, 65, 1000, NO_INT.max],
    "computed": [NO_INT.min, NO_INT.min + 1, -1, 0, 3, 8191, 8192, NO_INT.max - 1, NO_INT.max],
    "positions": [-(2**63), -(2**40), -1, 0, 3, 15, 8191, 8192, 2**31, 2**40, 2**63 - 1],
}


@MODES
@pytest.mark.parametrize("with_positions", [False, True], ids=["formed", "given"])
def test_garbage_on_the_device_maps_into_live_blocks_or_nowhere(
    gpu_backend, cupy, stream, stable_rows, with_positions
):
    pair, rng = Decoding(gpu_backend, stable_rows=stable_rows), np.random.default_rng(3)
    pair.do("outputs", 2)
    rows = {"rows": np.arange(8, dtype=np.int32)} if stable_rows else {}
    pair.step(stream, out=1)
    _, of_other = pair.step(stream, out=1)
    stream.synchronize()
    kept = {k: v for k, v in values_of(of_other, pair.device).items() if stable_rows or "table" not in k}
    sizes = {"starts": 9, "computed": 8, "positions": 64}
    dtypes = {"starts": np.int32, "computed": np.int32, "positions": np.int64}
    device = {name: cupy.zeros(size, dtypes[name]) for name, size in sizes.items()}
    cupy.cuda.runtime.deviceSynchronize()
    for draw in range(40):
        for name, size in sizes.items():
            device[name].set(rng.choice(np.array(GARBAGE[name], dtypes[name]), size), stream=stream)
        positions = {"positions": device["positions"]} if with_positions else {}
        step = pair.device.commit(
            8, device["starts"], device["computed"], **positions, **rows, num_tokens_padded=64, stream=stream
        )
        stream.synchronize()
        for group, size in enumerate((4, 8)):
            slots = step.slot_mapping(group).get()
            live = {-1, *pair.host.mirror.block_table(group).ravel().tolist()} - {0}
            blocks = np.where(slots < 0, slots, slots // size)
            assert set(blocks.tolist()) <= live, f"draw {draw}, group {group}: {slots}"
            tables = pair.device[group].get_device_tensor(8).get()
            np.testing.assert_array_equal(pair.host.mirror.block_table(group), tables)
    after = values_of(of_other, pair.device)
    assert_same(kept, {name: after[name] for name in kept}, "the other output set")
    for _ in range(2):
        expected, step = pair.step(stream)
        stream.synchronize()
        assert_same(expected, values_of(step, pair.device), "the next ordinary step")
