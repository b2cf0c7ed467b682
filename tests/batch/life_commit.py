"""How a life's steps are committed: eagerly or as a replay, padded or not, by the device's counts or not."""

from collections import deque

import numpy as np

from pagedkv import CapacityError
from tests.tables.models import to_numpy

from .life_expect import DEVICE_ARRAYS, Expected, check_no_trace, check_step, equal, snapshot
from .life_model import Plan, Request

OUTS = (0, 2)


class Committer:
    """Commits steps, checks all that they hand out, and that earlier ones keep what is theirs."""

    def __init__(self, world):
        self.world, self.batch = world, world.batch
        self.captured = {}
        self.kept = deque(maxlen=4)  # (metadata, what it held when it was handed out)
        self.shown = {}  # output set -> the same, of its last step

    def commit(self, expected, random):
        """Commit the batch and return its metadata."""
        num_reqs, num_tokens = self.padded(expected, random)
        out, longest = random.choice(OUTS), random.choice([None, None, self.world.max_model_len + 9])
        copies = self.world.table.num_h2d_copies
        metadata = None
        believed = [plan.believed for plan in expected.plans]
        if believed == expected.computed and random.random() < 0.25:
            metadata = self.replay((num_reqs, num_tokens, out), longest)
        if metadata is None:
            computed = None
            if believed != expected.computed or random.random() < 0.3:
                computed = self.world.device_array(np.array(expected.computed, np.int32))
            pads = random.random() < 0.7 or num_reqs > expected.num_reqs
            metadata = self.batch.commit(
                num_reqs_padded=num_reqs if pads else None,
                num_tokens_padded=num_tokens if pads or num_tokens > expected.num_tokens else None,
                num_computed_tokens=computed,
                max_seq_len=longest,
                out=out,
            )
        assert self.world.table.num_h2d_copies == copies + 1, "a step is one copy"
        self.check(metadata, expected, (num_reqs, num_tokens, longest), out)
        return metadata

    def padded(self, expected, random):
        """The step's own sizes, a captured graph's, or any that the consumer reads."""
        how = random.choice(["none", "graph", "graph", "any"])
        if how == "any":
            most_tokens, most_reqs = self.world.max_tokens, self.world.num_rows
            num_reqs = random.choice([most_reqs, random.randint(expected.num_reqs, most_reqs)])
            return num_reqs, random.choice([most_tokens, random.randint(expected.num_tokens, most_tokens)])
        sizes = (expected.num_reqs, expected.num_tokens)
        if how == "none":
            return sizes
        shape = self.world.sizes.dispatch(*self.batch.sizes())
        num_reqs = expected.num_reqs if shape.num_reqs_padded is None else shape.num_reqs_padded
        assert num_reqs >= expected.num_reqs
        assert shape.num_tokens_padded >= expected.num_tokens
        return num_reqs, shape.num_tokens_padded

    def replay(self, key, longest):
        """Run the step as a replay of a captured one; None where that does not hold its new blocks."""
        num_reqs, num_tokens, out = key
        if key not in self.captured:
            self.captured[key] = self.world.table.captured_step(
                num_reqs, num_tokens, max_new_blocks=8, out=out
            )
        captured = self.captured[key]
        try:
            metadata = self.batch.pack(captured, max_seq_len=longest)
        except CapacityError:
            return None
        captured.enqueue()
        captured.mark_replayed()
        return metadata

    def dummy(self, random):
        """A step of requests that do not exist."""
        world = self.world
        num_reqs = random.choice([world.num_rows, random.randint(0, world.num_rows)])
        num_tokens = random.randint(0, world.max_tokens) if num_reqs else 0
        lengths = [num_tokens // num_reqs + (i < num_tokens % num_reqs) for i in range(num_reqs)]
        seq_len = random.choice([None, max([world.max_model_len, *lengths])])
        out, copies = random.choice(OUTS), world.table.num_h2d_copies
        metadata = world.batch.dummy(num_reqs, num_tokens, seq_len=seq_len, out=out)
        assert world.table.num_h2d_copies == copies + 1
        plans = []
        for length in lengths:
            nobody = Request("nobody", [0], 1, world.tags)
            nobody.computed = 0 if seq_len is None else seq_len - length
            plans.append(Plan(nobody, "dummy", length, believed=nobody.computed))
        expected = Expected(world, plans, [[[] for _ in world.specs] for _ in plans])
        self.check(metadata, expected, (num_reqs, num_tokens, None), out)
        return metadata

    def check(self, metadata, expected, sizes, out):
        check_step(metadata, expected, *sizes)
        check_no_trace(metadata, expected.num_reqs, expected.num_tokens, self.world)
        for earlier, (host, _, _) in self.kept:
            for name, values in host.items():
                equal(values, getattr(earlier.batch, name), f"{name} of an earlier step")
        self.shown.pop(out, None)
        for earlier, (_, device, slots) in self.shown.values():
            for name in DEVICE_ARRAYS:
                equal(device[name], getattr(earlier.batch, name), f"{name} of the other output set")
            for common, values in zip(earlier, slots, strict=True):
                equal(values, to_numpy(common.slot_mapping), "slots of the other output set")
        self.shown[out] = metadata, snapshot(metadata)
        self.kept.append(self.shown[out])
