"""The NumPy backend: host arrays stand in for the device's, and the kernels are their definitions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.backends.buffers import HostBuffer
from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels import definition

__all__ = ["NumpyBackend"]


class _NoEvent:
    """Work on the host is done when its call returns."""

    def synchronize(self) -> None:
        """Return at once."""

    @property
    def done(self) -> bool:
        """Always True."""
        return True


class NumpyBackend:
    """Runs everything on the host, in order, at once."""

    name = "numpy"
    device: int | None = None
    has_graphs = False

    def __init__(self, slot_dtype: npt.DTypeLike = np.int64) -> None:
        self.slot_dtype = np.dtype(slot_dtype)

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
        return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")

    def host_buffer(self, num_words: int) -> HostBuffer:
        """Return a staging buffer of int32 words."""
        return HostBuffer(np.zeros(num_words, np.int32), self.event())

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
        """Return the stream to use; the host has none."""
        if stream is not None:
            raise BackendUnavailableError(
                "stream must be None on the numpy backend, which has no streams, "
                f"got {type(stream).__name__} (use backend='cupy')"
            )
        return None

    def stream_id(self, stream: Any) -> int:
        """Return the number by which streams are told apart."""
        return 0

    def is_capturing(self, stream: Any) -> bool:
        """Whether the stream is being captured: never here."""
        return False

    def event(self) -> Any:
        """Return a new event."""
        return _NoEvent()

    def record(self, event: Any, stream: Any) -> None:
        """Record an event on a stream."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
