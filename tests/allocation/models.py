"""The pool again, as lists and dicts: what each call must do, written for the reader."""

from collections import Counter


class PoolModel:
    """A free list whose head is handed out, the cells and pins that hold each block, and the keys."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.queue = list(range(1, num_blocks))
        self.cells = Counter()
        self.pins = Counter()
        self.key = {}  # block -> (key, group)
        self.blocks = {}  # (key, group) -> blocks, oldest first
        self.events = []
        self.num_evictions = 0

    def allocate(self, count):
        if count > len(self.queue):
            return None
        taken, self.queue = self.queue[:count], self.queue[count:]
        self.cells.update(taken)
        for block in taken:
            if block in self.key:
                self.num_evictions += 1
                self.forget(block)
        return taken

    def free(self, block_ids, held=None, last=False):
        """Drop one holder per id, of the table cells unless told otherwise.

        What is left free comes to the head, or to the tail if it is cached.
        """
        held = self.cells if held is None else held
        plain, cached = [], []
        for block in block_ids:
            if block == 0:
                continue
            held[block] -= 1
            assert held[block] >= 0
            if self.refs(block) == 0:
                (cached if last or block in self.key else plain).append(block)
        self.queue = plain + self.queue + cached

    def touch(self, block_ids):
        for block in block_ids:
            if block == 0:
                continue
            if block in self.queue:
                self.queue.remove(block)
            self.cells[block] += 1

    def publish(self, block, key, group=0):
        if block == 0 or block in self.key:
            return
        self.key[block] = key, group
        self.blocks.setdefault((key, group), []).append(block)
        if self.blocks[key, group] == [block]:
            self.events.append(("stored", key, group))

    def forget(self, block):
        key = self.key.pop(block)
        self.blocks[key].remove(block)
        if not self.blocks[key]:
            del self.blocks[key]
            self.events.append(("removed", *key))

    def find(self, key, group=0):
        """The oldest surviving block of a key, or None."""
        return self.blocks.get((key, group), [None])[0]

    def refs(self, block):
        return self.cells[block] + self.pins[block]

    def ref_counts(self):
        return [self.refs(block) for block in range(self.num_blocks)]


def snapshot(pool):
    """Everything that a refused call must leave as it was."""
    arrays = pool._arrays
    return [pool.free_block_ids().tolist(), *(array.tolist() for array in arrays[:5])]
