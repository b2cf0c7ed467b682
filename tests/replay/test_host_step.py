"""Device arrays are copied to the host once a step; host arrays are passed on."""

from types import SimpleNamespace

import numpy as np

from pagedkv.replay.host_step import HostStep


class DeviceArray:
    """An array that only `get` brings to the host, as CuPy's does."""

    num_copies = 0

    def __init__(self, values):
        self._values = np.array(values)

    def get(self):
        DeviceArray.num_copies += 1
        return self._values


def step_of(array):
    return SimpleNamespace(
        block_table=lambda group: array([[10 * group]]),
        kernel_block_table=lambda group, view: array([[10 * group + view]]),
        slot_mapping=lambda group: array([group]),
        seq_lens=array([7]),
        positions=array([8]),
    )


def test_device_arrays_are_copied_once():
    DeviceArray.num_copies = 0
    step = HostStep(step_of(DeviceArray))

    for _ in range(3):
        assert [step.block_table(g).tolist() for g in (0, 1)] == [[[0]], [[10]]]
        assert step.kernel_block_table(1, 2).tolist() == [[12]]
        assert step.slot_mapping(1).tolist() == [1]

    assert DeviceArray.num_copies == 4
    assert (step.seq_lens.tolist(), step.positions.tolist()) == ([7], [8])


def test_host_arrays_are_the_steps_own():
    table = np.zeros((1, 1), np.int32)

    assert HostStep(step_of(lambda _: table)).block_table(0) is table
