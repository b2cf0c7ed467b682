"""Random lives of cached chains over one pool, against lists and dicts.

After every call the queue order, the counts and the index equal the model's; the events so far, replayed,
give the set of keys; and as long as nothing was evicted by hand, a cached block's whole prefix is cached.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pagedkv.allocation import BlockPool
from pagedkv.allocation.block_records import UNCACHED
from pagedkv.allocation.events import AllBlocksCleared, BlockStored
from pagedkv.allocation.hashing import ALGORITHMS, BlockHasher

from .models import PoolModel

TOKENS = st.lists(st.integers(0, 1), max_size=8)


class PrefixMachine(RuleBasedStateMachine):
    chains = Bundle("chains")

    @initialize(num_blocks=st.integers(1, 24), algorithm=st.sampled_from(ALGORITHMS))
    def make_pool(self, num_blocks, algorithm):
        self.pool = BlockPool(num_blocks, enable_prefix_caching=True, enable_events=True)
        self.model = PoolModel(num_blocks)
        self.hasher = BlockHasher(1, algorithm)
        self.parents = {}  # key -> key of the block before
        self.told = set()
        self.by_hand = False  # whether blocks were evicted out of order
        self.num_evictions = 0

    def chain_keys(self, tokens):
        keys = self.hasher.hash_blocks(tokens)
        names = [key.tobytes() for key in keys]
        self.parents.update(zip(names, [None, *names], strict=False))
        return keys, names

    @rule(target=chains, tokens=TOKENS, group=st.integers(0, 1), share=st.booleans())
    def add(self, tokens, group, share):
        """Look up, hold what was found, take the rest, publish all; without `share` duplicates arise."""
        keys, names = self.chain_keys(tokens)
        expected = []
        for name in names:
            block = self.model.find(name, group)
            if block is None:
                break
            expected.append(block)

        hits = self.pool.longest_prefix(keys, group).tolist()

        assert hits == expected
        hits = hits if share else []
        cached_free = sum(self.model.refs(block) == 0 for block in hits)
        if len(tokens) - len(hits) + cached_free > len(self.model.queue):
            return []
        self.pool.touch(hits)
        self.model.touch(hits)
        taken = self.model.allocate(len(tokens) - len(hits))
        assert self.pool.allocate(len(taken)).tolist() == taken
        blocks = hits + taken
        self.pool.publish(blocks, keys, group)
        for block, name in zip(blocks, names, strict=True):
            self.model.publish(block, name, group)
        return blocks

    @rule(chain=consumes(chains), last=st.booleans())
    def free(self, chain, last):
        self.pool.free(chain[::-1], last=last)
        self.model.free(chain[::-1], last=last)

    @rule(target=chains, count=st.integers(0, 5))
    def take_without_keys(self, count):
        taken = self.model.allocate(count) or []
        assert self.pool.allocate(len(taken)).tolist() == taken
        return taken

    @rule(data=st.data())
    def evict(self, data):
        blocks = data.draw(st.lists(st.integers(0, self.model.num_blocks - 1), max_size=3))
        cached = {block for block in blocks if block in self.model.key}
        self.by_hand |= bool(cached)
        assert self.pool.evict(blocks) == len(cached)
        for block in dict.fromkeys(blocks):
            if block in cached:
                self.model.forget(block)

    @rule()
    def reset(self):
        possible = len(self.model.queue) == self.model.num_blocks - 1
        assert self.pool.reset_prefix_cache() == possible
        if possible:
            self.model.key.clear()
            self.model.blocks.clear()
            self.model.num_evictions = 0
            self.by_hand = False

    @invariant()
    def queue_and_counts_equal_the_model(self):
        stats = self.pool.stats()
        assert self.pool.free_block_ids().tolist() == self.model.queue
        assert self.pool.ref_counts.tolist() == self.model.ref_counts()
        assert stats.num_free_blocks == len(self.model.queue)
        assert stats.num_evictions == self.model.num_evictions
        assert stats.num_cached_keys == len(self.model.blocks)
        assert stats.num_cached_blocks == len(self.model.key) == np.count_nonzero(self.cached())
        assert 0.0 <= stats.usage <= 1.0

    def cached(self):
        return self.pool._arrays.twins[:, 0] != UNCACHED

    @invariant()
    def every_key_finds_its_oldest_block_and_no_other(self):
        for name in self.parents:
            key = np.frombuffer(name, np.uint64).reshape(1, 2)
            for group in range(2):
                block = self.model.find(name, group)
                assert self.pool.longest_prefix(key, group).tolist() == [block] * (block is not None)
        entries = self.pool._arrays.entries
        assert np.count_nonzero(entries) == len(self.model.blocks)

    @invariant()
    def replayed_events_give_the_keys(self):
        for event in self.pool.take_events():
            if isinstance(event, AllBlocksCleared):
                self.told.clear()
            elif isinstance(event, BlockStored):
                stored = {(block_hash, event.group) for block_hash in event.block_hashes}
                assert not stored & self.told
                self.told |= stored
            else:
                self.told.remove((event.block_hash, event.group))
        assert self.told == set(self.model.blocks)

    @invariant()
    def the_prefix_of_a_cached_block_is_cached(self):
        if self.by_hand:
            return
        for key, group in self.model.blocks:
            parent = self.parents[key]
            assert parent is None or (parent, group) in self.model.blocks


PrefixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_prefixes = PrefixMachine.TestCase
