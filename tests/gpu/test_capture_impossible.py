"""Where no graph can be captured, steps go the plain way and are as right."""

import numpy as np
import pytest

from pagedkv import MultiGroupBlockTable

pytestmark = pytest.mark.gpu


def test_steps_go_the_plain_way(gpu_backend, monkeypatch):
    table = MultiGroupBlockTable([4], 2, 32, 16, backend=gpu_backend)

    def refuse(_run):
        raise RuntimeError("no capture here")

    monkeypatch.setattr(table._committer.backend, "capture", refuse)
    table.add_row([[5, 7]], 0)
    with pytest.warns(UserWarning, match="no capture here"):
        first = table.commit(1, np.array([0, 3], np.int32), np.array([3], np.int32))
    assert first.slot_mapping(0).get().tolist() == [23, 28, 29]

    table.append_row([[2]], 0)
    second = table.commit(1, np.array([0, 2], np.int32), np.array([7], np.int32))

    assert second.slot_mapping(0).get().tolist() == [31, 8]
