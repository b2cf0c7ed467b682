"""Step metadata: every field against brute force, host arrays that stay, and what padding leaves behind."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from pagedkv import ContextParallel, KVCacheGroupSpec
from pagedkv.batch import MicroBatches
from pagedkv.batch.batch_metadata import BatchMetadata
from pagedkv.batch.metadata import CommonAttentionMetadata, StepMetadata
from pagedkv.batch.step_metadata import step_metadata
from pagedkv.tables.step import Step
from tests.tables.models import expand, table_of, to_numpy

from .drawn import one_step, steps

FIELDS = [field.name for field in dataclasses.fields(BatchMetadata)]
ON_HOST = ("query_start_loc_cpu", "seq_lens_cpu_upper_bound", "num_computed_tokens_cpu", "is_prefilling")


def expected_batch(drawn, num_reqs, num_tokens):
    """The fields of a step that is handed out with so many requests and tokens."""
    more_reqs, more_tokens = num_reqs - drawn.num_reqs, num_tokens - drawn.num_tokens
    starts = [*drawn.starts.tolist(), *[drawn.num_tokens] * more_reqs]
    seq_lens = drawn.seq_lens + [0] * more_reqs
    prefilling = [c < p for c, p in zip(drawn.computed, drawn.prompts, strict=True)]
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": seq_lens,
        "seq_lens_cpu_upper_bound": seq_lens,
        "num_computed_tokens_cpu": drawn.computed + [0] * more_reqs,
        "positions": [token[1] for token in drawn.tokens] + [0] * more_tokens,
        "token_to_req_indices": [token[0] for token in drawn.tokens] + [0] * more_tokens,
        "is_prefilling": prefilling + [False] * more_reqs,
        "num_reqs": num_reqs,
        "num_actual_tokens": num_tokens,
        "num_reqs_unpadded": drawn.num_reqs,
        "num_tokens_unpadded": drawn.num_tokens,
        "max_query_len": max(drawn.lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "causal": True,
        "ubatch": 0,
    }


def assert_is(metadata, drawn, num_reqs, num_tokens):
    """Every field of the batch and of each group, with its type."""
    expected = expected_batch(drawn, num_reqs, num_tokens)
    assert list(expected) == FIELDS
    for name, value in expected.items():
        actual = getattr(metadata.batch, name)
        if isinstance(value, list):
            assert to_numpy(actual).tolist() == value, name
        else:
            assert actual == value, name
            assert type(actual) is type(value), name
    assert {str(getattr(metadata.batch, name).dtype) for name in ON_HOST} == {"int32", "bool"}
    assert len(metadata) == len(drawn.specs)
    for g, (group, spec) in enumerate(zip(metadata, drawn.specs, strict=True)):
        assert metadata[g] is group
        assert (group.group, group.spec, group.batch) == (g, spec, metadata.batch)
        table = table_of(drawn.ids[g] + [[]] * (num_reqs - drawn.num_reqs), drawn.table.mirror.widths[g])
        np.testing.assert_array_equal(table, to_numpy(group.block_table_tensor))
        slots = [token[2 + g] for token in drawn.tokens] + [-1] * (num_tokens - drawn.num_tokens)
        assert to_numpy(group.slot_mapping).tolist() == slots
        local = [drawn.local_length(g, length) for length in expected["seq_lens"]]
        assert to_numpy(group.dcp_local_seq_lens).tolist() == local
        bound = group.dcp_local_seq_lens_cpu_upper_bound()
        assert (bound.tolist(), bound.dtype) == (local, np.int32)
        for v, (ratio, stride) in enumerate(spec.views()):
            np.testing.assert_array_equal(expand(table, ratio, stride), to_numpy(group.kernel_block_table(v)))
        if spec.state_mode is not None:
            for name in ("state_indices", "initial_state_indices", "state_columns"):
                of_step = to_numpy(getattr(metadata.step, name)(g))
                np.testing.assert_array_equal(of_step, to_numpy(getattr(group, name)()))
                assert num_reqs in of_step.shape


@settings(max_examples=80, deadline=None)
@given(drawn=steps())
def test_every_field_is_what_the_step_holds_and_unpadded_loses_none(backend, drawn):
    metadata = drawn.metadata(backend)

    more_reqs, more_tokens = drawn.padding
    assert_is(metadata, drawn, drawn.num_reqs + more_reqs, drawn.num_tokens + more_tokens)
    assert_is(metadata.unpadded(), drawn, drawn.num_reqs, drawn.num_tokens)
    assert_is(metadata.unpadded().unpadded(), drawn, drawn.num_reqs, drawn.num_tokens)


def test_a_step_without_padding_is_its_own_unpadded(backend):
    metadata = one_step(padding=(0, 0)).metadata(backend)

    assert metadata.unpadded() is metadata


def test_unpadded_arrays_are_slices_at_the_same_addresses(backend):
    metadata = one_step().metadata(backend)
    whole = metadata.unpadded()

    for name in ("query_start_loc", "seq_lens", "positions", "token_to_req_indices"):
        assert address(getattr(whole.batch, name)) == address(getattr(metadata.batch, name)), name
    for group, padded in zip(whole, metadata, strict=True):
        assert address(group.block_table_tensor) == address(padded.block_table_tensor)
        assert address(group.slot_mapping) == address(padded.slot_mapping)
        assert address(group.dcp_local_seq_lens) == address(padded.dcp_local_seq_lens)


def address(array):
    return array.data.ptr if hasattr(array, "get") else array.__array_interface__["data"][0]


def test_where_only_the_device_knows_the_tokens_the_hosts_count_is_cut_to(backend):
    """8 tokens at most of a device array, 5 as the host counts them."""
    drawn = one_step(lens=[1, 4, 0])
    committed = drawn.commit(backend)
    step = Step(committed.outputs, committed.ready, 3, 4, -8 - 1, -1)
    assert (step.num_tokens, step.num_tokens_padded) == (None, 8)

    metadata = step_metadata(step, drawn.starts, drawn.computed, num_prefill_tokens=drawn.prompts)

    assert_is(metadata, drawn, 4, 8)
    assert_is(metadata.unpadded(), drawn, 3, 5)
    with pytest.raises(ValueError, match="must end with at most 8 tokens, got 9"):
        step_metadata(step, [0, 1, 5, 9], drawn.computed)


class TestHostArrays:
    def test_they_stay_true_after_ten_more_steps_and_whatever_the_caller_writes(self, backend):
        drawn = one_step()
        starts, computed = drawn.starts, np.array(drawn.computed, np.int32)
        prompts = np.array(drawn.prompts, np.int32)
        first = step_metadata(drawn.commit(backend), starts, computed, num_prefill_tokens=prompts)
        expected = expected_batch(drawn, 4, 10)
        unpadded = first.unpadded()

        starts[:], computed[:], prompts[:] = 77, 88, 99
        for i in range(10):
            arrays = [0, i, 2 * i, 3 * i], [3 * i, i, 0]
            step = drawn.table.commit(3, *arrays, num_reqs_padded=4, num_tokens_padded=30)
            step_metadata(step, *arrays, num_prefill_tokens=[9, 9, 0]).unpadded()

        for name in ON_HOST:
            assert getattr(first.batch, name).tolist() == expected[name], name
            size = 4 if name == "query_start_loc_cpu" else 3
            assert getattr(unpadded.batch, name).tolist() == expected[name][:size], name

    @pytest.mark.parametrize("name", ON_HOST)
    def test_they_cannot_be_written_to(self, backend, name):
        metadata = one_step().metadata(backend)

        for batch in (metadata.batch, metadata.unpadded().batch):
            with pytest.raises(ValueError, match="read-only"):
                getattr(batch, name)[0] = 5
            assert not getattr(batch, name).flags.writeable

    def test_two_steps_share_none(self, backend):
        drawn = one_step()
        first, second = drawn.metadata(backend), drawn.metadata(backend)

        for name in ON_HOST:
            assert not np.shares_memory(getattr(first.batch, name), getattr(second.batch, name)), name

    def test_of_keeps_the_arrays_that_it_is_given(self, backend):
        """InputBatch hands over fresh ones, and no copy is made of them."""
        host, is_prefilling = np.arange(15, dtype=np.int32).reshape(3, 5), np.zeros(4, np.bool_)

        batch = StepMetadata.of(one_step().commit(backend), host, is_prefilling, 4, 60, False).batch

        assert batch.query_start_loc_cpu.tolist() == [0, 1, 2, 3, 4]
        assert batch.seq_lens_cpu_upper_bound.tolist() == [5, 6, 7, 8]
        assert batch.num_computed_tokens_cpu.tolist() == [10, 11, 12, 13]
        assert batch.is_prefilling is is_prefilling
        assert (batch.max_query_len, batch.max_seq_len, batch.causal) == (4, 60, False)
        assert np.shares_memory(host, batch.seq_lens_cpu_upper_bound)
        assert not host.flags.writeable


class TestViews:
    def test_the_device_arrays_are_the_steps_own_and_made_once(self, backend):
        drawn = one_step()
        first = drawn.metadata(backend)
        step = drawn.table.commit(3, drawn.starts, drawn.computed, num_reqs_padded=4, num_tokens_padded=10)
        second = step_metadata(step, drawn.starts, drawn.computed)

        for name in ("query_start_loc", "seq_lens", "positions", "token_to_req_indices"):
            assert getattr(first.batch, name) is getattr(step, name), name
            assert getattr(second.batch, name) is getattr(step, name), name
        for g in range(2):
            assert first[g].block_table_tensor is second[g].block_table_tensor is step.block_table(g)
            assert first[g].slot_mapping is second[g].slot_mapping is step.slot_mapping(g)
            assert first[g].dcp_local_seq_lens is second[g].dcp_local_seq_lens is step.local_seq_lens(g)

    def test_each_output_set_has_its_own(self, backend):
        drawn = one_step()
        steps = [drawn.commit(backend, out=1)]
        steps.append(
            drawn.table.commit(3, drawn.starts, drawn.computed, num_reqs_padded=4, num_tokens_padded=10)
        )

        first, second = (step_metadata(step, drawn.starts, drawn.computed) for step in steps)

        assert address(first.batch.seq_lens) != address(second.batch.seq_lens)
        assert address(first[0].slot_mapping) != address(second[0].slot_mapping)

    def test_no_more_sizes_are_kept_than_a_limit(self, backend, monkeypatch):
        monkeypatch.setattr("pagedkv.tables.kept._MOST_KEPT", 3)
        drawn = one_step()
        drawn.commit(backend)
        for n in range(1, 12):
            metadata = step_metadata(drawn.table.commit(1, [0, n], [0]), [0, n], [0])
            assert to_numpy(metadata.batch.positions).tolist() == list(range(n))
            assert len(metadata.step.outputs.kept) <= 3


class TestClasses:
    @pytest.mark.parametrize("name", FIELDS)
    def test_a_group_forwards_every_field_of_its_batch_to_read(self, backend, name):
        metadata = one_step().metadata(backend)

        assert getattr(metadata[1], name) is getattr(metadata.batch, name)
        with pytest.raises((AttributeError, TypeError)):  # TypeError: a flaw of dataclasses up to Python 3.12
            setattr(metadata[1], name, 1)

    def test_all_are_frozen(self, backend):
        metadata = one_step().metadata(backend)

        for thing, cls in (
            (metadata, StepMetadata),
            (metadata.batch, BatchMetadata),
            (metadata[0], CommonAttentionMetadata),
        ):
            assert type(thing) is cls
            for field in dataclasses.fields(thing):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(thing, field.name, 1)
            assert not hasattr(thing, "__dict__")

    def test_replace_makes_a_changed_copy_of_each(self, backend):
        metadata = one_step().metadata(backend)

        batch = dataclasses.replace(metadata.batch, max_seq_len=400, causal=False)
        group = dataclasses.replace(metadata[1], batch=batch, block_table_tensor="mapped")
        step = dataclasses.replace(metadata, batch=batch, groups=(group,))

        assert (group.max_seq_len, group.causal, group.block_table_tensor) == (400, False, "mapped")
        assert group.slot_mapping is metadata[1].slot_mapping
        assert (metadata.batch.max_seq_len, metadata[1].causal) == (10, True)
        assert (len(step), step[0]) == (1, group)
        assert group.kernel_block_table is not None
        for name in set(FIELDS) - {"max_seq_len", "causal"}:
            assert getattr(batch, name) is getattr(metadata.batch, name)

    def test_a_changed_batch_is_that_of_every_group(self, backend):
        metadata = one_step().metadata(backend)

        changed = metadata.with_batch(causal=False, max_seq_len=400)

        assert [group.batch for group in changed] == [changed.batch] * 2
        assert [(group.causal, group.max_seq_len) for group in changed] == [(False, 400)] * 2
        assert [type(thing) for thing in (changed, changed.batch, changed[1])] == [
            StepMetadata,
            BatchMetadata,
            CommonAttentionMetadata,
        ]
        for name in set(FIELDS) - {"max_seq_len", "causal"}:
            assert getattr(changed[0], name) is getattr(metadata.batch, name)
        for new, old in zip(changed, metadata, strict=True):
            for field in dataclasses.fields(new):
                assert field.name == "batch" or getattr(new, field.name) is getattr(old, field.name)
        assert changed.step is metadata.step
        assert (metadata.batch.causal, metadata[0].causal, metadata.batch.max_seq_len) == (True, True, 10)
        assert not changed.unpadded()[1].causal

    def test_a_batch_is_changed_where_there_are_no_groups(self, backend):
        assert not one_step(specs=[], ids=[]).metadata(backend).with_batch(causal=False).batch.causal

    def test_a_field_that_is_none_of_a_batch(self, backend):
        with pytest.raises(TypeError, match="slot_mapping"):
            one_step().metadata(backend).with_batch(slot_mapping=1)

    def test_cross_attention_is_never_causal(self, backend):
        """The encoder's tokens come before all of the decoder's."""
        specs = [KVCacheGroupSpec(4), KVCacheGroupSpec(4, max_num_encoder_tokens=16)]
        drawn = one_step(specs=specs, world=ContextParallel())
        metadata = drawn.metadata(backend)

        for step in (metadata, metadata.unpadded(), *metadata.split([4], MicroBatches(drawn.table))):
            assert (step.batch.causal, step[0].causal, step[1].causal) == (True, True, False)
        assert [group.causal for group in metadata.with_batch(causal=False)] == [False, False]

    def test_their_text_shows_no_array(self, backend):
        """To show one that lies on the device, the host would wait for it."""
        metadata = one_step().metadata(backend)

        for thing in (metadata, metadata.batch, metadata[0]):
            assert "num_reqs=3 of 4, num_tokens=7 of 10" in repr(thing)
            assert "array" not in repr(thing)


@settings(max_examples=60, deadline=None)
@given(drawn=steps(worlds=(2, 3)))
def test_local_lengths_bound_those_of_shorter_sequences(backend, drawn):
    """Where the device knows that fewer tokens are computed, the host's share is an upper bound."""
    metadata = drawn.metadata(backend)

    for g in range(len(drawn.specs)):
        bound = metadata[g].dcp_local_seq_lens_cpu_upper_bound().tolist()
        for most, length in zip(bound, drawn.seq_lens, strict=False):
            assert all(drawn.local_length(g, fewer) <= most for fewer in range(length + 1))
