"""Committer: the way of a step from the mirror to the device, in one copy and a few kernels.

Packed words go to one staging buffer, cross in one copy, and `apply_writes`, `gather_rows` (stable rows
whose order changed) and `slot_mapping` bring every device array up to date. On a GPU the copy and the
kernels are one captured graph for each ring buffer and size: one launch is all that a step costs.
"""

from typing import Any

import numpy as np

from pagedkv.backends.buffers import HostBuffer
from pagedkv.errors import PagedKVError
from pagedkv.kernels._layout import HEADER_WORDS, WRITE_WORDS
from pagedkv.mirror import HostMirror
from pagedkv.tables.geometry import Geometry
from pagedkv.tables.inputs import HOST_ONLY, NO_INT32, NO_INT64, Inputs
from pagedkv.tables.pack import Mode, PackFault, Sizes, bucket, pack_step
from pagedkv.tables.refusals import refuse
from pagedkv.tables.staging import StagingRing
from pagedkv.tables.step import OutputSet, Step
from pagedkv.tables.step_kernels import Staging, StepKernels

__all__ = ["HOST_INPUTS", "Committer", "decode_words"]


class Committer:
    """Packs, copies and launches for one table set.

    Parameters
    ----------
    backend : backend
    geometry : Geometry
    mirror : HostMirror
    stable_rows : bool
        False: row i of the table is request i of the batch.
    staging_depth : int
        Buffers in the ring.
    """

    def __init__(
        self, backend: Any, geometry: Geometry, mirror: HostMirror, *, stable_rows: bool, staging_depth: int
    ) -> None:
        self.backend, self.geometry, self.mirror = backend, geometry, mirror
        self.is_stable = stable_rows
        self._mode = int(Mode.STABLE if stable_rows else Mode.BATCH_ORDER)
        self.subscriber = mirror.subscribe()
        self.kernels = StepKernels(backend, geometry, with_views=not stable_rows)
        self.stored = self.kernels.stored
        self.outputs: list[OutputSet] = []
        self.add_outputs(1)
        # Per row: how often its writes were sent, and (while packing) the batch position that keeps it.
        self.versions = np.zeros((2, geometry.max_num_reqs), np.int64)
        self.versions[1] = -1
        hint = decode_words(geometry.max_num_reqs, len(geometry.specs))
        self.ring = StagingRing(backend, staging_depth, hint)
        self.staging = Staging(backend, bucket(hint))
        self.num_h2d_copies = self.num_h2d_bytes = 0
        self.use_graphs = backend.has_graphs
        self.last_stream = 0
        self.last_event: Any = None
        self.call_event = backend.event()  # of calls that take no staging buffer
        self._staged: dict[str, Any] = {}
        self._state: Any = None
        self._packed_state: tuple[Any, ...] = ()
        self._limits = (
            geometry.max_num_batched_tokens,
            stable_rows and geometry.has_windows,
        )

    def add_outputs(self, num: int) -> None:
        """Make sure that there are `num` output sets."""
        while len(self.outputs) < num:
            shown = None if self.is_stable else self.stored
            self.outputs.append(OutputSet(self.backend, self.geometry, shown))
            self.kernels.outputs = self.outputs

    def commit(
        self,
        inputs: Inputs,
        num_reqs: int,
        num_reqs_padded: int,
        tokens_padded: int,
        out: int,
        stream: Any,
    ) -> Step:
        """Enqueue a whole step on a stream that is not capturing."""
        backend, outputs = self.backend, self.outputs[out]
        stream = backend.stream(stream)
        stream_id = stream.ptr
        if backend.is_capturing(stream_id):
            self._refuse_capture(stream_id)
        buffer = self.ring.acquire()
        key, num_tokens = self.pack(buffer, inputs, num_reqs, num_reqs_padded, tokens_padded, outputs)
        if key < 0:
            buffer = self._grow(-key)
            key, num_tokens = self.pack(buffer, inputs, num_reqs, num_reqs_padded, tokens_padded, outputs)
        if stream_id != self.last_stream:
            self.order(stream_id)
        if self.use_graphs:
            graphs = buffer.graphs.get((out, inputs.device_key))
            graph = None if graphs is None else graphs.get(key)
            if graph is None:
                graph = self.capture(buffer, key, out, inputs)
            backend.launch(graph.graphExec, stream_id)
        else:
            self.kernels.run(buffer, self.staging, Sizes.of(key), out, inputs.device)(stream)
        event = buffer.event
        backend.record(event.ptr, stream_id)
        self.last_event, self.last_stream = event, stream_id
        self.ring.advance()
        self.num_h2d_copies += 1
        self.num_h2d_bytes += 4 * (key & 0xFFFFFFFF)
        if num_tokens >= 0:
            most_tokens = known = num_tokens
        else:
            most_tokens, known = -num_tokens - 1, None
        outputs.tokens_seen, outputs.reqs_seen = most_tokens, num_reqs
        handed_out = most_tokens if tokens_padded < 0 else tokens_padded
        return Step(outputs, num_reqs, num_reqs_padded, known, handed_out, event)

    def pack(
        self,
        buffer: HostBuffer,
        inputs: Inputs,
        num_reqs: int,
        num_reqs_padded: int,
        tokens_padded: int,
        outputs: OutputSet,
        mode: int | None = None,
    ) -> tuple[int, int]:
        """Pack a step into a buffer; returns (key of its sizes, num_tokens).

        Returns (-words, 0) where the buffer holds fewer words than the step needs. Every other fault is
        raised; nothing was changed then.
        """
        if self.mirror.state is not self._state:
            self._take_state()
        code, value, place = pack_step(
            buffer.words,
            *self._packed_state,
            outputs.batch,
            self.versions,
            *inputs.arrays,
            num_reqs,
            num_reqs_padded,
            tokens_padded,
            outputs.reqs_seen,
            outputs.tokens_seen,
            *self._limits,
            self._mode if mode is None else mode,
        )
        if code:
            if code == PackFault.GROW:
                return -value, 0
            refuse(code, value, place, self.geometry, tokens_padded)
        return value, place

    def commit_rows(self, stream: Any) -> None:
        """Send the dirty ranges alone, where there are any."""
        if not self.mirror.state.dirty[self.subscriber, 0]:
            return
        stream = self.backend.stream(stream)
        self._refuse_capture(stream.ptr)
        mode = int(Mode.WRITES_ONLY if self.is_stable else Mode.BATCH_ORDER)
        step = (HOST_INPUTS, 0, 0, -1, self.outputs[0], mode)
        buffer = self.ring.acquire()
        key, _ = self.pack(buffer, *step)
        if key < 0:
            buffer = self._grow(-key)
            key, _ = self.pack(buffer, *step)
        self.order(stream.ptr)
        self._copy(buffer, self.staging.words, Sizes.of(key).words, stream)
        self.kernels.apply_writes(self.staging, Sizes.of(key), stream)
        self.finish(buffer.event, stream.ptr)
        self.ring.advance()

    def stage(self, name: str, array: Any, capacity: int, stream: Any) -> Any:
        """Copy a host array into its own persistent device array, in one copy, and return the view."""
        self._refuse_capture(stream.ptr)
        if name not in self._staged:
            self._staged[name] = self.backend.zeros(capacity, array.dtype)
        target, words = self._staged[name][: array.size], array.view(np.int32)
        buffer = self.ring.acquire()
        if words.size > buffer.words.size:
            buffer = self.ring.grow(words.size)
        buffer.words[: words.size] = words
        self.order(stream.ptr)
        self._copy(buffer, target.view(np.int32), words.size, stream)
        self.finish(buffer.event, stream.ptr)
        self.ring.advance()
        return target

    def order(self, stream_id: int) -> None:
        """Put an event wait between this call and the last one where their streams differ."""
        if self.last_event is not None and stream_id != self.last_stream:
            self.backend.wait(stream_id, self.last_event.ptr)

    def finish(self, event: Any, stream_id: int) -> None:
        """Record that everything enqueued so far belongs to this event."""
        self.backend.record(event.ptr, stream_id)
        self.last_event, self.last_stream = event, stream_id

    def capture(self, buffer: HostBuffer, key: int, out: int, inputs: Inputs) -> Any:
        """Capture a step of these sizes and keep it with its buffer."""
        run = self.kernels.run(buffer, self.staging, Sizes.of(key), out, inputs.device)
        graph = self.backend.capture(run)
        buffer.graphs.setdefault((out, inputs.device_key), {})[key] = graph
        return graph

    def _refuse_capture(self, stream_id: int) -> None:
        if self.backend.is_capturing(stream_id):
            raise PagedKVError(
                "calls that copy from the host must not be captured: the host packs each step "
                "(capture captured_step(...), or give compute_slot_mapping device arrays)"
            )

    def _take_state(self) -> None:
        # The mirror's arrays stay; those of the subscribers are new whenever one was added.
        self._state = state = self.mirror.state
        self._packed_state = (
            state.blocks,
            state.layout,
            state.counts,
            state.ranges[self.subscriber],
            state.dirty[self.subscriber],
        )

    def _copy(self, buffer: HostBuffer, target: Any, words: int, stream: Any) -> None:
        self.backend.copy(target, buffer, words, stream)
        self.num_h2d_copies += 1
        self.num_h2d_bytes += 4 * words

    def _grow(self, words: int) -> HostBuffer:
        # The ring's buffer is free (its event was waited for). The device's end may still be read by
        # steps in flight, and graphs hold its address: wait for them, then bind and capture anew.
        if words > self.staging.words.size:
            self.backend.synchronize()
            self.staging = Staging(self.backend, bucket(words))
            for buffer in self.ring.buffers:
                buffer.graphs.clear()
        return self.ring.grow(words)


HOST_INPUTS = Inputs((np.zeros(1, np.int32), NO_INT32, NO_INT64, NO_INT32, -1), HOST_ONLY, ())


def decode_words(num_reqs: int, num_groups: int, new_blocks: int | None = None) -> int:
    """Words of a decode step of `num_reqs` requests in which `new_blocks` blocks are appended."""
    blocks = num_reqs * num_groups if new_blocks is None else new_blocks
    return HEADER_WORDS + 3 * (num_reqs + 4) + (WRITE_WORDS + 1) * blocks + 8
