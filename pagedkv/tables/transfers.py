"""Transfers: in which order a table's calls reach the device, and when a staging buffer is free again.

Steps, rows sent alone, mappings apart from a step and micro-batches of one table form one line: each goes
behind the last, on whatever streams they run.
"""

from typing import Any

import numpy as np

from pagedkv.backends.buffers import HostBuffer
from pagedkv.errors import PagedKVError
from pagedkv.tables.sizes import bucket
from pagedkv.tables.staging import StagingRing
from pagedkv.tables.step_kernels import Staging

__all__ = ["Transfers"]


class Transfers:
    """The ring of staging buffers, the device's end of it, and the events of one table set.

    Parameters
    ----------
    backend : backend
    staging_depth : int
        Buffers in the ring.
    num_words : int
        Size hint of a buffer, in int32 words; they grow with what is sent.
    """

    def __init__(self, backend: Any, staging_depth: int, num_words: int) -> None:
        self.backend = backend
        self.ring = StagingRing(backend, staging_depth, num_words)
        self.staging = Staging(backend, bucket(num_words))
        self.totals = np.zeros(2, np.int64)  # copies and bytes so far
        self.last_stream = 0
        self.last_event: Any = None
        self.call_event = backend.event()  # of calls that take no staging buffer
        self.pending: Any = None  # a captured step that was packed and not yet replayed
        self._staged: dict[str, Any] = {}

    def order(self, stream_id: int) -> None:
        """Put an event wait between this call and the last one where their streams differ."""
        if self.last_event is not None and stream_id != self.last_stream:
            self.backend.wait(stream_id, self.last_event.ptr)

    def finish(self, event: Any, stream_id: int) -> None:
        """Record that everything enqueued so far belongs to this event."""
        self.backend.record(event.ptr, stream_id)
        self.last_event, self.last_stream = event, stream_id

    def refuse_capture(self, stream_id: int) -> None:
        """Raise where the stream is being captured, for a call that copies from the host."""
        if stream_id and self.backend.is_capturing(stream_id):
            raise PagedKVError(
                "calls that copy from the host must not be captured: the host packs each step "
                "(capture captured_step(...), or give compute_slot_mapping device arrays)"
            )

    def refuse_pending(self) -> None:
        """Raise while a packed step waits for its replay: what runs now would find the rows before it."""
        if self.pending is not None:
            raise PagedKVError(
                "a captured step was packed: replay its graph and call mark_replayed before the next step"
            )

    def stage(self, name: str, array: Any, capacity: int, stream: Any) -> Any:
        """Copy a host array into its own persistent device array, in one copy, and return the view."""
        self.refuse_capture(stream.ptr)
        if name not in self._staged:
            self._staged[name] = self.backend.zeros(capacity, array.dtype)
        target, words = self._staged[name][: array.size], array.view(np.int32)
        buffer = self._acquire()
        if words.size > buffer.words.size:
            buffer = self._grow(words.size)  # the device's end as well, for what is packed into it later
        buffer.words[: words.size] = words
        self.order(stream.ptr)
        self.backend.copy(target.view(np.int32), buffer, words.size, stream)
        self.totals += (1, 4 * words.size)
        self.finish(buffer.event, stream.ptr)
        self.ring.buffer = buffer.next
        return target

    def _acquire(self) -> HostBuffer:
        self.backend.wait_for(self.ring.buffer.event_id)
        return self.ring.buffer

    def _grow(self, words: int) -> HostBuffer:
        # The ring's buffer is free (its event was waited for). The device's end may still be read by
        # steps in flight, and graphs hold its address: wait for them, then bind and capture anew.
        if words > self.staging.words.size:
            self.backend.synchronize()
            self.staging = Staging(self.backend, bucket(words))
            for buffer in self.ring.buffers:
                buffer.drop_graphs()
        return self.ring.grow(words)
