"""A manager writes, tables commit: what a step reads is what the manager holds, with no list between."""

import numpy as np

from pagedkv import MultiGroupBlockTable
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
