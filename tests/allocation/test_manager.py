"""KVCacheManager by example: the rules of each kind of group, sharing, failure, order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import errors
from pagedkv.allocation.events import BlockRemoved, BlockStored
from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.group_rules import num_skipped
from pagedkv.allocation.group_specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from pagedkv.allocation.manager import KVCacheManager
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

from .models import snapshot


def manager_of(*groups, num_blocks=40, **options):
    options = {"max_num_seqs": 8, "max_model_len": 64} | options
    return KVCacheManager(groups or [FullAttentionSpec(4)], num_blocks, **options)


def run(manager, seq, num_tokens=None):
    """One step that computes a sequence's tokens up to `num_tokens`, without a lookup."""
    end = int(manager.num_tokens([seq])[0]) if num_tokens is None else num_tokens
    manager.allocate_slots([seq], [end - int(manager.num_computed_tokens([seq])[0])])
    manager.commit([seq], [end])


def table(manager, seq, group=0):
    row = int(manager.rows([seq])[0])
    return manager.block_table(group)[row, : manager.num_blocks_held(group)[row]].tolist()


def test_hits_that_nobody_holds_are_counted():
    manager = manager_of(FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=5))
    first, second = manager.add(range(18)), manager.add(range(18))
    run(manager, first)

    assert manager.num_free_hit_blocks(second) == 0  # nothing was looked up
    assert manager.match_prefix(second) == 16
    assert manager.num_free_hit_blocks(second) == 0  # the first holds them all
    manager.free([first])
    assert manager.num_free_hit_blocks(second) == 4 + 1
    manager.pool.evict(manager.pool.free_block_ids())
    assert manager.num_free_hit_blocks(second) == 0
    with pytest.raises(errors.StaleSequenceError):
        manager.num_free_hit_blocks(first)


def test_a_sequence_has_a_row_from_its_first_allocation_until_it_leaves():
    manager = manager_of()
    seq = manager.add([1, 2, 3])

    assert manager.rows([seq]).tolist() == [-1]
    run(manager, seq)
    assert manager.rows([seq]).tolist() == [0]
    manager.preempt([seq])
    assert manager.rows([seq]).tolist() == [-1]
    assert manager.num_blocks_held(0).tolist() == [0] * 8
    assert not manager.block_table(0).any()


def test_window_blocks_become_null_from_the_left_and_leave_from_the_right():
    """Window 4, blocks of 2, 12 tokens: 9 are skipped, 4 blocks go; 8 settled of which none more: 2."""
    manager = manager_of(SlidingWindowSpec(2, 4), enable_prefix_caching=False)
    seq = manager.add(range(20))

    run(manager, seq, 12)

    assert table(manager, seq) == [0, 0, 0, 0, 5, 6]
    assert manager.pool.free_block_ids()[:4].tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize(("window", "block_size", "settled", "gone"), [(4, 2, 6, 1), (128, 32, 286, 4)])
def test_only_settled_tokens_free_window_blocks(window, block_size, settled, gone):
    """A step in flight still reads what the count that runs ahead would free."""
    manager = manager_of(SlidingWindowSpec(block_size, window), max_model_len=512, num_blocks=80)
    seq = manager.add(range(400))
    manager.allocate_slots([seq], [settled + 2])

    manager.commit([seq], [settled])

    assert table(manager, seq).count(0) == gone


def test_freed_columns_keep_their_place():
    """Length 4,352, window 4,095, blocks of 32: columns 0 to 7 are NULL, column 8 is half alive."""
    manager = manager_of(SlidingWindowSpec(32, 4095 + 1), max_model_len=8192, num_blocks=200)
    seq = manager.add(range(5000))

    run(manager, seq, 4352)

    blocks = table(manager, seq)
    assert len(blocks) == 136
    assert [block == 0 for block in blocks[:9]] == [True] * 8 + [False]


def test_a_chunked_group_hits_on_what_it_never_reads():
    """Chunks of 8, blocks of 4, nothing cached: of 16 tokens 8 are out of sight, of 17 tokens 16."""
    manager = manager_of(ChunkedLocalAttentionSpec(4, 8))

    assert manager.match_prefix(manager.add(range(16))) == 8
    assert manager.match_prefix(manager.add(range(17))) == 16


def test_a_window_hits_on_the_first_long_enough_run_from_the_right():
    manager = manager_of(SlidingWindowSpec(2, 4), num_blocks=20)
    seq = manager.add(range(10))
    manager.allocate_slots([seq], [10])
    manager.commit([seq], [3])
    manager.commit([seq], [10])
    pool, keys = manager.pool, manager._state.hasher.hash_blocks(np.arange(10))
    cached = [pool.longest_prefix(keys[j : j + 1]).tolist() for j in range(5)]
    assert all(cached)
    manager.free([seq])

    for gone, hit in (((), 10), ((3,), 6), ((1,), 2), ((0,), 0)):
        pool.evict([cached[j][0] for j in gone])
        assert manager.match_prefix(manager.add(range(11))) == hit


def test_recurrent_states_are_kept_where_a_step_ends_on_a_boundary():
    """Blocks of 4, chunks of 4, 4, 2, then one by one: [2], [2, 4], [0, 4, 6], [0, 0, 6, 8]."""
    manager = manager_of(FullAttentionSpec(4), MambaSpec(4, "align"))
    seq = manager.add(range(13))
    seen = []
    for end in (4, 8, 10, 11, 12, 13):
        manager.allocate_slots([seq], [end - int(manager.num_computed_tokens([seq])[0])])
        seen.append(table(manager, seq, 1))
        manager.commit([seq], [end])

    assert seen == [[2], [2, 4], [0, 4, 6], [0, 0, 6], [0, 0, 6], [0, 0, 6, 8]]
    assert table(manager, seq, 1) == [0, 0, 0, 8]
    manager.free([seq])
    again = manager.add(range(13))
    assert manager.match_prefix(again) == 12  # a step ended after 12
    manager.allocate_slots([again], [1])
    assert table(manager, again, 1)[:2] == [0, 0]


