"""Places stay dense: the last moves into the lowest hole, and nothing about a sequence changes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.replay.batch import RunningBatch


def test_the_last_place_moves_into_the_lowest_hole():
    batch = RunningBatch(5)
    for request in (8, 7, 6, 5, 4):
        batch.add(request, 0, 10, 20, 3)

    batch.row[:] = [5, 9, 6, 8, 7]

    batch.remove(np.array([3, 0]))

    assert batch.request.tolist() == [4, 7, 6]
    assert batch.row.tolist() == [7, 9, 6]
    assert batch.newest() == 0
    assert batch.oldest_first().tolist() == [1, 2, 0]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_sequences_keep_their_state_through_any_removals(data):
    batch, model = RunningBatch(6), {}
    for request in range(40):
        if len(model) == 6 or (model and data.draw(st.booleans())):
            rows = data.draw(st.lists(st.sampled_from(range(len(model))), unique=True, min_size=1))
            gone = batch.request[rows].tolist()
            batch.remove(np.array(rows))
            model = {key: value for key, value in model.items() if key not in gone}
        model[request] = data.draw(st.integers(0, 99))
        batch.add(request, model[request], model[request] + 1, 200, 1)

        assert model == dict(zip(batch.request.tolist(), batch.computed.tolist(), strict=True))
        assert sorted(model) == batch.request[batch.oldest_first()].tolist()
        assert max(model) == batch.request[batch.newest()]


def test_moves_and_places_are_remembered_until_the_commit():
    batch = RunningBatch(3)
    for request in range(3):
        batch.add(request, 0, 10, 20, 3)
    batch.mark_committed()

    batch.remove(np.array([0]))
    batch.moved[0] = 1

    assert (batch.moved.tolist(), batch.committed_place.tolist()) == ([1, 0], [2, 1])
    batch.mark_committed()
    assert (batch.moved.tolist(), batch.committed_place.tolist()) == ([0, 0], [0, 1])
