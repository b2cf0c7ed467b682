"""What a prefix cache can find in a trace, from its arrivals alone: the ideal, and a perfect LRU in a pool.

    python benchmarks/prefix_cache_bounds.py TRACE [--num-blocks N ...] [--block-size B]

Requests come one after the other. Each hits the longest run of its leading blocks that are in the pool, then
all its blocks are the most recent ones, the first block more so than those behind it, and what was used
least recently goes until the rest fits. Sequences that run at once change nothing in this: they are the most
recent ones, which an LRU keeps anyway. No scheduler, no manager, no hashes: only the reader of traces is
shared with what it is held against.
"""

import argparse
from collections import OrderedDict

from pagedkv.replay.ideal import ideal_hit_rate
from pagedkv.replay.requests import HASH_BLOCK_SIZE
from pagedkv.replay.traces import read_trace


class PerfectLRU:
    """Blocks in runs: a run is named by the prefix key, or the request, that fills it."""

    def __init__(self, num_blocks):
        self.num_free = num_blocks
        self.resident = OrderedDict()  # name -> how many of its leading blocks are there; least recent first

    def use(self, runs):
        """Use [(name, blocks)] in order; returns how many leading blocks were there."""
        found = self.hit(runs)
        for name, count in reversed(runs):
            before = self.resident.get(name, 0)
            self.resident[name] = max(before, count)
            self.resident.move_to_end(name)
            self.num_free -= self.resident[name] - before
        while self.num_free < 0:
            self.evict()
        return found

    def hit(self, runs):
        """Leading blocks that are there."""
        found = 0
        for name, count in runs:
            there = min(count, self.resident.get(name, 0))
            found += there
            if there < count:
                break
        return found

    def evict(self):
        """Drop blocks of the least recent run, the last ones first."""
        name, count = self.resident.popitem(last=False)
        gone = min(count, -self.num_free)
        self.num_free += gone
        if gone < count:
            self.resident[name] = count - gone
            self.resident.move_to_end(name, last=False)


def runs_of(requests, request, block_size):
    """[(name, full blocks)] of a request: those of its prompt by prefix key, then its own."""
    prompt, total = int(requests.prompt_lens[request]), int(requests.total_lens[request])
    runs = []
    for place, key in enumerate(requests.keys_of(request)):
        tokens = min(prompt - place * HASH_BLOCK_SIZE, HASH_BLOCK_SIZE)
        runs.append((key, tokens // block_size))
    named = sum(count for _, count in runs)
    return [*runs, (-1 - request, -(-total // block_size) - named)]


def lru_hit_rate(requests, num_blocks, block_size):
    """Share of prompt tokens that are there when their request comes."""
    cache, hits = PerfectLRU(num_blocks), 0
    for request, prompt in enumerate(requests.prompt_lens.tolist()):
        blocks = cache.use(runs_of(requests, request, block_size))
        hits += min(blocks, (prompt - 1) // block_size) * block_size
    return hits / int(requests.prompt_lens.sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("trace", help="Mooncake JSON lines")
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[250_000, 500_000, 1_000_000, 2_000_000])
    parser.add_argument("--block-size", type=int, default=16, help="tokens; divides 512 (default: 16)")
    args = parser.parse_args()
    requests = read_trace(args.trace).requests
    ideal = ideal_hit_rate(requests, args.block_size)
    print(f"infinite pool: {ideal:.2%} of prompt tokens")
    for num_blocks in args.num_blocks:
        rate = lru_hit_rate(requests, num_blocks, args.block_size)
        print(f"LRU of {num_blocks:,} blocks: {rate:.2%}, {rate / ideal:.2f} of the ideal")


if __name__ == "__main__":
    main()