@pytest.mark.parametrize(
    ("allocated", "committed", "rows"),
    [
        ([10], [5], [0, 3]),
        ([6, 3], [3], [3]),
        ([12, 5], [12, 13], [0, 0, 0, 8]),
        ([6, 4], [3, 4], [5]),
        ([6, 4], [3, 7], [0, 5]),
    ],
)
def test_a_state_stands_in_the_column_of_the_last_computed_token(allocated, committed, rows):
    """However many drafts were rejected; a fork copies that block, and never the null block."""
    manager = manager_of(FullAttentionSpec(4), MambaSpec(4, "align"), enable_events=True)
    seq = manager.add(range(20))
    for count in allocated[: 1 + len(allocated) - len(committed)]:
        manager.allocate_slots([seq], [count])
    manager.commit([seq], committed[:1])
    if len(committed) > 1:
        manager.allocate_slots([seq], allocated[1:])
        manager.commit([seq], committed[1:])

    states = table(manager, seq, 1)
    assert [block > 0 for block in states] == [block > 0 for block in rows]
    assert (manager.pool.ref_counts > 0).sum() == len(table(manager, seq)) + 1
    if committed[-1] % 4:
        manager.fork(seq)
        copies = manager.take_block_copies()
        assert copies[:, 0].tolist() == [states[-1]]
    assert manager.pool.pin_counts[0] == manager.pool.ref_counts[0] == 0


def test_drafts_that_cross_a_block_have_states_to_write():
    manager = manager_of(FullAttentionSpec(4), MambaSpec(4, "align", num_speculative_blocks=3))
    seq = manager.add(range(3))
    run(manager, seq)
    manager.append([seq], [9])
    manager.allocate_slots([seq], [4])
    manager.append([seq], [7, 7, 7], [3])

    manager.commit([seq], [7])

    states = table(manager, seq, 1)
    assert len(states) == 5
    assert states[0] == 0
    assert len(set(states)) == 5


def test_only_tokens_that_are_known_and_allocated_for_can_be_committed():
    """30 known: 32 are not, 31 are once one is appended, and its KV is written a step later."""
    manager = manager_of(FullAttentionSpec(16), max_model_len=128)
    seq = manager.add(range(30))
    manager.allocate_slots([seq], [30])

    for count in (31, 32):
        with pytest.raises(ValueError, match=rf"\[0, 30\].*got {count} \(commit"):
            manager.commit([seq], [count])
        if count == 31:
            manager.append([seq], [1, 2], [2])
    manager.commit([seq], [30])
    with pytest.raises(ValueError, match=r"\[30, 30\]: 30 are computed, 32 known and 30 allocated for"):
        manager.commit([seq], [32])
    assert manager.match_prefix(manager.add([*range(30), 1, 2, 3])) == 16
    manager.allocate_slots([seq], [1], num_lookahead_tokens=4)
    manager.commit([seq], [32])
    assert manager.match_prefix(manager.add([*range(30), 1, 2, 3])) == 32


def test_a_refused_allocation_allows_no_commit():
    """Neither of the one that has blocks enough, before or after the one that does not fit."""
    manager = manager_of(num_blocks=4)
    first, large, last = manager.add([1] * 3), manager.add([2] * 20), manager.add([3] * 3)
    run(manager, first)
    run(manager, last)
    manager.append([first, last], [1, 1])

    with pytest.raises(errors.OutOfBlocksError):
        manager.allocate_slots([first, large, last], [1, 20, 1])
    with pytest.raises(ValueError, match="num_new_tokens"):
        manager.allocate_slots([first, last], [1, 0])
    for seq in (first, last):
        with pytest.raises(ValueError, match="3 allocated for"):
            manager.commit([seq], [4])
    assert manager.try_allocate_slots([first, large, last], [1, 20, 1]).num_sequences == 1
    manager.commit([first], [4])
    with pytest.raises(ValueError, match="3 allocated for"):
        manager.commit([last], [4])


def test_rejected_drafts_are_not_allocated_for_any_more():
    manager = manager_of()
    seq = manager.add([1, 2, 3])
    manager.allocate_slots([seq], [3], num_lookahead_tokens=2)
    manager.append([seq], [4, 5], [2])
    manager.truncate(seq, 3)
    manager.append([seq], [6, 7], [2])

    with pytest.raises(ValueError, match="3 allocated for, got 5"):
        manager.commit([seq], [5])


def test_speculative_state_blocks_move_behind_the_running_one():
    manager = manager_of(MambaSpec(2, "align", num_speculative_blocks=1))
    seq = manager.add(range(12))

    run(manager, seq, 2)
    assert table(manager, seq) == [1, 2]
    run(manager, seq, 8)  # three blocks on: the drafts' block goes along, what lies between is NULL
    assert table(manager, seq) == [0, 0, 0, 2, 3]
    assert manager.pool.free_block_ids().tolist()[-1] == 1  # the kept state is cached


