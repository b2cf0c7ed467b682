"""Where a manager's aligned states stand: by the tokens of the step, whatever was allocated for before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import errors
from pagedkv.allocation.group_specs import FullAttentionSpec, MambaSpec
from pagedkv.allocation.manager import KVCacheManager

from .test_manager import manager_of, run, table


def cdiv(a, b):
    return -(-a // b)


def test_lookahead_moves_no_state():
    """Blocks of 4, 3 tokens computed: a step of one ends in column 0, wherever a drafter goes on."""
    manager = manager_of(MambaSpec(4, "align", num_speculative_blocks=2))
    seq = manager.add(range(3))
    run(manager, seq)
    manager.append([seq], [9])

    assert manager.num_blocks_needed([seq], [1], num_lookahead_tokens=2).tolist() == [0]
    assert manager.allocate_slots([seq], [1], num_lookahead_tokens=2).block_ids.size == 0
    assert table(manager, seq) == [1, 2, 3]
    manager.commit([seq], [4])
    assert table(manager, seq) == [1, 2, 3]


def test_lookahead_gives_no_right_to_commit_where_states_stand_by_the_step():
    """The step's own drafts were taken for lookahead: the table looked for their state elsewhere."""
    for group, refused in ((MambaSpec(4, "align", 2), True), (MambaSpec(4, "none", 2), False)):
        manager = manager_of(FullAttentionSpec(4), group, enable_prefix_caching=False)
        seq = manager.add(range(8))
        for end in (1, 2):  # at first a block is taken, then there are slots enough
            manager.allocate_slots([seq], [1], num_lookahead_tokens=2)
            if refused:
                with pytest.raises(ValueError, match=f"{end} allocated for, got {end + 1}"):
                    manager.commit([seq], [end + 1])
            manager.commit([seq], [end])
        if not refused:
            manager.commit([seq], [4])


@pytest.mark.parametrize(
    ("computed", "allocated", "row", "freed"),
    [
        (0, [10], [0, 0, 1, 2, 3], 0),
        (0, [10, 6], [0, 1, 2, 3], 0),
        (0, [10, 4], [1, 2, 3], 0),
        (0, [4, 10], [0, 0, 1, 2, 3], 0),
        (3, [2], [1, 2, 3, 4], 0),
        (3, [2, 1], [1, 3, 4], 1),
        (3, [2, 1, 2], [1, 3, 4, 2], 1),
        (3, [10, 9, 6, 2], [1, 2, 3, 4], 0),
        (3, [10, 1], [1, 3, 4], 1),
        (3, [1, 2, 9, 60, 14], [1, 0, 0, 0, 2, 3, 4], 0),
        (4, [9, 1], [1, 2, 3, 4], 0),
        (4, [9, 4, 5, 1], [1, 2, 3, 4], 0),
    ],
)
def test_the_last_allocation_before_a_step_says_where_its_state_stands(computed, allocated, row, freed):
    """A row holds the last state, one block for the next and one for each of 2 drafts, and no other."""
    manager = manager_of(MambaSpec(4, "align", num_speculative_blocks=2), max_model_len=64)
    seq = manager.add(range(64))
    if computed:
        run(manager, seq, computed)
    for count in allocated:
        free = manager.num_free_blocks
        needed = int(manager.num_blocks_needed([seq], [count])[0])
        taken = manager.allocate_slots([seq], [count]).block_ids.size
        assert taken == needed
        assert free - manager.num_free_blocks == needed - (freed if count == 1 else 0)

    assert table(manager, seq) == row
    assert sum(manager.pool.ref_counts > 0) == sum(block > 0 for block in row)
    with pytest.raises(ValueError, match=f"{computed + allocated[-1]} allocated for"):
        manager.commit([seq], [computed + allocated[-1] + 1])
    manager.commit([seq], [computed + allocated[-1]])
    states = table(manager, seq)
    assert len(states) == cdiv(computed + allocated[-1], 4) + 2
    assert states[-3] == row[-3]


