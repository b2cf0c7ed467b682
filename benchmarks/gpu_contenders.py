"""Who runs a decode step on a GPU: pagedkv, what a careful user writes by hand with CuPy, and the floors.

The hand-written form keeps host tables in NumPy, stages whole rows in a pinned buffer that an event
fences, sends one copy a group and one for the step's small inputs, and maps slots with one RawKernel a
group. A floor does nothing but launch a captured graph: an empty one, or one with a single copy.
"""

import numpy as np

import pagedkv

BLOCK_SIZE = 16
SPARE_BLOCKS = 16

SLOTS = r"""
extern "C" __global__ void slots(
    const int* table, const int* start, const long long* position, long long* slot, int num_reqs, int width,
    int block_size, int max_tokens) {
  const int i = blockIdx.x;
  if (i == num_reqs) {
    for (int t = start[num_reqs] + threadIdx.x; t < max_tokens; t += blockDim.x) slot[t] = -1;
    return;
  }
  for (int t = start[i] + threadIdx.x; t < start[i + 1]; t += blockDim.x) {
    const long long p = position[t];
    slot[t] = (long long)table[(long long)i * width + p / block_size] * block_size + p % block_size;
  }
}
"""


class Traffic:
    """Decode traffic: each step, 1/16 of the requests (other ones each time) take a new block."""

    def __init__(self, num_reqs, context, num_groups):
        self.num_reqs, self.context, self.num_groups = num_reqs, context, num_groups
        self.blocks = context // BLOCK_SIZE
        self.width = self.blocks + SPARE_BLOCKS
        self.rows = np.arange(num_reqs, dtype=np.int32)
        self.num_new = max(1, num_reqs // 16)
        self.counts = np.ones((num_groups, self.num_new), np.int32)
        self.query_start_loc = np.arange(num_reqs + 1, dtype=np.int32)
        self.num_computed = np.full(num_reqs, context - 1, np.int32)
        self.rng = np.random.default_rng(7)

    def first_ids(self):
        size = (self.num_groups, self.num_reqs, self.blocks)
        return self.rng.integers(1, 1 << 24, size, dtype=np.int32)

    def new_ids(self):
        return self.rng.integers(1, 1 << 24, self.num_groups * self.num_new, dtype=np.int32)

    def taking(self, step):
        """Rows that take a block in a step."""
        first = step * self.num_new % self.num_reqs
        return np.take(self.rows, range(first, first + self.num_new), mode="wrap").astype(np.int32)

    def step(self, step):
        """(rows that take a block, their ids) of a step."""
        return self.taking(step), self.new_ids()

    @property
    def steps_until_full(self):
        return (SPARE_BLOCKS - 1) * (self.num_reqs // self.num_new)


class Pagedkv:
    """The library itself, a step as its user writes it."""

    def __init__(self, traffic, stream, backend, *, stable_rows=False):
        self.traffic, self.stream = traffic, stream
        self.table = pagedkv.MultiGroupBlockTable(
            [BLOCK_SIZE] * traffic.num_groups,
            traffic.num_reqs,
            traffic.width * BLOCK_SIZE,
            max(traffic.num_reqs, 8192),
            backend=backend,
            stable_rows=stable_rows,
        )
        self.rows = {"rows": traffic.rows} if stable_rows else {}
        ids = traffic.first_ids().ravel()
        full = np.full((traffic.num_groups, traffic.num_reqs), traffic.blocks, np.int32)
        self.table.add_rows(traffic.rows, full, ids)
        self.inputs = (traffic.num_reqs, traffic.query_start_loc, traffic.num_computed)
        self.commit()
        self.table.warmup()

    def commit(self):
        return self.table.commit(*self.inputs, stream=self.stream, **self.rows)

    def step(self, rows, ids):
        table = self.table
        table.append_rows(rows, self.traffic.counts, ids)
        return table.commit(*self.inputs, stream=self.stream, **self.rows)

    def reset(self):
        keep = np.full(self.traffic.num_reqs, self.traffic.blocks, np.int32)
        for group in range(self.traffic.num_groups):
            self.table.mirror.truncate_rows(self.traffic.rows, keep, group)
        self.commit()


class ByHand:
    """Whole rows each step, as in the module's docstring."""

    def __init__(self, traffic, stream, cupy):
        self.traffic, self.stream, self.cupy = traffic, stream, cupy
        num_groups, num_reqs, width = traffic.num_groups, traffic.num_reqs, traffic.width
        self.host = np.zeros((num_groups, num_reqs, width), np.int32)
        self.host[:, :, : traffic.blocks] = traffic.first_ids()
        self.count = np.full((num_groups, num_reqs), traffic.blocks, np.int32)
        self.staged, self._memory = self._pinned((num_groups, num_reqs, width), np.int32)
        self.small, self._small_memory = self._pinned(3 * num_reqs + 2, np.int32)
        with stream:
            self.device = cupy.zeros((num_groups, num_reqs, width), np.int32)
            self.inputs = cupy.zeros(3 * num_reqs + 2, np.int32)
            self.slots = cupy.zeros((num_groups, max(num_reqs, 8192)), np.int64)
        self.start = self.inputs[2 * num_reqs : 3 * num_reqs + 1]
        self.position = self.inputs[: 2 * num_reqs].view(np.int64)
        self.kernel = cupy.RawKernel(SLOTS, "slots")
        sizes = (num_reqs, width, BLOCK_SIZE, self.slots.shape[1])
        self.sizes = tuple(np.int32(size) for size in sizes)
        self.fence = cupy.cuda.Event(disable_timing=True)
        self.step(traffic.taking(0), traffic.new_ids())
        self.reset()

    def _pinned(self, shape, dtype):
        size = int(np.prod(shape))
        memory = self.cupy.cuda.alloc_pinned_memory(size * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, size).reshape(shape), memory

    def step(self, rows, ids):
        traffic, runtime = self.traffic, self.cupy.cuda.runtime
        num_reqs = traffic.num_reqs
        for group, new in enumerate(ids.reshape(traffic.num_groups, -1)):
            self.host[group, rows, self.count[group, rows]] = new
            self.count[group, rows] += 1
        self.fence.synchronize()
        self.small[: 2 * num_reqs].view(np.int64)[:] = traffic.num_computed
        self.small[2 * num_reqs : 3 * num_reqs + 1] = traffic.query_start_loc
        pointer, to_device = self.stream.ptr, runtime.memcpyHostToDevice
        runtime.memcpyAsync(
            self.inputs.data.ptr, self.small.ctypes.data, self.small.nbytes, to_device, pointer
        )
        for group in range(traffic.num_groups):
            self.staged[group] = self.host[group]
            target, source = self.device[group], self.staged[group]
            runtime.memcpyAsync(target.data.ptr, source.ctypes.data, source.nbytes, to_device, pointer)
            self.kernel(
                (num_reqs + 1,),
                (128,),
                (target, self.start, self.position, self.slots[group], *self.sizes),
                stream=self.stream,
            )
        self.fence.record(self.stream)

    def reset(self):
        self.count[:] = self.traffic.blocks


class Floor:
    """A captured graph with one host-to-device copy of some bytes, or with nothing."""

    def __init__(self, stream, cupy, num_bytes):
        self.stream, self.runtime = stream, cupy.cuda.runtime
        self.memory = cupy.cuda.alloc_pinned_memory(max(num_bytes, 4))
        self.target = cupy.zeros(max(num_bytes, 4), np.uint8)
        cupy.cuda.runtime.deviceSynchronize()
        capture = cupy.cuda.Stream(non_blocking=True)
        capture.begin_capture()
        if num_bytes:
            self.runtime.memcpyAsync(
                self.target.data.ptr, self.memory.ptr, num_bytes, self.runtime.memcpyHostToDevice, capture.ptr
            )
        self.graph = capture.end_capture()
        self.graph.upload(capture)
        capture.synchronize()

    def step(self, _rows, _ids):
        self.runtime.graphLaunch(self.graph.graphExec, self.stream.ptr)

    def reset(self):
        pass