def test_a_hybrid_hit_is_one_that_every_group_has():
    """Blocks of 4 and a window of 8 in blocks of 8: 21 tokens hit 16, the window's first block is NULL."""
    manager = manager_of(FullAttentionSpec(4), SlidingWindowSpec(8, 8))
    run(manager, manager.add(range(21)))
    again = manager.add(range(21))

    assert manager.match_prefix(again) == 16
    manager.allocate_slots([again], [5])

    assert table(manager, again, 0)[:4] == [1, 2, 3, 4]
    assert table(manager, again, 1)[0] == 0


@pytest.mark.parametrize(("length", "hit"), [(32, 16), (33, 32)])
def test_a_hit_leaves_a_token_to_compute(length, hit):
    manager = manager_of(FullAttentionSpec(16))
    run(manager, manager.add([7] * length))

    assert manager.match_prefix(manager.add([7] * length)) == hit


def test_context_parallel_ranks_share_a_block_of_tokens():
    """Blocks of 16 on 2 ranks: 150 shared tokens hit 128, 4 units of 32."""
    manager = manager_of(FullAttentionSpec(16), context_parallel=ContextParallel(2), max_model_len=512)
    run(manager, manager.add([*range(150), *[7] * 50]))

    assert manager.match_prefix(manager.add([*range(150), *[8] * 50])) == 128
    assert manager.num_blocks_held(0)[0] == 7


