"""The NumPy backend: host arrays stand in for the device's, and the kernels are their definitions."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.backends.buffers import HostBuffer
from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels import definition

__all__ = ["NumpyBackend"]


class _Host:
    """The one stream and the one event of the host, where work is done when its call returns."""

    ptr = 0
    done = True

    def synchronize(self) -> None:
        """Return at once."""


_HOST = _Host()


class NumpyBackend:
    """Runs everything on the host, in order, at once."""

    name = "numpy"
    device: int | None = None
    has_graphs = False
    stream_type = _Host

    def __init__(self, slot_dtype: npt.DTypeLike = np.int64) -> None:
        self.slot_dtype = np.dtype(slot_dtype)

    def activate(self) -> AbstractContextManager[None]:
        """Return a context in which this backend's device is the current one: always."""
        return nullcontext()

    def current_device(self) -> None:
        """Return the number of the current device: the host has none."""

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of zeros."""
        return np.zeros(shape, dtype)

    def full(self, shape: int | tuple[int, ...], value: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array filled with one value."""
        return np.full(shape, value, dtype)

    def asarray(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the device form of a host array: a copy of its own."""
        return array.copy()

    def asnumpy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the host form of a device array: the array itself."""
        return array

    def is_device_array(self, array: Any) -> bool:
        """Whether an array lives on a device: never here."""
        return False

    def host_buffer(self, num_words: int) -> HostBuffer:
        """Return a staging buffer of int32 words."""
        return HostBuffer(np.zeros(num_words, np.int32), self.event(), self.event().ptr)

    def copy(self, target: npt.NDArray[Any], buffer: HostBuffer, num_words: int, stream: Any) -> None:
        """Copy the first words of a staging buffer."""
        target[:num_words] = buffer.words[:num_words]

    def bind(self, op: str, args: tuple[Any, ...]) -> Callable[[tuple[int, int], Any], None]:
        """Return ``launch(grid, stream)`` of a kernel over fixed arguments."""
        kernel = definition(op)
        return lambda grid, stream: kernel(*args)

    def compile(self) -> None:
        """Load every kernel: the definitions need no compiling."""

    def stream(self, stream: Any) -> Any:
        """Return the host's one stream; there is no other."""
        if stream is not None:
            raise BackendUnavailableError(
                "stream must be None on the numpy backend, which has no streams, "
                f"got {type(stream).__name__} (use backend='cupy')"
            )
        return _HOST

    def event(self) -> Any:
        """Return the host's one event; it is always done."""
        return _HOST

    def is_capturing(self, stream_id: int) -> bool:
        """Whether a graph is being captured from the stream: never here."""
        return False

    def record(self, event_id: int, stream_id: int) -> None:
        """Record an event on a stream."""

    def wait(self, stream_id: int, event_id: int) -> None:
        """Let a stream wait for an event."""

    def is_done(self, event_id: int) -> int:
        """Return 0: the event has happened."""
        return 0

    def wait_for(self, event_id: int) -> None:
        """Let the host wait for an event."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