def test_a_commit_of_nothing_leaves_the_last_state_where_it_is():
    """The step was dropped: the block of the next state holds nothing."""
    manager = manager_of(MambaSpec(4, "align", num_speculative_blocks=1))
    seq = manager.add(range(20))
    run(manager, seq, 3)
    manager.allocate_slots([seq], [4])

    manager.commit([seq], [3])

    assert table(manager, seq) == [1, 2, 3]
    manager.allocate_slots([seq], [1])
    assert table(manager, seq) == [1, 3]


def test_drafts_that_are_taken_back_before_the_step_leave_the_state_to_be_found():
    """Allocated for with two drafts, which are truncated: the step has one token, in the old column."""
    manager = manager_of(MambaSpec(4, "align"))
    seq = manager.add(range(4))
    run(manager, seq, 3)
    manager.append([seq], [8, 9], [2])
    manager.allocate_slots([seq], [3])
    assert table(manager, seq) == [1, 2]

    manager.truncate(seq, 4)
    manager.allocate_slots([seq], [1])

    assert table(manager, seq) == [1]
    assert manager.num_free_blocks == manager.pool.num_blocks - 2


def test_a_state_block_given_back_waits_for_the_steps_in_flight():
    manager = manager_of(MambaSpec(4, "align"), defer_frees=True)
    seq = manager.add(range(9))
    run(manager, seq, 3)
    manager.allocate_slots([seq], [5])
    free, step = manager.num_free_blocks, manager.begin_step()

    manager.allocate_slots([seq], [1])

    assert (table(manager, seq), manager.num_free_blocks) == ([1], free)
    manager.end_step(step)
    assert manager.num_free_blocks == free + 1


def test_a_refused_allocation_moves_no_state():
    manager = manager_of(MambaSpec(4, "align"), num_blocks=4, enable_prefix_caching=False)
    first, second = manager.add(range(9)), manager.add(range(40))
    run(manager, first, 3)
    manager.allocate_slots([first], [5])
    other = manager.add(range(4))
    run(manager, other)

    with pytest.raises(errors.OutOfBlocksError):
        manager.allocate_slots([first, second], [1, 1])

    assert table(manager, first) == [1, 2]
    manager.commit([first], [8])
    assert table(manager, first)[-1] == 2


@st.composite
def allocations(draw):
    """Block size, drafts' blocks, and steps: (counts of the allocations, lookahead, computed in the end)."""
    counts = st.lists(st.integers(1, 12), min_size=1, max_size=3)
    steps = st.lists(st.tuples(counts, st.integers(0, 9), st.integers(0, 12)), max_size=6)
    return draw(st.integers(1, 6)), draw(st.integers(0, 3)), draw(steps)


@settings(max_examples=150, deadline=None)
@given(lives=allocations(), caching=st.booleans(), forks=st.booleans())
def test_a_row_is_the_last_state_and_scratch_from_the_steps_last_token_on(lives, caching, forks):
    """By the definition: state after the computed tokens, NULL, the step's state, its drafts'; cap kept."""
    size, spare, steps = lives
    group = MambaSpec(size, "align", spare)
    manager = KVCacheManager(
        [FullAttentionSpec(1), group], 400, max_num_seqs=2, max_model_len=64, enable_prefix_caching=caching
    )
    seq, computed, state = manager.add(range(64)), 0, None
    for counts, lookahead, num_kept in steps:
        for count in counts:
            manager.allocate_slots([seq], [count], num_lookahead_tokens=lookahead)
            end = min(computed + count, 64)
            blocks = table(manager, seq, 1)
            kept, column = cdiv(computed, size), (end - 1) // size
            assert len(blocks) == column + 1 + spare
            assert computed == 0 or blocks[kept - 1] == state
            assert not any(blocks[: max(kept - 1, 0)])
            assert not any(blocks[kept:column])
            assert 0 not in blocks[column:]
            assert len({0, *blocks[column:]}) == 2 + spare
            assert sum(block > 0 for block in blocks) <= group.max_blocks_per_request(12, 64)
            assert manager.pool.is_writable(blocks[column:]).all()
        if num_kept > 0:
            state = blocks[column]
        computed = min(computed + num_kept, end)
        manager.commit([seq], [computed])
        if forks and num_kept:
            child = int(manager.fork(seq)[0])
            manager.copies_done(manager.take_block_copies())
            manager.free([child])
    manager.free([seq])
    assert manager.num_free_blocks == 399