@pytest.mark.parametrize(("world_size", "interleave"), [(2, 1), (2, 4), (4, 2)])
def test_translate_under_context_parallelism_gives_each_ranks_slots(world_size, interleave):
    """Every position is one rank's, at its slot by the formula; unsharded groups have all on every rank."""
    groups, owners = [FullAttentionSpec(4), FullAttentionSpec(4, cp_sharded=False)], np.zeros(40, int)
    for rank in range(world_size):
        manager = manager_of(*groups, context_parallel=ContextParallel(world_size, rank, interleave))
        seq = manager.add(range(40))
        run(manager, seq)
        blocks = table(manager, seq)
        expected = []
        for p in range(40):
            o, block = p % (4 * world_size), blocks[p // (4 * world_size)]
            here = o // interleave % world_size == rank
            slot = block * 4 + o // (world_size * interleave) * interleave + o % interleave
            expected.append(slot if here else -1)
        slots = manager.translate([seq] * 40, range(40))
        owners += slots >= 0

        assert expected == slots.tolist()
        assert (manager.translate([seq] * 40, range(40), 1) >= 0).all()
    assert owners.tolist() == [1] * 40
    assert FullAttentionSpec(4).max_blocks_per_request(8, 40, world_size) == -(-40 // (4 * world_size))
    assert FullAttentionSpec(4, cp_sharded=False).max_blocks_per_request(8, 40, world_size) == 10


def test_handles_of_another_manager_are_strange():
    first, second = manager_of(), manager_of()
    seqs = [[manager.add([1] * 4) for _ in range(3)] for manager in (first, second)]

    for manager, others in ((first, seqs[1]), (second, seqs[0])):
        for call in (manager.free, manager.rows, manager.preempt, manager.num_tokens):
            with pytest.raises(errors.StaleSequenceError, match="not of this manager"):
                call(others)
    assert first.stats().num_sequences == second.stats().num_sequences == 3


def test_cross_attention_blocks_are_taken_once():
    groups = [FullAttentionSpec(4), CrossAttentionSpec(4, max_num_encoder_tokens=16)]
    manager = manager_of(*groups, enable_prefix_caching=False)
    seq = manager.add(range(8), num_encoder_tokens=9)

    run(manager, seq, 2)
    first = table(manager, seq, 1)
    run(manager, seq, 8)

    assert first == table(manager, seq, 1)
    assert len(first) == 3


def test_more_encoder_tokens_than_a_row_takes_are_refused():
    """The smallest of several limits counts; a longer one would write into the next row."""
    groups = [CrossAttentionSpec(2, 9), CrossAttentionSpec(2, 5)]
    manager = manager_of(*groups, enable_prefix_caching=False, num_blocks=400)

    with pytest.raises(errors.CapacityError, match=r"num_encoder_tokens must be at most 5, got 6 \("):
        manager.add([1], num_encoder_tokens=6)
    assert manager.stats().num_sequences == 0

    run(manager, manager.add([1], num_encoder_tokens=5))
    assert manager.num_blocks_held(1).tolist() == [3] + [0] * 7


def test_encoder_only_groups_hold_nothing():
    manager = manager_of(EncoderOnlyAttentionSpec(), enable_prefix_caching=False)
    seq = manager.add(range(8))

    run(manager, seq)

    assert table(manager, seq) == []
    assert manager.num_free_blocks == 39


@pytest.mark.parametrize(("num_new", "fits"), [(16, False), (12, True)])
def test_free_blocks_that_are_hit_count(num_new, fits):
    """Five blocks free, two of them the hits: two hits and four new do not fit, two and three do."""
    manager = manager_of(num_blocks=6)
    seq = manager.add(range(8))
    run(manager, seq)
    manager.free([seq])
    again = manager.add(range(8 + num_new))
    assert manager.match_prefix(again) == 8
    before = snapshot(manager.pool)

    if fits:
        manager.allocate_slots([again], [num_new])
        assert manager.num_free_blocks == 0
        assert table(manager, again)[:2] == [1, 2]
    else:
        with pytest.raises(errors.OutOfBlocksError, match="needed 6, got 5 free"):
            manager.allocate_slots([again], [num_new])
        assert snapshot(manager.pool) == before


def test_a_hit_that_went_between_lookup_and_allocation_is_not_taken():
    manager = manager_of(num_blocks=5)
    first = manager.add(range(8))
    run(manager, first)
    manager.free([first])
    again = manager.add(range(9))
    assert manager.match_prefix(again) == 8

    other = manager.add([9] * 12)
    run(manager, other)  # takes the two blocks that were never used, and the chain's tail
    manager.free([other])
    allocation = manager.try_allocate_slots([again], [1])

    assert allocation.num_computed_tokens.tolist() == [4]
    assert table(manager, again)[0] == 1


def test_a_batch_equals_its_sequences_one_by_one():
    rng = np.random.default_rng(5)
    managers = [manager_of(FullAttentionSpec(4), SlidingWindowSpec(4, 6), num_blocks=120) for _ in range(2)]
    prompts = [rng.integers(0, 2, rng.integers(1, 20)) for _ in range(6)]
    seqs = [[manager.add(prompt) for prompt in prompts] for manager in managers]
    batches = [np.array(own) for own in seqs]
    for step in range(12):
        tokens = rng.integers(0, 2, 6) if step else []
        counts = np.ones(6, np.int32) if step else managers[0].num_tokens(batches[0])
        for manager, batch in zip(managers, batches, strict=True):
            together = manager is managers[0]
            for part in [slice(None)] if together else [slice(i, i + 1) for i in range(6)]:
                if step:
                    manager.append(batch[part], tokens[part])
                manager.allocate_slots(batch[part], counts[part])
            for part in [slice(None)] if together else [slice(i, i + 1) for i in range(6)]:
                manager.commit(batch[part], manager.num_tokens(batch[part]))
        assert snapshot(managers[0].pool) == snapshot(managers[1].pool)
        for g in range(2):
            assert managers[0].block_table(g).tolist() == managers[1].block_table(g).tolist()


def test_the_first_that_does_not_fit_is_named_and_the_longest_prefix_can_be_taken():
    manager = manager_of(num_blocks=6, enable_prefix_caching=False)
    seqs = [manager.add([1] * 8) for _ in range(3)]

    with pytest.raises(errors.OutOfBlocksError) as raised:
        manager.allocate_slots(seqs, [8, 8, 8])
    assert (raised.value.index, raised.value.needed, raised.value.free) == (2, 6, 5)
    assert manager.num_free_blocks == 5
    assert "needed 6 up to and including it, got 5 free (the pool has 5 in all" in str(raised.value)
    with pytest.raises(
        errors.OutOfBlocksError, match=r"needed 7, got 5 free \(the pool has 5 in all: enlarge"
    ):
        manager.allocate_slots([manager.add([1] * 28)], [28])

    assert manager.try_allocate_slots(seqs, [8, 8, 8]).num_sequences == 2
    assert manager.rows(seqs).tolist() == [0, 1, -1]


def test_slots_past_the_model_length_are_not_taken():
    """14 tokens and 10 of lookahead, blocks of 4, at most 16: four blocks."""
    manager = manager_of(max_model_len=16)
    seq = manager.add(range(14))

    manager.allocate_slots([seq], [14], num_lookahead_tokens=10)

    assert len(table(manager, seq)) == 4


def test_rejected_drafts_keep_their_blocks_and_are_never_published():
    manager = manager_of()
    seq = manager.add(range(7))
    manager.allocate_slots([seq], [7], num_lookahead_tokens=3)
    manager.commit([seq], [7])

    assert len(table(manager, seq)) == 3
    assert manager.pool.num_cached_blocks == 1
    manager.append([seq], [7])
    assert manager.allocate_slots([seq], [1], num_lookahead_tokens=2).block_ids.size == 0


def test_the_watermark_spares_the_first_and_the_running():
    """Ten blocks, three of them kept: four more beside four do not fit, alone they would."""
    manager = manager_of(num_blocks=11, watermark=0.3, enable_prefix_caching=False)
    first, second = manager.add([1] * 16), manager.add([2] * 16)

    run(manager, first)
    with pytest.raises(errors.OutOfBlocksError):
        manager.allocate_slots([second], [16])
    manager.append([first], [1] * 20, [20])
    run(manager, first)  # running: may go below the watermark
    manager.free([first])
    run(manager, second)

    assert len(table(manager, second)) == 4


@pytest.mark.parametrize("num_children", [1, 2, 5])
def test_sharers_of_a_part_filled_block_make_one_copy_fewer_than_there_are(num_children):
    for together in (True, False):
        manager = manager_of()
        seq = manager.add(range(6))
        run(manager, seq)
        family = [seq, *manager.fork(seq, num_children).tolist()]
        manager.append(family, range(len(family)))
        copies = []
        for part in [family] if together else [[member] for member in family]:
            manager.allocate_slots(part, [1] * len(part))
            copies += manager.take_block_copies().tolist()

        assert len(copies) == num_children
        assert len({table(manager, member)[1] for member in family}) == len(family)
        manager.copies_done(copies)
        assert not manager.pool.pin_counts.any()


def test_both_ends_of_a_copy_stay_until_it_is_done():
    manager = manager_of(num_blocks=5)
    seq = manager.add(range(2))
    run(manager, seq)
    child = int(manager.fork(seq)[0])
    manager.append([child], [5])
    manager.allocate_slots([child], [1])
    copies = manager.take_block_copies()

    manager.free([seq, child])
    assert manager.num_free_blocks == 2
    manager.copies_done(copies)
    assert manager.num_free_blocks == 4
    with pytest.raises(errors.InvalidBlockError, match="pinned 0 times"):
        manager.copies_done(copies)


def test_copies_that_were_not_taken_cannot_be_done():
    manager = manager_of()
    seq = manager.add(range(6))
    run(manager, seq)
    manager.fork(seq)
    manager.append([seq], [1])
    manager.allocate_slots([seq], [1])
    before = snapshot(manager.pool)

    with pytest.raises(errors.InvalidBlockError, match="pinned 0 times by copies that were taken, got it 1"):
        manager.copies_done([[2, 3]])

    assert snapshot(manager.pool) == before
    manager.copies_done(manager.take_block_copies())
    assert not manager.pool.pin_counts.any()


def test_forgotten_copies_are_counted_and_named_where_blocks_run_out():
    """Nobody is left, and the source and target of the copy are still not free."""
    manager = manager_of(num_blocks=5)
    seq = manager.add(range(2))
    run(manager, seq)
    child = int(manager.fork(seq)[0])
    manager.append([child], [5])
    assert manager.stats().num_unfinished_copies == 0
    manager.allocate_slots([child], [1])
    manager.free([seq, child])
    long = manager.add(range(16))

    def assert_one_is_named():
        assert manager.stats().num_unfinished_copies == manager.num_unfinished_copies == 1
        with pytest.raises(errors.OutOfBlocksError, match=r"pool; pairs .* pin blocks .*done: 1\)"):
            manager.allocate_slots([long], [16])

    assert_one_is_named()
    copies = manager.take_block_copies()
    assert_one_is_named()
    with pytest.raises(errors.InvalidBlockError):
        manager.copies_done([[3, 3], *copies])
    assert_one_is_named()
    manager.copies_done(copies)
    assert manager.num_unfinished_copies == 0
    manager.allocate_slots([long], [16])
    with pytest.raises(errors.OutOfBlocksError, match=r"enlarge the pool\)"):
        manager.allocate_slots([manager.add([1])], [1])


def test_a_refused_fork_names_copies_as_well():
    manager = manager_of(MambaSpec(4, "none"), num_blocks=4, enable_prefix_caching=False)
    seq = manager.add(range(6))
    run(manager, seq)
    manager.free(manager.fork(seq))

    with pytest.raises(errors.OutOfBlocksError, match="pin blocks until copies_done: 1"):
        manager.fork(seq, 2)


def test_a_handle_may_be_any_integer_of_one_value():
    manager = manager_of()
    seq = manager.add(range(5))

    for handle in (np.int64(seq), np.uint64(seq), np.array(seq)):
        assert manager.match_prefix(handle) == 0


def test_only_a_hit_that_was_looked_up_is_taken():
    """An allocation alone computes the whole prompt, also after a preemption."""
    manager = manager_of()
    run(manager, manager.add(range(12)))
    seq = manager.add(range(12))

    assert manager.allocate_slots([seq], [12]).num_computed_tokens.tolist() == [0]
    manager.preempt([seq])
    assert manager.allocate_slots([seq], [12]).num_computed_tokens.tolist() == [0]
    manager.preempt([seq])
    assert manager.match_prefix(seq) == 8
    assert manager.allocate_slots([seq], [4]).num_computed_tokens.tolist() == [8]


def test_a_running_state_is_copied_by_a_fork():
    manager = manager_of(MambaSpec(4, "none", num_speculative_blocks=1), enable_prefix_caching=False)
    seq = manager.add(range(6))
    run(manager, seq)

    child = int(manager.fork(seq)[0])

    assert (table(manager, seq), table(manager, child)) == ([1, 2], [3, 4])
    assert manager.take_block_copies().tolist() == [[1, 3]]


def test_a_refused_fork_changes_nothing():
    manager = manager_of(MambaSpec(4, "none"), enable_prefix_caching=False, num_blocks=4)
    seq = manager.add(range(6))
    run(manager, seq)

    with pytest.raises(errors.OutOfBlocksError, match="needed 3, got 2 free"):
        manager.fork(seq, 3)

    assert manager.num_free_blocks == 2
    assert manager.stats().num_sequences == 1


def test_a_resumed_sequence_hits_what_it_left():
    """9 tokens, preempted: 8 are hit when nothing else ran, and the numbers tell them apart."""
    manager = manager_of()
    seq = manager.add(range(9))
    run(manager, seq)

    manager.preempt([seq])

    assert manager.num_computed_tokens([seq]).tolist() == [0]
    assert manager.match_prefix(seq) == 8
    manager.allocate_slots([seq], [1])
    stats = manager.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (9, 0)
    assert (stats.num_requeried_tokens, stats.num_rehit_tokens) == (9, 8)
    assert stats.num_preemptions == 1


def test_lookups_that_lead_nowhere_are_not_counted():
    manager = manager_of(num_blocks=5)
    first = manager.add(range(8))
    run(manager, first)
    again = manager.add(range(20))

    for _ in range(5):
        assert manager.match_prefix(again) == 8
        assert manager.try_allocate_slots([again], [12]).num_sequences == 0

    assert manager.stats().num_queried_tokens == 8
    assert manager.stats().hit_rate == 0.0


def test_blocks_given_back_wait_for_the_steps_in_flight():
    """Free 2, held 3, steps N and N + 1 sent: the blocks are free after N + 1, the handle ends at once."""
    manager = manager_of(num_blocks=6, defer_frees=True, enable_prefix_caching=False)
    seq = manager.add(range(12))
    run(manager, seq)
    first, second = manager.begin_step(), manager.begin_step()
    manager.end_step(first)

    manager.free([seq])

    assert manager.num_free_blocks == 2
    with pytest.raises(errors.StaleSequenceError):
        manager.rows([seq])
    manager.end_step(second)
    assert manager.num_free_blocks == 5
    with pytest.raises(ValueError, match="step must be open"):
        manager.end_step(second)


def test_window_blocks_and_preempted_blocks_wait_for_steps_in_flight_too():
    manager = manager_of(SlidingWindowSpec(2, 4), num_blocks=12, defer_frees=True)
    seq = manager.add(range(12))
    manager.allocate_slots([seq], [12])
    step = manager.begin_step()

    manager.commit([seq], [12])
    assert (table(manager, seq), manager.num_free_blocks) == ([0, 0, 0, 0, 5, 6], 5)
    manager.preempt([seq])
    assert manager.num_free_blocks == 5
    manager.end_step(step)

    assert manager.num_free_blocks == 11


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_more_cached_content_never_shortens_a_full_attention_hit(data):
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=16), min_size=1, max_size=6)
    )
    asked = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=16))
    manager = manager_of(FullAttentionSpec(2), num_blocks=100)
    before = 0
    for prompt in prompts:
        run(manager, manager.add(prompt))
        probe = manager.add(asked)
        hit = manager.match_prefix(probe)
        manager.free([probe])

        assert before <= hit <= len(asked) - 1
        assert hit % 2 == 0
        before = hit


