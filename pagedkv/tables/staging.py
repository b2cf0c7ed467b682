"""StagingRing: pinned buffers in turn, each rewritten only after its own event says it was copied."""

from typing import Any

from pagedkv.backends.buffers import HostBuffer
from pagedkv.tables.sizes import bucket

__all__ = ["StagingRing"]


class StagingRing:
    """A ring of staging buffers; `buffer` is the one whose turn it is.

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
        buffers = [backend.host_buffer(bucket(num_words)) for _ in range(depth)]
        for buffer, following in zip(buffers, buffers[1:] + buffers[:1], strict=True):
            buffer.next = following
        self.buffer: HostBuffer = buffers[0]

    @property
    def buffers(self) -> list[HostBuffer]:
        """The buffers, from the one whose turn it is."""
        found = [self.buffer]
        while found[-1].next is not self.buffer:
            found.append(found[-1].next)
        return found

    def grow(self, num_words: int) -> HostBuffer:
        """Replace the buffer whose turn it is, and whose copy has run, by one of `num_words`."""
        before = self.buffers[-1]
        larger: HostBuffer = self._backend.host_buffer(bucket(num_words))
        larger.next = larger if before is self.buffer else self.buffer.next
        before.next = larger
        self.buffer = larger
        return larger
