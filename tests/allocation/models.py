"""The pool again, as lists and dicts: what each call must do, written for the reader."""

from collections import Counter


class PoolModel:
    """A free list whose head is handed out, and the cells and pins that hold each block."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.queue = list(range(1, num_blocks))
        self.cells = Counter()
        self.pins = Counter()

    def allocate(self, count):
        if count > len(self.queue):
            return None
        taken, self.queue = self.queue[:count], self.queue[count:]
        self.cells.update(taken)
        return taken

    def free(self, block_ids, held=None):
        """Drop one holder per id, of the table cells unless told otherwise; what is left free leads."""
        held = self.cells if held is None else held
        released = []
        for block in block_ids:
            if block == 0:
                continue
            held[block] -= 1
            assert held[block] >= 0
            if self.refs(block) == 0:
                released.append(block)
        self.queue = released + self.queue

    def touch(self, block_ids):
        for block in block_ids:
            if block == 0:
                continue
            if block in self.queue:
                self.queue.remove(block)
            self.cells[block] += 1

    def refs(self, block):
        return self.cells[block] + self.pins[block]

    def ref_counts(self):
        return [self.refs(block) for block in range(self.num_blocks)]


def snapshot(pool):
    """Everything that a refused call must leave as it was."""
    return pool.free_block_ids().tolist(), pool.ref_counts.tolist(), pool.pin_counts.tolist()
