"""A manager writes, tables commit: what a step reads is what the manager holds, with no list between."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv import HostMirror, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.allocation import FullAttentionSpec, KVCacheManager, SlidingWindowSpec

MAX_MODEL_LEN = 64


def test_a_step_reads_what_the_manager_holds():
    """Prompts, decoding, windows, copies-on-write, preemption and moved rows, in stable rows."""
    rng = np.random.default_rng(11)
    manager = KVCacheManager(
        [FullAttentionSpec(4), SlidingWindowSpec(4, 9)], 120, max_num_seqs=6, max_model_len=MAX_MODEL_LEN
    )
    table = MultiGroupBlockTable(
        manager.table_groups,
        6,
        MAX_MODEL_LEN,
        512,
        stable_rows=True,
        backend="numpy",
        mirror=manager.mirror,
    )
    seqs = []
    for _ in range(80):
        if len(seqs) < 6 and rng.random() < 0.4:
            seqs.append(manager.add(rng.integers(0, 2, rng.integers(1, 30))))
        elif 0 < len(seqs) < 6 and rng.random() < 0.2 and manager.rows(seqs[:1])[0] >= 0:
            seqs += manager.fork(seqs[0]).tolist()
        if len(seqs) > 4:
            manager.free([seqs.pop(0)])
        elif len(seqs) > 2 and rng.random() < 0.1 and manager.rows(seqs[1:2])[0] >= 0:
            manager.preempt([seqs[1]])
        lengths = manager.num_tokens(seqs)
        seqs = [seq for seq, length in zip(seqs, lengths, strict=True) if length < MAX_MODEL_LEN]
        batch = rng.permutation(np.array(seqs, np.int64))
        if not batch.size:
            continue
        done = manager.num_tokens(batch) == manager.num_computed_tokens(batch)
        manager.append(batch[done], rng.integers(0, 2, done.sum()).astype(np.int32))
        for seq in batch[manager.rows(batch) < 0]:
            manager.match_prefix(int(seq))
        new = np.maximum(manager.num_tokens(batch) - manager.num_computed_tokens(batch), 1)
        computed = manager.allocate_slots(batch, new).num_computed_tokens
        new = (manager.num_tokens(batch) - computed).astype(np.int32)
        manager.copies_done(manager.take_block_copies())
        query_start_loc = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        read = table.commit(len(batch), query_start_loc, computed.astype(np.int32), rows=manager.rows(batch))

        owner = np.repeat(batch, new)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, new, strict=True)])
        for g in range(2):
            rows = manager.block_table(g)[manager.rows(batch)]
            np.testing.assert_array_equal(rows[:, : read.block_table(g).shape[1]], read.block_table(g))
            slots = manager.translate(owner, positions, g)
            np.testing.assert_array_equal(slots, read.slot_mapping(g)[: len(positions)])
            assert (slots >= 0).all()
        manager.commit(batch, manager.num_tokens(batch))


def used_mirror():
    mirror = HostMirror(8, [16])
    mirror.append_rows([3], [2], [5, 6])
    return mirror


def claimed_mirror():
    return KVCacheManager([FullAttentionSpec(4)], 10, max_num_seqs=8, max_model_len=64).mirror


@pytest.mark.parametrize(
    ("mirror", "error", "message"),
    [
        (HostMirror(8, [15]), ValueError, r"at least \[16\] columns, got \[15\] \(pass .*max_model_len"),
        (HostMirror(8, [16, 16]), ValueError, "1 groups"),
        (HostMirror(8, []), ValueError, "1 groups"),
        (HostMirror(7, [16]), ValueError, "max_num_seqs = 8 rows, got 7"),
        (HostMirror(8, [16], [98]), ValueError, "num_blocks must be at most 99 .*got 100"),
        (used_mirror(), ValueError, "no live rows, got 1"),
        (claimed_mirror(), ValueError, "no writer yet"),
        (np.zeros((8, 16), np.int32), TypeError, "HostMirror, got ndarray"),
    ],
)
def test_a_mirror_that_does_not_fit_is_refused(mirror, error, message):
    owner = getattr(mirror, "owner", None)

    with pytest.raises(error, match=message):
        KVCacheManager([FullAttentionSpec(4)], 100, max_num_seqs=8, max_model_len=64, mirror=mirror)

    assert getattr(mirror, "owner", None) == owner


def test_a_tables_own_mirror_can_be_written():
    table = MultiGroupBlockTable([KVCacheGroupSpec(4)], 8, 64, 64, stable_rows=True, backend="numpy")
    manager = KVCacheManager(
        [FullAttentionSpec(4)], 100, max_num_seqs=8, max_model_len=64, mirror=table.mirror
    )
    seq = manager.add(range(9))
    manager.allocate_slots([seq], [9])

    step = table.commit(1, np.array([0, 9], np.int32), np.zeros(1, np.int32), rows=manager.rows([seq]))

    assert step.block_table(0)[0, :4].tolist() == [1, 2, 3, 0]
    assert table.mirror.owner is not None


@pytest.mark.parametrize(("num_rows", "length"), [(8, 200), (8, 8), (7, 64)])
def test_a_table_of_other_sizes_than_its_manager_is_told_which_to_take(num_rows, length):
    manager = KVCacheManager([FullAttentionSpec(2)], 100, max_num_seqs=8, max_model_len=64)
    sizes = (manager.table_groups, num_rows, length, 64)
    options = {"stable_rows": True, "backend": "numpy", "token_alignment": None}

    with pytest.raises(ValueError, match=r"\[64\] \(pass the manager's max_num_seqs and max_model_len, and"):
        MultiGroupBlockTable(*sizes, mirror=manager.mirror, **options)
    with pytest.raises(ValueError, match=r"\[64\] \(pass the sizes of the table that it comes from"):
        MultiGroupBlockTable(*sizes, mirror=HostMirror(8, [64]), **options)


def test_a_table_whose_kernel_blocks_cannot_name_the_pools_ids_is_refused():
    """Blocks of 16 as two kernel blocks each, 1,000 apart: id 2,147,484 would wrap int32."""
    manager = KVCacheManager([FullAttentionSpec(16)], 2_147_485, max_num_seqs=2, max_model_len=64)
    groups = [replace(group, kernel_views=((8, 1000),)) for group in manager.table_groups]

    with pytest.raises(ValueError, match="got ids up to 2147484 from a KVCacheManager"):
        MultiGroupBlockTable(groups, 2, 64, 64, stable_rows=True, mirror=manager.mirror, backend="numpy")