def test_common_prefix_counts_only_those_asked_about():
    """R1 = [a, b], R2 = [a, c] finished but held, R3 apart: nothing is common to R1 and R3."""
    manager = manager_of()
    first = manager.add(range(8))
    run(manager, first)
    second = manager.add([*range(4), 9, 9, 9, 9])
    manager.match_prefix(second)
    manager.allocate_slots([second], [4])
    third = manager.add([8] * 8)
    run(manager, third)

    assert manager.num_common_prefix_blocks([first, third]) == 0
    assert manager.num_common_prefix_blocks([first, second]) == 1
    assert manager.num_common_prefix_blocks([first]) == 2
    assert manager.num_common_prefix_blocks([]) == 0


def test_extra_keys_keep_sequences_apart_beyond_the_prompt():
    """An adapter tells generated blocks apart too, a salt through the chain."""
    manager = manager_of()
    for extra_keys in (None, ExtraKeys(adapter="x"), ExtraKeys(cache_salt="x")):
        seq = manager.add([1, 2], extra_keys=extra_keys)
        assert manager.match_prefix(seq) == 0
        run(manager, seq)
        manager.append([seq], [3, 4, 5, 6, 7], [5])
        run(manager, seq)
        again = manager.add([1, 2, 3, 4, 5, 6, 7, 8, 9], extra_keys=extra_keys)
        assert manager.match_prefix(again) == 4


