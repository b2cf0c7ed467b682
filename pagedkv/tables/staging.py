"""StagingRing: pinned buffers in turn, each rewritten only after its own event says it was copied."""

from typing import Any

from pagedkv.backends.buffers import HostBuffer
from pagedkv.tables.pack import bucket

__all__ = ["StagingRing"]


class StagingRing:
    """A ring of staging buffers.

    Parameters
    ----------
    backend : backend
    depth : int
        Buffers, and so commits that may be in flight before the host waits.
    num_words : int
        Size hint of each buffer, in int32 words; buffers grow when a step needs more.
    """

    def __init__(self, backend: Any, depth: int, num_words: int) -> None:
        self._backend = backend
        self._buffers = [backend.host_buffer(bucket(num_words)) for _ in range(depth)]
        self._next = 0

    @property
    def buffers(self) -> tuple[HostBuffer, ...]:
        """The buffers, in ring order."""
        return tuple(self._buffers)

    def acquire(self) -> HostBuffer:
        """Return the buffer whose turn it is, once its last copy has run; it stays next until `advance`."""
        buffer = self._buffers[self._next]
        self._backend.wait_for(buffer.event.ptr)
        return buffer

    def grow(self, num_words: int) -> HostBuffer:
        """Replace the acquired buffer, whose copy has run, by one that holds `num_words`."""
        self._buffers[self._next] = self._backend.host_buffer(bucket(num_words))
        return self._buffers[self._next]

    def advance(self) -> None:
        """Pass on to the next buffer; the acquired one now belongs to the step that was enqueued."""
        self._next = (self._next + 1) % len(self._buffers)
