"""step_metadata: what it takes and what it refuses."""

import pytest

from pagedkv import MultiGroupBlockTable
from pagedkv.batch.step_metadata import step_metadata
from pagedkv.constants import MAX_INT32
from tests.tables.models import to_numpy

from .drawn import one_step


def test_a_longer_sequence_can_be_promised_and_no_shorter_one(backend):
    drawn = one_step()
    step = drawn.commit(backend)
    arrays = (step, drawn.starts, drawn.computed)

    assert step_metadata(*arrays, max_seq_len=64).batch.max_seq_len == 64
    assert step_metadata(*arrays, max_seq_len=10).batch.max_seq_len == 10
    assert step_metadata(*arrays, max_seq_len=64).unpadded()[0].max_seq_len == 64
    with pytest.raises(ValueError, match=r"max_seq_len must lie in \[10, "):
        step_metadata(*arrays, max_seq_len=9)  # in the words of InputBatch.commit


def test_nothing_is_prefilling_without_prompts(backend):
    drawn = one_step()

    metadata = step_metadata(drawn.commit(backend), drawn.starts, drawn.computed, causal=False)

    assert metadata.batch.is_prefilling.tolist() == [False] * 4
    assert not metadata.batch.causal


def test_a_step_of_nothing(backend):
    table = MultiGroupBlockTable([], 2, 64, 8, backend=backend)

    metadata = step_metadata(table.commit(0, [0], []), [0], [])

    assert len(metadata) == 0
    assert metadata.batch.query_start_loc_cpu.tolist() == [0]
    assert (metadata.batch.max_query_len, metadata.batch.max_seq_len) == (0, 0)
    assert to_numpy(metadata.batch.positions).tolist() == []


def test_a_group_without_states_has_no_state_indices(backend):
    group = one_step().metadata(backend)[0]

    for name in ("state_indices", "initial_state_indices", "state_columns"):
        with pytest.raises(ValueError, match="group must hold recurrent states"):
            getattr(group, name)()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_start_loc": [0, 1, 5]}, ValueError, r"must have shape \[num_reqs \+ 1\] = \[4\]"),
        ({"query_start_loc": [1, 1, 5, 7]}, ValueError, "must start with 0, got 1"),
        ({"query_start_loc": [0, 5, 4, 7]}, ValueError, "must not decrease, got 4 at 2"),
        ({"query_start_loc": [0, 1, 5, 6]}, ValueError, "must end with the step's 7 tokens, got 6"),
        ({"query_start_loc": [0.0, 1, 5, 7]}, TypeError, "query_start_loc must hold integers"),
        ({"num_computed_tokens": [9, 0]}, ValueError, r"must have shape \[num_reqs\] = \[3\]"),
        ({"num_computed_tokens": [9, -1, 5]}, ValueError, r"num_computed_tokens must lie in \[0, "),
        ({"num_computed_tokens": [9, MAX_INT32 - 3, 5]}, ValueError, "at most 2147483647, got 21474836"),
        ({"num_prefill_tokens": [1]}, ValueError, "num_prefill_tokens must have shape"),
        ({"max_seq_len": 20.5}, TypeError, "max_seq_len must be an int"),
    ],
)  # fmt: skip
def test_arrays_that_are_not_the_steps_are_refused(backend, change, error, message):
    drawn = one_step()
    arguments = {"query_start_loc": drawn.starts, "num_computed_tokens": drawn.computed} | change

    with pytest.raises(error, match=message):
        step_metadata(drawn.commit(backend), **arguments)


def test_the_longest_sequence_of_int32_is_taken(backend):
    drawn = one_step()

    metadata = step_metadata(drawn.commit(backend), drawn.starts, [9, MAX_INT32 - 4, 5])

    assert metadata.batch.seq_lens_cpu_upper_bound.tolist() == [10, MAX_INT32, 7, 0]
    bound = metadata[0].dcp_local_seq_lens_cpu_upper_bound()
    assert bound.tolist() == [4, 2**30 - 1, 3, 0]


@pytest.mark.parametrize("name", ["query_start_loc", "num_computed_tokens", "num_prefill_tokens"])
def test_arrays_on_the_device_are_refused_as_nothing_is_waited_for(backend, name):
    class OnDevice:
        __cuda_array_interface__ = {}

    drawn = one_step()
    arguments = {"query_start_loc": drawn.starts, "num_computed_tokens": drawn.computed, name: OnDevice()}

    with pytest.raises(TypeError, match=rf"{name} must lie on the host, got OnDevice"):
        step_metadata(drawn.commit(backend), **arguments)
