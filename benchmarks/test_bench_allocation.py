"""Allocation per step, beside the two plain ways, in one run; warm, and with the CPU's caches flushed.

A decode step is whole: a token appended to every sequence (hashed where a block is full), slots for all of
them, and what was computed committed (full blocks published). `allocate_slots` alone is measured too.
"""

import numpy as np
import pytest

from pagedkv.allocation.block_pool import BlockPool
from pagedkv.allocation.group_specs import FullAttentionSpec
from pagedkv.allocation.manager import KVCacheManager

from .allocators import BLOCK_SIZE, CountingAllocator, ListStack

ROUNDS = 150
FLUSHED = np.zeros(16 * 2**20)  # 128 MiB
FORMS = ("manager", "manager-siphash", "manager-sha256", "counting", "counting-sha256", "stack")


class Managed:
    """A manager behind the calls of the plain allocators."""

    def __init__(self, num_blocks, algorithm, max_num_seqs=1024, max_model_len=8192):
        self.manager = KVCacheManager(
            [FullAttentionSpec(BLOCK_SIZE)],
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=algorithm is not None,
            algorithm=algorithm or "sha256",
        )

    def start(self, prompts):
        self.seqs = np.array([self.manager.add(prompt) for prompt in prompts], np.int64)
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self.ones = np.ones(len(prompts), np.int32)
        self.manager.allocate_slots(self.seqs, self.lengths)
        self.manager.commit(self.seqs, self.lengths)

    def decode(self, _, tokens):
        self.manager.append(self.seqs, tokens)
        self.manager.allocate_slots(self.seqs, self.ones)
        self.lengths += 1
        self.manager.commit(self.seqs, self.lengths)

    def add(self, prompt):
        seq = self.manager.add(prompt)
        hit = self.manager.match_prefix(seq)
        self.manager.allocate_slots([seq], [len(prompt) - hit])
        self.manager.commit([seq], [len(prompt)])
        return seq

    def free(self, seq):
        self.manager.free([seq])


def make(form, num_blocks=200_000):
    kind, _, algorithm = form.partition("-")
    if kind == "manager":
        return Managed(num_blocks, algorithm or None)
    return ListStack(num_blocks) if kind == "stack" else CountingAllocator(num_blocks, bool(algorithm))


def prompts_of(num, length=500, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, length + int(rng.integers(16))).astype(np.int32) for _ in range(num)]


def flush():
    FLUSHED[:] += 1


@pytest.mark.parametrize("caches", ["warm", "flushed"])
@pytest.mark.parametrize("num_seqs", [32, 256, 1024])
@pytest.mark.parametrize("form", FORMS)
def test_decode_step(benchmark, form, num_seqs, caches):
    benchmark.group = f"decode step/{num_seqs} sequences, caches {caches}"
    allocator = make(form)
    prompts = prompts_of(num_seqs)
    if isinstance(allocator, Managed):
        allocator.start(prompts)
        seqs, tokens = None, np.arange(num_seqs, dtype=np.int32)
    else:
        seqs, tokens = [allocator.add(prompt.tolist()) for prompt in prompts], list(range(num_seqs))

    def setup():
        if caches == "flushed":
            flush()
        return (seqs, tokens), {}

    benchmark.pedantic(allocator.decode, setup=setup, rounds=ROUNDS, warmup_rounds=20)


@pytest.mark.parametrize(
    ("num_blocks", "num_seqs", "length"),
    [
        (10_000, 512, 50),
        (10_000_000, 512, 50),
        (200_000, 256, 100),
        (200_000, 256, 6000),
        (200_000, 1024, 500),
    ],
)
def test_allocate_slots_alone(benchmark, num_blocks, num_seqs, length):
    """Neither the size of the pool nor the length of the context is in the cost."""
    benchmark.group = f"allocate_slots/{num_seqs} sequences"
    allocator = Managed(num_blocks, None)
    allocator.start(prompts_of(num_seqs, length))
    manager, new = allocator.manager, np.zeros(num_seqs, np.int32)

    def setup():
        manager.commit(allocator.seqs, allocator.lengths + new)
        manager.append(allocator.seqs, allocator.ones)
        new[:] += 1
        return (allocator.seqs, allocator.ones), {}

    benchmark.pedantic(manager.allocate_slots, setup=setup, rounds=ROUNDS, warmup_rounds=20)


@pytest.mark.parametrize("form", FORMS)
def test_admit_2000_tokens(benchmark, form):
    """A prompt of 2,000 tokens that nobody has: hashed, looked up, allocated, published."""
    benchmark.group = "admit/2,000 tokens"
    allocator = make(form)
    prompts = iter(prompts_of(ROUNDS + 20, 1984, seed=1))
    plain = not isinstance(allocator, Managed)
    last = []

    def setup():
        if last:
            allocator.free(last.pop())
        prompt = next(prompts)
        return (prompt.tolist() if plain else prompt,), {}

    benchmark.pedantic(lambda p: last.append(allocator.add(p)), setup=setup, rounds=ROUNDS, warmup_rounds=20)


@pytest.mark.parametrize("form", [form for form in FORMS if "-" in form])
def test_hit_1000_tokens(benchmark, form):
    """A prompt of 2,000 tokens of which 1,000 are cached and held by another sequence."""
    benchmark.group = "hit/1,000 of 2,000 tokens"
    allocator = make(form)
    shared = np.arange(1000, dtype=np.int32)
    prompts = iter(np.concatenate([shared, p]) for p in prompts_of(ROUNDS + 21, 985, seed=2))
    plain = not isinstance(allocator, Managed)
    allocator.add(next(prompts).tolist() if plain else next(prompts))
    last = []

    def setup():
        if last:
            allocator.free(last.pop())
        prompt = next(prompts)
        return (prompt.tolist() if plain else prompt,), {}

    benchmark.pedantic(lambda p: last.append(allocator.add(p)), setup=setup, rounds=ROUNDS, warmup_rounds=20)


@pytest.mark.parametrize("form", FORMS)
def test_churn(benchmark, form):
    """1,000 sequences of which 20 end per step and 20 with prompts of 2,000 tokens begin."""
    benchmark.group = "churn/20 of 1,000 sequences, 2,000 tokens each"
    allocator = make(form)
    plain = not isinstance(allocator, Managed)
    prompts = prompts_of(200, 1984, seed=3)
    prompts = [prompt.tolist() for prompt in prompts] if plain else prompts
    live = [allocator.add(prompts[i % 200]) for i in range(1000)]
    state = {"at": 0}

    def step():
        for _ in range(20):
            allocator.free(live.pop(0))
            live.append(allocator.add(prompts[state["at"] % 200]))
            state["at"] += 1

    benchmark.pedantic(step, rounds=20, warmup_rounds=2)


@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("caching", [False, True])
def test_free_100000_blocks(benchmark, caching, order):
    benchmark.group = f"free/100,000 blocks, {order}"
    pool = BlockPool(200_000, enable_prefix_caching=caching)
    rng = np.random.default_rng(0)

    def setup():
        blocks = pool.allocate(100_000)
        if order == "shuffled":
            rng.shuffle(blocks)
        return (blocks,), {}

    benchmark.pedantic(pool.free, setup=setup, rounds=20, warmup_rounds=2)
