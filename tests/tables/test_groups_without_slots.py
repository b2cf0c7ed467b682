"""Groups to which a step's tokens are not written by slot: cross attention, encoder-only; and no group."""

import numpy as np
import pytest

from pagedkv import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheManager,
    MultiGroupBlockTable,
)

from .models import table_of, to_numpy

NUM_STEPS = 100


@pytest.fixture(params=[False, True], ids=["batch order", "stable rows"])
def stable_rows(request):
    return request.param


def address(array):
    """Where an array begins, on the host or on the device."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return interface["data"][0]


def is_pad(array):
    return (to_numpy(array) == -1).all()


def test_decoder_tokens_have_no_slots_in_a_cross_attention_group(backend, stable_rows):
    """Its rows are read all the same: they name the blocks of the encoder's tokens."""
    groups = [KVCacheGroupSpec(4), KVCacheGroupSpec(4, (2,), max_num_encoder_tokens=10)]
    table = MultiGroupBlockTable(
        groups, 4, 32, 16, token_alignment=None, stable_rows=stable_rows, backend=backend
    )
    assert table.mirror.widths == (8, 3)
    table.outputs(2)
    table.add_row(([5, 6], [3, 8, 2]), 0)
    table.add_row(([7], [9]), 1)
    rows = {"rows": [1, 0]} if stable_rows else {}
    step = table.commit(2, [0, 3, 6], [0, 2], num_reqs_padded=3, num_tokens_padded=8, **rows)

    shown = [[9], [3, 8, 2], []] if stable_rows else [[3, 8, 2], [9], []]
    np.testing.assert_array_equal(table_of(shown, 3), to_numpy(step.block_table(1)))
    kernel = [[2 * b + j for b in ids for j in (0, 1)] for ids in shown]
    np.testing.assert_array_equal(table_of(kernel, 6), to_numpy(step.kernel_block_table(1)))
    decoder = to_numpy(step.slot_mapping(0)).tolist()
    assert decoder == ([28, 29, 30, 22, 23, 24] if stable_rows else [20, 21, 22, 30, 31, -1]) + [-1, -1]
    assert is_pad(step.slot_mapping(1))
    assert to_numpy(step.slot_mapping(1)).shape == (8,)
    drafts = table.compute_slot_mapping(2, [0, 1, 2], np.array([2, 3]), out=1)
    assert to_numpy(drafts[0]).tolist() == [22, 31]
    assert is_pad(drafts[1])
    assert is_pad(table.slot_mapping(1, 16, out=1))


def test_an_encoder_only_group_hands_out_the_same_null_column_at_every_step(backend, stable_rows):
    spec = EncoderOnlyAttentionSpec().table_spec(64)
    assert spec == KVCacheGroupSpec(1, cp_sharded=False, slot_mapping=False, max_num_blocks_per_req=1)
    table = MultiGroupBlockTable([16, spec], 4, 64, 32, stable_rows=stable_rows, backend=backend)
    assert table.mirror.widths == (8, 1), "no alignment: one column"
    rng, addresses = np.random.default_rng(3), set()
    for i in range(NUM_STEPS):
        if stable_rows or i == 0:
            for row in range(4):
                table.add_row(([1 + i + row], []), row)
        num_reqs = int(rng.integers(0, 5)) if stable_rows else 4
        starts = np.cumsum([0, *rng.integers(0, 8, num_reqs)]).astype(np.int32)
        rows = {"rows": rng.integers(-1, 4, num_reqs).astype(np.int32)} if stable_rows else {}
        padding = {"num_reqs_padded": 4, "num_tokens_padded": 32}
        step = table.commit(num_reqs, starts, np.zeros(num_reqs, np.int32), **rows, **padding)
        shown, slots = step.block_table(1), step.slot_mapping(1)
        addresses.add((address(shown), address(slots)))
        assert shown.shape == (4, 1)
        assert to_numpy(shown).dtype == np.int32
        assert not to_numpy(shown).any()
        assert slots.shape == (32,)
        assert is_pad(slots)
    assert len(addresses) == 1


def test_a_model_without_groups_still_has_positions_and_lengths(backend, stable_rows):
    """Three requests and ten tokens, padded to sixteen: nothing is written, no slots are handed out."""
    table = MultiGroupBlockTable([], 4, 64, 32, stable_rows=stable_rows, backend=backend)
    table.outputs(2)
    rows = {"rows": [2, 0, -1]} if stable_rows else {}
    for out in (0, 1):
        step = table.commit(
            3, [0, 4, 7, 10], [0, 5, 0], num_reqs_padded=4, num_tokens_padded=16, out=out, **rows
        )
        assert (table.num_groups, table.mirror.widths, table.mirror.blocks.size) == (0, (), 0)
        assert step.num_tokens_padded == 16
        assert to_numpy(step.positions).tolist() == [0, 1, 2, 3, 5, 6, 7, 0, 1, 2, *[0] * 6]
        assert to_numpy(step.seq_lens).tolist() == [4, 8, 3, 0]
        assert to_numpy(step.query_start_loc).tolist() == [0, 4, 7, 10, 10]
        assert is_pad(table._committer.outputs[out].slots)
        assert table.compute_slot_mapping(3, [0, 4, 7, 10], np.arange(10), out=out, **rows) == ()
        assert is_pad(table._committer.outputs[out].slots)
        for ask in (step.block_table, step.slot_mapping, lambda g: table.slot_mapping(g, 1)):
            with pytest.raises(ValueError, match=r"group must lie in \[0, -1\], got 0"):
                ask(0)
    committer = table._committer
    assert not to_numpy(committer.stored.tables).any()
    assert not to_numpy(committer.stored.num_blocks).any()


def test_a_managers_groups_without_slots(backend):
    """An encoder-decoder beside an encoder-only group: decoder slots as the manager says, PAD elsewhere."""
    manager = KVCacheManager(
        [FullAttentionSpec(4), CrossAttentionSpec(4, 10), EncoderOnlyAttentionSpec()],
        64,
        max_num_seqs=3,
        max_model_len=32,
        enable_prefix_caching=False,
    )
    table = MultiGroupBlockTable(
        manager.table_groups, 3, 32, 32, stable_rows=True, mirror=manager.mirror, backend=backend
    )
    seqs = [manager.add(range(n), num_encoder_tokens=e) for n, e in ((5, 10), (3, 1), (1, 4))]
    new = np.array([5, 3, 1], np.int32)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        batch, lengths = [seqs[i] for i in order], new[order]
        computed = manager.allocate_slots(batch, lengths).num_computed_tokens.astype(np.int32)
        rows = manager.rows(batch)
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        step = table.commit(3, starts, computed, rows=rows, num_tokens_padded=16)
        positions = np.concatenate([c + np.arange(n) for c, n in zip(computed, lengths, strict=True)])
        slots = manager.translate(np.repeat(batch, lengths), positions, 0)
        num_tokens = int(starts[-1])
        np.testing.assert_array_equal(slots, to_numpy(step.slot_mapping(0))[:num_tokens])
        assert is_pad(step.slot_mapping(1))
        assert is_pad(step.slot_mapping(2))
        for g in range(3):
            shown = to_numpy(step.block_table(g))
            np.testing.assert_array_equal(manager.block_table(g)[rows][:, : shown.shape[1]], shown)
        counts = (to_numpy(step.block_table(1)) > 0).sum(1)
        np.testing.assert_array_equal(np.array([3, 1, 1])[order], counts)
        assert not to_numpy(step.block_table(2)).any()
        manager.commit(batch, computed + lengths)
        manager.append(seqs, [1, 1, 1])
        new = np.ones(3, np.int32)
