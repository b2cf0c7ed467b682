"""Kept views: made once for the sizes that come again, and few for those that do not."""

import numpy as np
import pytest

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.batch.step_metadata import step_metadata
from pagedkv.tables.kept import keep

from .models import to_numpy

MOST = 40
ASKS = {
    "block_table": lambda step: step.block_table(1),
    "kernel_block_table": lambda step: step.kernel_block_table(0),
    "slot_mapping": lambda step: step.slot_mapping(1),
    "local_seq_lens": lambda step: step.local_seq_lens(1),
    "query_start_loc": lambda step: step.query_start_loc,
    "seq_lens": lambda step: step.seq_lens,
    "positions": lambda step: step.positions,
    "token_to_req_indices": lambda step: step.token_to_req_indices,
    "state_indices": lambda step: step.state_indices(2),
    "initial_state_indices": lambda step: step.initial_state_indices(2),
    "state_columns": lambda step: step.state_columns(2),
}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr("pagedkv.tables.kept._MOST_KEPT", MOST)


def step_of_groups(backend, stable_rows=False):
    """A step over 64 rows and 200 tokens, of a group with views, one without and one of states."""
    groups = [KVCacheGroupSpec(4, (2,)), 8, KVCacheGroupSpec(8, state_mode="align")]
    table = MultiGroupBlockTable(groups, 64, 256, 256, stable_rows=stable_rows, backend=backend)
    table.add_row(([5, 7], [3], [9]), 0)
    rows = {"rows": [0]} if stable_rows else {}
    sizes = {"num_reqs_padded": 64, "num_tokens_padded": 200}
    return table, table.commit(1, [0, 3], [1], **rows, **sizes)


def num_kept(step):
    outputs = step.outputs
    return max(map(len, (outputs.kept, outputs.shown._cached, outputs.states._cached)))


@pytest.mark.parametrize("stable_rows", [False, True], ids=["batch order", "stable rows"])
@pytest.mark.parametrize("name", ASKS)
def test_steps_of_ever_new_sizes_leave_few_views(backend, few, name, stable_rows):
    _, step = step_of_groups(backend, stable_rows)
    ask, largest = ASKS[name], 0
    whole = to_numpy(ask(step)).copy()
    for n in range(1, 64):
        view = to_numpy(ask(step.resized(n, 3 * n)))
        np.testing.assert_array_equal(whole[tuple(map(slice, view.shape))], view)
        largest = max(largest, num_kept(step))
    assert largest == MOST, "no more than that, and not fewer either"


def test_what_is_made_of_a_steps_views_goes_with_them(backend, few):
    """Their metadata would hold them otherwise: 200 steps of one size more leave but a few behind."""
    table, _ = step_of_groups(backend)
    outputs = table._committer.outputs[0]
    for n in range(1, 200):
        metadata = step_metadata(table.commit(1, [0, n], [0]), [0, n], [0])
        assert to_numpy(metadata.batch.positions).tolist() == list(range(n))
        assert (1, n) in outputs.kept
        assert len(outputs.kept) <= MOST


def test_sizes_that_come_again_are_not_made_anew(backend, few):
    _, step = step_of_groups(backend)
    sizes = [step.resized(n, 2 * n) for n in (1, 2)]
    first = [[ask(one) for ask in ASKS.values()] for one in sizes]
    for views, one in zip(first, sizes, strict=True):
        assert all(ask(one) is view for ask, view in zip(ASKS.values(), views, strict=True))


def test_the_last_one_is_kept_when_all_others_go(monkeypatch):
    monkeypatch.setattr("pagedkv.tables.kept._MOST_KEPT", 2)
    kept = {}
    for key in ((1,), (2,)):
        assert keep(kept, key, str(key)) == str(key)
    assert list(kept) == [(1,), (2,)]
    keep(kept, (3,), "3")
    assert kept == {(3,): "3"}
