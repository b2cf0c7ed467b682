"""Steps and metadata builders as small as can be, and what a captured graph would read of them."""

from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace

import numpy as np

MOST = 16
"""Elements of a builder's private buffers."""


@dataclass(frozen=True)
class Batch:
    """What all groups share: the lengths stand for everything that a builder derives from a batch."""

    seq_lens: np.ndarray
    ubatch: int = 0


@dataclass(frozen=True)
class Common:
    """One group's part of a step."""

    batch: Batch
    spec: object
    block_table_tensor: np.ndarray
    slot_mapping: np.ndarray
    kernel_tables: tuple = ()

    @property
    def ubatch(self):
        return self.batch.ubatch

    @property
    def seq_lens(self):
        return self.batch.seq_lens

    def kernel_block_table(self, view):
        return self.kernel_tables[view]


@dataclass(frozen=True)
class Step:
    batch: Batch
    groups: tuple

    @cached_property
    def step(self):
        """Where metadata says what its table was made of: the same tuple each time."""
        return SimpleNamespace(geometry=SimpleNamespace(specs=tuple(one.spec for one in self.groups)))


def step_of(specs, seq_lens, first_id, ubatch=0):
    """A step whose every table, slot mapping and length is told apart by its values."""
    batch = Batch(np.asarray(seq_lens, np.int32), ubatch)
    groups = []
    for spec in specs:
        table = np.arange(first_id, first_id + len(seq_lens), dtype=np.int32)
        kernel_tables = tuple(table * 10 + view for view in range(len(spec.kernel_views)))
        groups.append(Common(batch, spec, table, table * 100, kernel_tables))
        first_id += len(seq_lens)
    return Step(batch, tuple(groups))


@dataclass(frozen=True)
class Built:
    """A kernel's metadata; `lengths` and `indices` are a builder's buffers, of stable address."""

    setup: object
    num_reqs: int
    lengths: np.ndarray
    indices: np.ndarray
    table: np.ndarray
    slots: np.ndarray
    for_capture: bool

    def reads(self):
        """What a graph captured with this object reads now: (setup, lengths, indices)."""
        return self.setup, self.lengths.tolist(), self.indices.tolist()


class Builder:
    """Writes a batch's lengths, and indices derived from a table, into buffers of its own.

    In a run that is no capture, indices of a batch without lengths aren't written: nothing but a graph would
    read them.
    """

    supports_update_block_table = False

    def __init__(self, spec, view, ubatch, setup=None, full=np.full):
        self.given = (spec, view, ubatch)
        self.setup = setup, view  # a schedule depends on the block size that the kernel reads
        self.lengths, self.indices = full(MOST, -9, np.int32), full(MOST, -9, np.int32)
        self.calls = []

    def _write(self, buffer, values):
        buffer[: len(values)] = values
        buffer[len(values) :] = 0

    def build(self, common, *, for_capture):
        self.calls.append(("build", for_capture))
        self._write(self.lengths, common.seq_lens)
        if for_capture or common.seq_lens.any():
            self._write(self.indices, first_column(common.block_table_tensor))
        table, slots = common.block_table_tensor, common.slot_mapping
        return Built(self.setup, len(table), self.lengths, self.indices, table, slots, for_capture)


class Updating(Builder):
    """One that can also take over another's lengths, with indices of its own."""

    supports_update_block_table = True

    def update_block_table(self, built, block_table, slot_mapping):
        self.calls.append(("update", built.for_capture))
        if built.for_capture or built.lengths.any():
            self._write(self.indices, first_column(block_table))
        return replace(built, indices=self.indices, table=block_table, slots=slot_mapping)


class Recorder:
    """A factory that keeps what it made; `full` makes a builder's buffers where its steps lie."""

    def __init__(self, kind=Updating, setup=None, full=np.full):
        self.kind, self.setup, self.full, self.made = kind, setup, full, []

    def __call__(self, spec, view, ubatch):
        self.made.append(self.kind(spec, view, ubatch, self.setup, self.full))
        return self.made[-1]


def first_column(table):
    """What stands for all that is derived from a table."""
    return table if table.ndim == 1 else table[:, 0]


def padded(values):
    """What a buffer holds after `values` were written to it."""
    return [*(int(value) for value in values), *[0] * (MOST - len(values))]
