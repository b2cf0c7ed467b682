"""Random lives of sequences over one pool, against lists and a simulated KV cache.

Every token writes a value of its own through `slots` and must be read back through them until its
block or its sequence is freed; the copies that the pool asks for run in random order before a step's
writes. Queue order and counts must equal the model's after every call, and a refused call must leave
everything as it was.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pagedkv import errors
from pagedkv.allocation import BlockPool, SequenceBlockTable

from .models import PoolModel, snapshot


class Sequence:
    """What one table should hold: its blocks, and the value of each token."""

    def __init__(self, table):
        self.table = table
        self.blocks = []
        self.values = []
        self.pending = []  # positions that the current step still has to write


class SharingMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 24), block_size=st.sampled_from([1, 2, 3, 4, 16]))
    def make_pool(self, num_blocks, block_size):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.model = PoolModel(num_blocks)
        self.cache = np.full((num_blocks, block_size), -1)
        self.copies = {}  # target -> source
        self.next_value = 0
        self.live = []

    def refuse(self, error, call):
        before = snapshot(self.pool)
        with pytest.raises(error):
            call()
        assert snapshot(self.pool) == before

    def run_step(self, random):
        """Copies first, in any order, then the writes of this step."""
        copies = self.pool.take_copies().tolist()
        assert sorted(copies) == sorted([source, target] for target, source in self.copies.items())
        self.model.free([block for pair in copies for block in pair], held=self.model.pins)
        self.copies.clear()
        random.shuffle(copies)
        for source, target in copies:
            self.cache[target] = self.cache[source]
        for sequence in self.live:
            slots = sequence.table.slots(sequence.pending)
            for position, slot in zip(sequence.pending, slots, strict=True):
                if slot >= 0:
                    self.cache.flat[slot] = sequence.values[position]
            sequence.pending = []

    @rule(target=sequences)
    def add(self):
        self.live.append(Sequence(SequenceBlockTable(self.pool, self.block_size)))
        return self.live[-1]

    @rule(sequence=sequences, num_tokens=st.integers(0, 9))
    def append(self, sequence, num_tokens):
        start = len(sequence.values)
        tail = start // self.block_size
        held = len(sequence.blocks)
        if num_tokens and tail < held and sequence.blocks[tail] == 0:
            self.refuse(errors.InvalidBlockError, lambda: sequence.table.append(num_tokens))
            return
        copied = num_tokens > 0 and tail < held and self.model.cells[sequence.blocks[tail]] > 1
        new = max(-(-(start + num_tokens) // self.block_size) - held, 0)
        taken = self.model.allocate(new + copied)
        if taken is None:
            self.refuse(errors.OutOfBlocksError, lambda: sequence.table.append(num_tokens))
            return
        if copied:
            source, sequence.blocks[tail] = sequence.blocks[tail], taken[0]
            root = self.copies.get(source, source)
            self.copies[taken[0]] = root
            self.model.pins.update([root, taken[0]])
            self.model.cells[source] -= 1

        assert sequence.table.append(num_tokens).tolist() == taken[copied:]

        sequence.blocks += taken[copied:]
        sequence.values += range(self.next_value, self.next_value + num_tokens)
        sequence.pending += range(start, start + num_tokens)
        self.next_value += num_tokens

    @rule(sequence=sequences, num_blocks=st.integers(0, 3))
    def reserve(self, sequence, num_blocks):
        taken = self.model.allocate(num_blocks)
        if taken is None:
            self.refuse(errors.OutOfBlocksError, lambda: sequence.table.allocate(num_blocks))
        else:
            assert sequence.table.allocate(num_blocks).tolist() == taken
            sequence.blocks += taken

    @rule(target=sequences, sequence=sequences, random=st.randoms(use_true_random=False))
    def fork(self, sequence, random):
        self.run_step(random)  # a copy would miss what was appended but not written yet
        child = Sequence(sequence.table.fork())
        child.values = list(sequence.values)
        child.blocks = sequence.blocks[: -(-len(child.values) // self.block_size)]
        self.model.touch(child.blocks)
        self.live.append(child)
        return child

    @rule(target=sequences, sequence=sequences, random=st.randoms(use_true_random=False), data=st.data())
    def adopt(self, sequence, random, data):
        """A new sequence takes over the full leading blocks of another, as a prefix hit does."""
        self.run_step(random)
        full = len(sequence.values) // self.block_size
        usable = next((i for i in range(full) if sequence.blocks[i] == 0), full)
        blocks = sequence.blocks[: data.draw(st.integers(0, usable))]
        child = Sequence(SequenceBlockTable(self.pool, self.block_size))
        child.table.adopt(blocks, len(blocks) * self.block_size)
        child.blocks = list(blocks)
        child.values = sequence.values[: len(blocks) * self.block_size]
        self.model.touch(blocks)
        self.live.append(child)
        return child

    @rule(sequence=sequences, data=st.data())
    def free_logical(self, sequence, data):
        logical = data.draw(st.integers(-1, len(sequence.blocks)))
        if not 0 <= logical < len(sequence.blocks):
            self.refuse(IndexError, lambda: sequence.table.free_logical(logical))
        elif sequence.blocks[logical] == 0:
            self.refuse(errors.DoubleFreeError, lambda: sequence.table.free_logical(logical))
        else:
            sequence.table.free_logical(logical)
            self.model.free([sequence.blocks[logical]])
            sequence.blocks[logical] = 0

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        sequence.table.free()
        self.model.free(sequence.blocks[::-1])
        self.live.remove(sequence)
        self.refuse(errors.StaleSequenceError, sequence.table.free)

    @rule(random=st.randoms(use_true_random=False))
    def step(self, random):
        self.run_step(random)

    @rule(data=st.data())
    def bad_free(self, data):
        block = data.draw(st.integers(-2, self.pool.num_blocks + 1))
        inside = 0 < block < self.pool.num_blocks
        times = self.model.cells[block] + 1 if inside else 1
        if block != 0:
            expected = errors.DoubleFreeError if inside else errors.InvalidBlockError
            self.refuse(expected, lambda: self.pool.free([block] * times))

    @invariant()
    def pool_equals_model(self):
        assert self.pool.free_block_ids().tolist() == self.model.queue
        assert self.pool.ref_counts.tolist() == self.model.ref_counts()
        assert self.pool.num_free_blocks == len(self.model.queue)
        assert 0.0 <= self.pool.usage <= 1.0

    @invariant()
    def counts_are_table_cells_and_pins(self):
        cells = np.concatenate([s.table.block_ids for s in self.live] or [np.empty(0, np.int32)])
        owned = np.bincount(cells[cells > 0], minlength=self.pool.num_blocks)
        assert owned.tolist() == (self.pool.ref_counts - self.pool.pin_counts).tolist()
        assert self.pool.num_free_blocks + np.count_nonzero(self.pool.ref_counts) == self.pool.num_blocks - 1

    @invariant()
    def every_written_token_reads_back(self):
        for sequence in self.live:
            assert sequence.table.block_ids.tolist() == sequence.blocks
            slots = sequence.table.slots(np.arange(len(sequence.values)))
            copied = set(self.copies)
            for position, slot in enumerate(slots.tolist()):
                block = sequence.blocks[position // self.block_size]
                assert (slot == -1) == (block == 0)
                if block == 0 or position in sequence.pending:
                    continue
                source = self.copies[block] if block in copied else block  # not copied yet
                assert self.cache[source, position % self.block_size] == sequence.values[position]


SharingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_sharing = SharingMachine.TestCase