def test_events_tell_tokens_parents_and_removals_in_order():
    manager = manager_of(num_blocks=4, enable_events=True)
    seq = manager.add(range(8))
    run(manager, seq, 4)
    run(manager, seq, 8)
    manager.free([seq])
    other = manager.add([9] * 8)
    run(manager, other)

    first, second, removed, stored = manager.take_events()
    assert [event.token_ids.tolist() for event in (first, second)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (first.parent_block_hash, second.parent_block_hash) == (None, first.block_hashes[0])
    assert removed == BlockRemoved(second.block_hashes[0], 0)
    assert isinstance(stored, BlockStored)
    assert (len(stored.block_hashes), stored.block_size) == (2, 4)


@pytest.mark.parametrize(
    ("group", "prompts", "counts", "lookahead"),
    [
        (MambaSpec(4, "align", num_speculative_blocks=15), 16, 1, 0),
        (FullAttentionSpec(1), 1, 1, 2**31 - 1),
        (FullAttentionSpec(1), 1, 10**7, 0),
    ],
)
def test_every_evicted_block_has_room_in_the_event_log(group, prompts, counts, lookahead):
    """A pool full of cached blocks, and calls that take many of them in the first step they are in."""
    manager = manager_of(
        group, num_blocks=400, max_num_seqs=16, max_model_len=300, enable_events=True, algorithm="siphash"
    )
    pool, keys = manager.pool, np.arange(1, 799, dtype=np.uint64).reshape(-1, 2) << np.uint64(8)
    ids = np.concatenate([pool.allocate(19) for _ in range(21)])
    for j in range(0, 399, 20):  # few at a time: the log stays small
        pool.publish(ids[j : j + 20], keys[j : j + 20])
        manager.take_events()
    pool.free(ids[::-1])
    room = len(pool.arrays.log)

    seqs = [manager.add([i] * 290) for i in range(prompts)]
    taken = manager.allocate_slots(seqs, [counts] * prompts, num_lookahead_tokens=lookahead).block_ids.size

    assert taken > 200
    assert len(manager.take_events()) == taken
    assert room < taken <= len(pool.arrays.log) <= 800


def test_needed_blocks_are_what_an_allocation_takes():
    manager = manager_of(FullAttentionSpec(4), SlidingWindowSpec(4, 6))
    seqs = [manager.add(range(9)), manager.add([5])]

    needed = manager.num_blocks_needed(seqs, [9, 1], num_lookahead_tokens=4)

    assert needed.tolist() == [8, 4]
    allocation = manager.allocate_slots(seqs, [9, 1], num_lookahead_tokens=4)
    assert allocation.block_ids.size == 12


def test_rows_move_with_their_sequences():
    manager = manager_of(max_num_seqs=4)
    seqs = [manager.add([i] * 5) for i in range(3)]
    manager.allocate_slots(seqs, [5, 5, 5])
    tables = [table(manager, seq) for seq in seqs]
    manager.free(seqs[:1])

    manager.move_rows([2, 1], [0, 3])

    assert manager.rows(seqs[1:]).tolist() == [3, 0]
    assert [table(manager, seq) for seq in seqs[1:]] == tables[1:]
    assert not manager.block_table(0)[[1, 2]].any()
    seq = manager.add([1])
    run(manager, seq)
    assert manager.rows([seq]).tolist() == [1]
    with pytest.raises(ValueError, match="source row has no sequence"):
        manager.move_rows([2], [1])
    with pytest.raises(ValueError, match="target row has a sequence"):
        manager.move_rows([0], [1])


def test_translate_gives_slots_and_pads():
    manager = manager_of(SlidingWindowSpec(4, 2), enable_prefix_caching=False)
    seq, waiting = manager.add(range(9)), manager.add([1])
    run(manager, seq)

    slots = manager.translate([seq, seq, seq, seq, waiting], [3, 8, 12, -1, 0])

    assert slots.tolist() == [-1, 12, -1, -1, -1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, s: m.allocate_slots([s, s], [1, 1]), ValueError, r"seqs\[1\] must occur once"),
        (lambda m, s: m.allocate_slots([s], [0]), ValueError, r"num_new_tokens\[0\] .*least 1, got 0 \("),
        (
            lambda m, s: m.num_blocks_needed([s], [-5]),
            ValueError,
            r"num_new_tokens\[0\] .*least 1, got -5 \(",
        ),
        (lambda m, s: m.allocate_slots(s, [1]), TypeError, r"got one handle \(pass \[\d+\]\)"),
        (lambda m, s: m.append([s], [1, 2], [3]), ValueError, r"sum\(lens\) = 3 tokens, got 2"),
        (lambda m, s: m.allocate_slots([s], [1, 1]), ValueError, "num_new_tokens must have shape"),
        (lambda m, s: m.allocate_slots([s], [1], num_lookahead_tokens=-1), ValueError, "lookahead"),
        (lambda m, _: m.allocate_slots([1.5], [1]), TypeError, "seqs"),
        (lambda m, s: m.commit([s], [1]), ValueError, "3 are computed.*got 1"),
        (
            lambda m, s: m.commit([s], [4]),
            ValueError,
            r"num_computed_tokens\[0\] must lie in \[3, 3\].*got 4 \(",
        ),
        (lambda m, _: m.commit([m.add([1])], [1]), ValueError, "must hold a row"),
        (lambda m, _: m.preempt([m.add([1])]), ValueError, "must hold a row"),
        (lambda m, s: m.append([s], [1, 2]), ValueError, r"len\(seqs\) = 1 tokens, got 2"),
        (lambda m, s: m.append([s], [1], [-1]), ValueError, "got -1"),
        (lambda m, s: m.append([s], [1] * 62, [62]), errors.CapacityError, "max_model_len 64"),
        (lambda m, s: m.truncate(s, 4), ValueError, r"num_tokens must lie in \[1, 3\].*got 4"),
        (lambda m, s: m.truncate(s, 0), ValueError, "num_tokens"),
        (
            lambda m, s: m.match_prefix(s),
            ValueError,
            r"seqs\[0\] must wait: \d+ runs, and only waiting sequences are looked up \(match_prefix before",
        ),
        (lambda m, s: m.match_prefix([s]), TypeError, r"seq must be one handle, got list \(call once"),
        (lambda m, s: m.num_free_hit_blocks(np.array([s])), TypeError, "seq must be one handle, got ndarray"),
        (lambda m, _: m.match_prefix(True), TypeError, "seq must be one handle, got True"),
        (lambda m, s: m.truncate((s,), 1), TypeError, "seq must be one handle, got tuple"),
        (lambda m, _: m.fork([]), TypeError, "seq must be one handle, got list"),
        (lambda m, _: m.add([]), errors.CapacityError, "1 to 64"),
        (lambda m, _: m.add([1] * 65), errors.CapacityError, "1 to 64"),
        (lambda m, _: m.add([-1]), ValueError, "token_ids"),
        (lambda m, _: m.match_prefix(2**70), TypeError, f"seq must be one handle, got {2**70}"),
        (lambda m, _: m.match_prefix(-1), errors.StaleSequenceError, "got -1"),
        (lambda m, _: m.fork(1.0), TypeError, "seq must be one handle, got float"),
        (lambda m, _: m.fork("a"), TypeError, "seq must be one handle, got str"),
        (lambda m, s: m.allocate_slots([s], [2**40]), ValueError, "num_new_tokens"),
        (lambda m, s: m.allocate_slots([s], [1.0]), TypeError, "num_new_tokens"),
        (lambda m, s: m.allocate_slots([s], [1], num_lookahead_tokens=2**40), ValueError, "lookahead"),
        (lambda m, s: m.translate([s], [0.5]), TypeError, "positions"),
        (lambda m, _: m.copies_done([[0.5, 1.0]]), TypeError, "copies"),
        (lambda m, _: m.add([1], extra_keys=ExtraKeys(multimodal=(("x", 0, 2),))), ValueError, "multimodal"),
        (lambda m, s: m.free([s, 7]), errors.StaleSequenceError, r"seqs\[1\] must be a live sequence, got 7"),
        (lambda m, s: m.translate([s], [0], group=1), ValueError, "group"),
        (lambda m, _: m.copies_done([[1, 2]]), errors.InvalidBlockError, "pinned 0 times"),
        (
            lambda m, _: m.copies_done([1, 2]),
            ValueError,
            r"copies must have shape \[n, 2\], got \[2\] \(pass what take_block_copies",
        ),
        (lambda m, _: m.copies_done([[1, 2, 3]]), ValueError, r"copies must have shape .*got \[1, 3\]"),
        (
            lambda m, _: m.add([1], num_encoder_tokens=5),
            ValueError,
            r"num_encoder_tokens must be 0 without cross attention, got 5 \(give",
        ),
    ],
)
def test_bad_calls_change_nothing(call, error, message):
    manager = manager_of()
    seq = manager.add([1, 2, 3])
    run(manager, seq)
    before = snapshot(manager.pool), table(manager, seq), manager.line(seq)[:14].tolist()

    with pytest.raises(error, match=message):
        call(manager, seq)

    assert (snapshot(manager.pool), table(manager, seq), manager.line(seq)[:14].tolist()) == before


