"""What would name nobody is refused, and what is not said is what the manager knows."""

import numpy as np
import pytest

from pagedkv import FullAttentionSpec, KVCacheManager, MultiGroupBlockTable
from pagedkv.batch import AdmittedRequests, InputBatch, RunningRequests, SchedulerOutput

from .scenes import assert_unchanged, state_of


def batch_of_one():
    batch = InputBatch(MultiGroupBlockTable([16], 4, 128, 64, backend="numpy"))
    new = AdmittedRequests(["req"], [5], [5], num_blocks=[[1]], block_ids=[3])
    return batch, int(batch.update(SchedulerOutput(new=new))[0])


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (
            lambda _: SchedulerOutput(finished="req"),
            TypeError,
            "finished must be a sequence of ids, got 'req'",
        ),
        (lambda _: SchedulerOutput(finished=None), TypeError, "finished must be a sequence of ids, got None"),
        (lambda _: SchedulerOutput(preempted="req"), TypeError, "preempted must be a sequence of ids"),
        (lambda h: SchedulerOutput(finished=[h]), ValueError, "got the handle of request 'req'"),
        (lambda h: SchedulerOutput(preempted=[np.int64(h)]), ValueError, "preempted must hold ids"),
        (lambda _: SchedulerOutput(new=AdmittedRequests("ab", [1, 1], [1, 1])), TypeError, "req_ids must be"),
        (lambda _: SchedulerOutput(new=None), TypeError, "new must be AdmittedRequests, got NoneType"),
        (lambda h: RunningRequests([h], [1]), TypeError, "must be a SchedulerOutput, got RunningRequests"),
        (lambda _: None, TypeError, "output must be a SchedulerOutput, got NoneType"),
    ],
)
def test_a_step_that_names_nobody(output, error, message):
    batch, handle = batch_of_one()
    before = state_of(batch)

    with pytest.raises(error, match=message):
        batch.update(output(handle))

    assert_unchanged(before, batch)


def test_an_id_that_is_an_int_is_no_handle():
    """Ids may be anything: an unknown int is skipped as any unknown id, a known one ends its request."""
    batch, handle = batch_of_one()
    batch.update(SchedulerOutput(finished=[handle + 1], new=AdmittedRequests([7], [1], [1])))
    assert batch.req_ids == [7]
    batch.update(SchedulerOutput(finished=[7]))
    assert len(batch) == 1


class Managed:
    def __init__(self, max_model_len=128):
        self.manager = KVCacheManager([FullAttentionSpec(16)], 40, max_num_seqs=4, max_model_len=128)
        mirror = {"mirror": self.manager.mirror, "stable_rows": True, "backend": "numpy"}
        self.table = MultiGroupBlockTable(self.manager.table_groups, 4, max_model_len, 64, **mirror)

    def start_hitting(self, batch):
        """A request that runs, and a handle whose first 32 tokens are in the cache."""
        manager = self.manager
        first = manager.add(range(40))
        manager.allocate_slots([first], [40])
        batch.update(SchedulerOutput(new=AdmittedRequests(["a"], [40], [40], handles=[first])))
        manager.commit([first], [40])
        second = manager.add(range(40))
        manager.match_prefix(second)
        manager.allocate_slots([second], [8])
        return second


def test_what_a_manager_has_in_its_cache_is_what_is_computed():
    """Left out, it would be 0: the step would write into blocks that another request holds."""
    managed = Managed()
    batch = InputBatch(managed.table, managed.manager)
    second = managed.start_hitting(batch)

    batch.update(SchedulerOutput(new=AdmittedRequests(["b"], [40], [8], handles=[second]), finished=["a"]))
    metadata = batch.commit()

    assert metadata.batch.positions.tolist() == list(range(32, 40))
    assert metadata.batch.num_computed_tokens_cpu.tolist() == [32]
    managed.manager.preempt([second])
    batch.update(SchedulerOutput(preempted=["b"]))
    managed.manager.match_prefix(second)
    managed.manager.allocate_slots([second], [8])
    batch.update(SchedulerOutput(resumed=AdmittedRequests(["b"], [40], [8])))
    assert (
        batch.num_computed_tokens.tolist() == managed.manager.num_computed_tokens([second]).tolist() == [32]
    )


def test_a_table_that_is_shorter_than_its_manager():
    managed = Managed(max_model_len=100)  # as many columns: the mirror fits

    with pytest.raises(ValueError, match="at least the manager's max_model_len 128, got 100"):
        InputBatch(managed.table, managed.manager)
