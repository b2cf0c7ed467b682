"""The GPU backends: CuPy arrays, pinned memory, streams, events and graphs; kernels by CuPy or Numba."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import cupy  # noqa: TID251 - this module is the GPU backend
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime  # noqa: TID251 - as above

from pagedkv.backends.buffers import HostBuffer

__all__ = ["CudaBackend", "why_no_device"]

_HOST_TO_DEVICE = runtime.memcpyHostToDevice
_STREAMS = (cupy.cuda.Stream, cupy.cuda.ExternalStream)
_current_stream = cupy.cuda.get_current_stream


def why_no_device() -> str | None:
    """Say why no CUDA device can be used, or None."""
    if cupy.cuda.is_available():
        return None
    if runtime.driverGetVersion() == 0:
        return "no CUDA driver is installed (use backend='numpy' on a machine without a GPU)"
    return "the driver shows no CUDA device (check nvidia-smi and CUDA_VISIBLE_DEVICES)"


@cache
def _kernels(name: str, device: int, slot_dtype: np.dtype[Any]) -> Any:
    # Compiled once a device, for all tables there.
    if name == "numba":
        return import_module("pagedkv.kernels._numba").NumbaKernels(device, slot_dtype)
    return import_module("pagedkv.kernels._cuda").CudaKernels(device, slot_dtype)


class CudaBackend:
    """Arrays of CuPy on one device; RawKernels ("cupy") or Numba CUDA kernels ("numba") work on them.

    Parameters
    ----------
    name : {"cupy", "numba"}
    device : int, optional
        Device number; CuPy's current device where None.
    slot_dtype : dtype
        int64 or int32.
    """

    has_graphs = True
    stream_type = cupy.cuda.Stream
    """A stream of this type is taken as it is; `stream` makes one of anything else."""

    # What every step calls, over bare handles and without a Python frame in between.
    current_device = staticmethod(runtime.getDevice)
    """current_device(): the number of the device that is current in this thread"""
    launch = staticmethod(runtime.graphLaunch)
    """launch(graph.graphExec, stream.ptr)"""
    record = staticmethod(runtime.eventRecord)
    """record(event.ptr, stream.ptr)"""
    is_capturing = staticmethod(runtime.streamIsCapturing)
    """is_capturing(stream.ptr); not for the legacy stream (0), which never is and must not be asked"""
    is_done = staticmethod(runtime.eventQuery)
    """is_done(event.ptr) is 0 once the event has happened"""

    @staticmethod
    def wait_for(event_id: int) -> None:
        """Let the host wait for an event."""
        runtime.eventSynchronize(event_id)

    @staticmethod
    def wait(stream_id: int, event_id: int) -> None:
        """Let a stream wait for an event."""
        runtime.streamWaitEvent(stream_id, event_id)

    def __init__(self, name: str, device: int | None, slot_dtype: npt.DTypeLike) -> None:
        self.name = name
        self.device: int = runtime.getDevice() if device is None else int(device)
        self.slot_dtype = np.dtype(slot_dtype)
        with self.activate():
            self._kernels = _kernels(name, self.device, self.slot_dtype)
            self._capture_stream = cupy.cuda.Stream(non_blocking=True)

    def activate(self) -> Any:
        """Return a context in which this backend's device is the current one."""
        return nullcontext() if runtime.getDevice() == self.device else cupy.cuda.Device(self.device)

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a device array of zeros, safe to use on any stream at once."""
        return self.full(shape, 0, dtype)

    def full(self, shape: int | tuple[int, ...], value: int, dtype: npt.DTypeLike) -> Any:
        """Return a device array filled with one value, safe to use on any stream at once."""
        with self.activate():
            array = cupy.full(shape, value, dtype)
            cupy.cuda.get_current_stream().synchronize()
        return array

    def asarray(self, array: npt.NDArray[Any]) -> Any:
        """Return a device copy of a host array, safe to use on any stream at once."""
        with self.activate():
            copy = cupy.asarray(array)
            cupy.cuda.get_current_stream().synchronize()
        return copy

    def asnumpy(self, array: Any) -> npt.NDArray[Any]:
        """Return a host copy of a device array."""
        with self.activate():
            cupy.cuda.runtime.deviceSynchronize()
            return cupy.asnumpy(array)  # type: ignore[no-any-return]

    def is_device_array(self, array: Any) -> bool:
        """Whether an array is a CuPy array; raises where it lies on another device."""
        if not isinstance(array, cupy.ndarray):
            return False
        if array.device.id != self.device:
            raise TypeError(
                f"device arrays must lie on the table's device {self.device}, got device {array.device.id} "
                "(copy the array there, or build the table with device=)"
            )
        return True

    def host_buffer(self, num_words: int) -> HostBuffer:
        """Return a pinned staging buffer of int32 words."""
        with self.activate():
            memory = cupy.cuda.alloc_pinned_memory(4 * num_words)
            words = np.frombuffer(memory, np.int32, num_words)
            words[:] = 0
            event = self.event()
            return HostBuffer(words, event, event.ptr, memory.ptr, memory)

    def copy(self, target: Any, buffer: HostBuffer, num_words: int, stream: Any) -> None:
        """Enqueue the one copy of a step."""
        runtime.memcpyAsync(target.data.ptr, buffer.address, 4 * num_words, _HOST_TO_DEVICE, stream.ptr)

    def bind(self, op: str, args: tuple[Any, ...]) -> Callable[[tuple[int, int], Any], None]:
        """Return ``launch(grid, stream)`` of a kernel over fixed arguments."""
        with self.activate():
            return self._kernels.bind(op, args)  # type: ignore[no-any-return]

    def compile(self) -> None:
        """Compile and load every kernel, so that no later call does (a capture must not)."""
        with self.activate():
            self._kernels.compile()

    def stream(self, stream: Any) -> Any:
        """Return a CuPy stream: the caller's, or CuPy's current stream of the device where None."""
        if stream is None:
            return _current_stream(self.device)
        if isinstance(stream, _STREAMS):
            return stream
        if hasattr(stream, "__cuda_stream__"):
            return cupy.cuda.Stream.from_external(stream)
        raise TypeError(f"stream must be a CuPy stream or speak __cuda_stream__, got {type(stream).__name__}")

    def event(self) -> Any:
        """Return a new event without timing, the cheap kind."""
        with self.activate():
            return cupy.cuda.Event(disable_timing=True)

    def capture(self, enqueue: Callable[[Any], None]) -> Any:
        """Capture ``enqueue(stream)`` as a graph, ready to be launched."""
        with self.activate():
            self._kernels.compile()  # a module that loads during a capture breaks it
            stream = self._capture_stream
            stream.begin_capture()
            try:
                enqueue(stream)
            finally:
                graph = stream.end_capture()
            graph.upload(stream)
            stream.synchronize()
            return graph

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        with self.activate():
            runtime.deviceSynchronize()