@pytest.mark.parametrize(
    ("groups", "options", "error", "message"),
    [
        ([], {}, ValueError, "groups"),
        (
            [FullAttentionSpec(4), MambaSpec(4)],
            {},
            ValueError,
            r"_caching must be False .*MambaSpec\(block_size=4, cache_mode='none'.*cache_mode='align'\)",
        ),
        ([CrossAttentionSpec(4, 8)], {}, ValueError, r"CrossAttentionSpec.*=False\)"),
        ([EncoderOnlyAttentionSpec()], {}, ValueError, "EncoderOnlyAttentionSpec"),
        (FullAttentionSpec(4), {}, TypeError, r"got one FullAttentionSpec \(pass"),
        (4, {}, TypeError, r"got one int \(pass"),
        ([FullAttentionSpec(4), 4], {}, TypeError, r"groups\[1\] must be a FullAttentionSpec.*got int"),
        ([KVCacheGroupSpec(4)], {}, TypeError, r"groups\[0\] must be.*got KVCacheGroupSpec"),
        ([FullAttentionSpec], {}, TypeError, r"groups\[0\] must be.*got FullAttentionSpec"),
        ([FullAttentionSpec(4)], {"watermark": 1.0}, ValueError, "watermark"),
        ([FullAttentionSpec(4)], {"max_num_seqs": 0}, ValueError, "max_num_seqs"),
        ([FullAttentionSpec(4)], {"algorithm": "md5"}, LookupError, "algorithm"),
    ],
)
def test_bad_configurations(groups, options, error, message):
    with pytest.raises(error, match=message):
        KVCacheManager(groups, 10, **({"max_num_seqs": 2, "max_model_len": 8} | options))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FullAttentionSpec(0),
        lambda: SlidingWindowSpec(4, 0),
        lambda: SlidingWindowSpec(4, 4, -1),
        lambda: ChunkedLocalAttentionSpec(4, 0),
        lambda: MambaSpec(4, "none", -1),
        lambda: CrossAttentionSpec(4, 0),
    ],
)
def test_bad_groups(make):
    with pytest.raises(ValueError, match="must lie in"):
        make()


