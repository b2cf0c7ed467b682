"""A table on a device beside its twin on the host, and device copies of what its steps hand out."""

from functools import partial

import numpy as np

from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable
from tests.tables.models import to_numpy


def arrays_of(step, table):
    """All arrays that a step hands out, by name; of state columns the lines, each of which is contiguous."""
    names = ("query_start_loc", "seq_lens", "positions", "token_to_req_indices")
    found = {name: getattr(step, name) for name in names}
    for group in range(table.num_groups):
        spec = table[group]._spec
        names = ["block_table", "slot_mapping", "local_seq_lens"]
        names += ["state_indices", "initial_state_indices"] if spec.state_mode is not None else []
        found |= {f"{name}({group})": getattr(step, name)(group) for name in names}
        for view in range(len(spec.kernel_views)):
            found[f"kernel_block_table({group}, {view})"] = step.kernel_block_table(group, view)
        if spec.state_mode is not None:
            columns = step.state_columns(group)
            found |= {f"state_columns({group})[{k}]": columns[k] for k in range(3)}
    return found


def values_of(step, table):
    """Host copies of them; what a device step was to write must have run."""
    return {name: to_numpy(array).copy() for name, array in arrays_of(step, table).items()}


def assert_same(expected, actual, which=""):
    """Two such dictionaries are equal, bit for bit."""
    assert list(expected) == list(actual)
    for name, array in expected.items():
        np.testing.assert_array_equal(array, actual[name], err_msg=f"{name} of {which or 'the step'}")
        assert array.dtype == actual[name].dtype, name


class Pair:
    """The same table on a device and on the host."""

    def __init__(self, backend, groups, *sizes, device=None, **options):
        make = partial(MultiGroupBlockTable, groups, *sizes, **options)
        self.device, self.host = make(backend=backend, device=device), make(backend="numpy")

    def do(self, call, *arguments):
        """Make the same call on both."""
        for table in (self.host, self.device):
            getattr(table, call)(*arguments)

    def commit(self, *arguments, stream=None, **options):
        """Commit both; returns what the step should hold, and the device's step."""
        expected = values_of(self.host.commit(*arguments, **options), self.host)
        return expected, self.device.commit(*arguments, stream=stream, **options)


class Decoding(Pair):
    """Eight requests in two groups: at every step one more block each, into which its one token goes."""

    NUM_REQS = 8

    def __init__(self, backend, **options):
        groups = [KVCacheGroupSpec(4, (2,)), KVCacheGroupSpec(8, ((4, 3),))]
        super().__init__(backend, groups, self.NUM_REQS, 8192, 64, **options)
        self.num_steps = 0
        for row in range(self.NUM_REQS):
            self.do("add_row", ([1 + row, 11 + row], [21 + row, 31 + row]), row)

    def step(self, stream=None, **options):
        """Commit the next step; returns what it should hold, and the device's step."""
        i, num = self.num_steps, self.NUM_REQS
        self.num_steps += 1
        rows = np.arange(num, dtype=np.int32)
        ids = np.concatenate([100 + num * i + rows, 30_000 + num * i + rows]).astype(np.int32)
        self.do("append_rows", rows, np.ones((2, num), np.int32), ids)
        if self.device.stable_rows:
            options["rows"] = np.roll(rows, i)
        computed = np.full(num, 4 * (2 + i), np.int32)
        return self.commit(num, np.arange(num + 1, dtype=np.int32), computed, stream=stream, **options)


class Keeper:
    """A consumer: it copies a step's arrays on the device, in its stream's order, to be looked at later."""

    def __init__(self, step, table):
        import cupy

        self._runtime = cupy.cuda.runtime
        self._copies = {name: cupy.empty_like(array) for name, array in arrays_of(step, table).items()}
        self._runtime.deviceSynchronize()

    def keep(self, step, table, stream):
        """Enqueue the copies."""
        for name, array in arrays_of(step, table).items():
            copy_on_device(self._copies[name], array, stream)

    def values(self):
        """What was copied; the stream must be idle."""
        return {name: copy.get() for name, copy in self._copies.items()}


def copy_on_device(target, source, stream):
    """Enqueue one plain device copy."""
    from cupy.cuda import runtime

    assert target.nbytes == source.nbytes
    kind = runtime.memcpyDeviceToDevice
    runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, kind, stream.ptr)
