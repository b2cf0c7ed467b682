"""A kernel that keeps a stream standing still until the host says go, or until ten seconds are over."""

import time

import numpy as np

SOURCE = r"""
extern "C" __global__ void stall(const volatile int* released, long long most_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (!*released && now - start < (unsigned long long)most_ns);
}
"""
MOST_NS = 10 * 10**9
NUM_FLAGS = 8


class Stall:
    """One stream that stands still.

    Parameters
    ----------
    flag : int32 [1]
        In pinned memory, which the kernel reads over the bus.
    """

    def __init__(self, flag):
        self._flag = flag
        self.released_at = None

    def release(self):
        """Let the stream go on."""
        self.released_at = time.perf_counter()
        self._flag[0] = 1

    @property
    def is_released(self):
        """Whether the stream was let go."""
        return self.released_at is not None


class Stalls:
    """Flags made ahead, since pinned memory is not allocated beside a running kernel without a wait."""

    def __init__(self):
        import cupy

        self._cupy = cupy
        self._memory = cupy.cuda.alloc_pinned_memory(64 * NUM_FLAGS)
        self._flags = np.frombuffer(self._memory, np.int32, 16 * NUM_FLAGS)[::16]
        self._kernel = cupy.RawKernel(SOURCE, "stall")
        self._begun = []
        self.begin(cupy.cuda.Stream.null).release()  # loads the module
        self.end()

    def begin(self, stream):
        """Make a stream stand still."""
        place = len(self._begun)
        flag = self._flags[place : place + 1]
        flag[0] = 0
        address = np.uint64(self._memory.ptr + 64 * place)
        self._kernel((1,), (1,), (address, np.int64(MOST_NS)), stream=stream)
        self._begun.append(Stall(flag))
        return self._begun[-1]

    def end(self):
        """Let all streams go, and wait until the device is idle."""
        for stalled in self._begun:
            if not stalled.is_released:
                stalled.release()
        self._cupy.cuda.runtime.deviceSynchronize()
        self._begun.clear()