@pytest.mark.parametrize(
    ("group", "blocks"),
    [
        (FullAttentionSpec(4), 25),
        (SlidingWindowSpec(4, 6), 5),
        (ChunkedLocalAttentionSpec(4, 8), 4),
        (MambaSpec(4, "align", 2), 4),
        (MambaSpec(4, "none", 2), 3),
        (CrossAttentionSpec(4, 9), 3),
        (EncoderOnlyAttentionSpec(), 0),
    ],
)
def test_no_request_holds_more_than_its_cap(group, blocks):
    """100 tokens in chunks of 8 at most, then one by one: the cap holds, and it is reached or nearly."""
    manager = manager_of(group, num_blocks=120, max_model_len=100, enable_prefix_caching=False)
    seq = manager.add(range(100), num_encoder_tokens=9 if isinstance(group, CrossAttentionSpec) else 0)
    rng, end, most = np.random.default_rng(2), 0, 0
    while end < 100:
        count = min(int(rng.integers(1, 9)), 100 - end)
        manager.allocate_slots([seq], [count])
        most = max(most, sum(block != 0 for block in table(manager, seq)))
        end += count
        manager.commit([seq], [end])

    assert group.max_blocks_per_request(8, 100) == blocks
    assert most <= blocks
    assert most >= blocks - 1


@pytest.mark.parametrize(
    "group",
    [
        FullAttentionSpec(4),
        SlidingWindowSpec(4, 6, extra_retained_tokens=2),
        ChunkedLocalAttentionSpec(4, 6),
        MambaSpec(4, "align"),
        MambaSpec(4, "none"),
        CrossAttentionSpec(4, 9),
        EncoderOnlyAttentionSpec(),
    ],
)
def test_a_spec_skips_what_the_compiled_rule_skips(group):
    rows = manager_of(group, enable_prefix_caching=False)._state.arrays.groups

    for n in range(30):
        assert group.num_skipped_tokens(n) == num_skipped(rows, 0, n)


def test_table_groups_are_documented():
    manager = manager_of(FullAttentionSpec(4), SlidingWindowSpec(2, 4))

    assert [group.block_size for group in manager.table_groups] == [4, 2]
    assert "MultiGroupBlockTable" in KVCacheManager.table_groups.__doc__


def test_a_refused_commit_changes_nothing_for_those_before():
    manager = manager_of()
    seqs = [manager.add([i] * 8) for i in range(3)]
    manager.allocate_slots(seqs[:2], [8, 8])
    before = snapshot(manager.pool)

    for batch, counts in ((seqs[:2], [8, 9]), (seqs, [8, 8, 8])):
        with pytest.raises(ValueError, match=r"num_computed_tokens\[1\]|seqs\[2\] must hold a row"):
            manager.commit(batch, counts)
        assert manager.num_computed_tokens(seqs).tolist() == [0, 0, 0]
        assert snapshot(manager.pool) == before
