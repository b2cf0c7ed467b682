"""The plain ways to allocate blocks, for comparison: a call and a loop per sequence, in Python."""

import hashlib
from collections import deque

BLOCK_SIZE = 16


class ListStack:
    """A list of free blocks and a list per sequence: the least that one can do, without sharing."""

    def __init__(self, num_blocks):
        self.free_blocks = list(range(num_blocks - 1, 0, -1))
        self.tables = {}
        self.lengths = {}
        self.next = 0

    def add(self, tokens):
        self.next += 1
        self.tables[self.next], self.lengths[self.next] = [], 0
        self.grow(self.next, len(tokens))
        return self.next

    def grow(self, seq, num_tokens):
        self.lengths[seq] += num_tokens
        table, needed = self.tables[seq], -(-self.lengths[seq] // BLOCK_SIZE)
        while len(table) < needed:
            table.append(self.free_blocks.pop())

    def decode(self, seqs, tokens):
        del tokens  # nothing is hashed here
        for seq in seqs:
            self.grow(seq, 1)

    def free(self, seq):
        self.free_blocks.extend(reversed(self.tables.pop(seq)))
        del self.lengths[seq]


class CountingAllocator:
    """Dict reference counts, a free queue and a dict of chained hashes, sequence by sequence."""

    def __init__(self, num_blocks, caching):
        self.caching = caching
        self.free_blocks = deque(range(1, num_blocks))
        self.refs = {}
        self.block_of, self.hash_of = {}, {}
        self.sequences = {}
        self.next = 0

    def add(self, tokens):
        self.next += 1
        sequence = {"tokens": list(tokens), "hashes": [], "table": []}
        self.sequences[self.next] = sequence
        if self.caching:
            self.hash(sequence)
            for digest in sequence["hashes"][: (len(tokens) - 1) // BLOCK_SIZE]:
                block = self.block_of.get(digest)
                if block is None:
                    break
                self.touch(block)
                sequence["table"].append(block)
        self.allocate(sequence)
        return self.next

    def hash(self, sequence):
        tokens, hashes = sequence["tokens"], sequence["hashes"]
        while (len(hashes) + 1) * BLOCK_SIZE <= len(tokens):
            start = len(hashes) * BLOCK_SIZE
            parent = hashes[-1] if hashes else b""
            block = repr(tokens[start : start + BLOCK_SIZE]).encode()
            hashes.append(hashlib.sha256(parent + block).digest())

    def touch(self, block):
        if self.refs.get(block, 0) == 0:
            self.free_blocks.remove(block)
        self.refs[block] = self.refs.get(block, 0) + 1

    def allocate(self, sequence):
        table = sequence["table"]
        while len(table) * BLOCK_SIZE < len(sequence["tokens"]):
            block = self.free_blocks.popleft()
            old = self.hash_of.pop(block, None)
            if old is not None and self.block_of.get(old) == block:
                del self.block_of[old]
            self.refs[block] = 1
            table.append(block)
        for j in range(len(sequence["hashes"])) if self.caching else ():
            if table[j] not in self.hash_of:
                self.hash_of[table[j]] = sequence["hashes"][j]
                self.block_of.setdefault(sequence["hashes"][j], table[j])

    def decode(self, seqs, tokens):
        for seq, token in zip(seqs, tokens, strict=True):
            sequence = self.sequences[seq]
            sequence["tokens"].append(token)
            if self.caching and len(sequence["tokens"]) % BLOCK_SIZE == 0:
                self.hash(sequence)
            if len(sequence["tokens"]) > len(sequence["table"]) * BLOCK_SIZE or (
                self.caching and len(sequence["tokens"]) % BLOCK_SIZE == 0
            ):
                self.allocate(sequence)

    def free(self, seq):
        for block in reversed(self.sequences.pop(seq)["table"]):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free_blocks.append(block)
