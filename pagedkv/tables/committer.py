"""Committer: the way of a step from the mirror to the device, in one copy and a few kernels.

Packed words go to one staging buffer, cross in one copy, and `apply_writes`, `gather_rows` (stable rows
whose order changed), `slot_mapping` and `state_indices` (groups of states) bring every device array up to
date. On a GPU the copy and the kernels are one captured graph for each ring buffer and size: one launch is
all that a step costs.
"""

import weakref
from typing import Any

import numpy as np

from pagedkv.addresses import address_table
from pagedkv.backends.buffers import HostBuffer
from pagedkv.checks import check_int
from pagedkv.compiled import seal
from pagedkv.errors import PagedKVError
from pagedkv.mirror import HostMirror
from pagedkv.tables.faults import find_fault
from pagedkv.tables.geometry import Geometry
from pagedkv.tables.graphs import StepGraphs
from pagedkv.tables.inputs import HOST_INPUTS, NO_INT32, NO_INT64, Inputs, step_inputs
from pagedkv.tables.modes import BATCH_ORDER, BATCH_ORDER_WRITES, STABLE, STABLE_WRITES
from pagedkv.tables.pack import pack_at
from pagedkv.tables.refusals import refuse
from pagedkv.tables.sizes import Sizes, bucket, decode_words
from pagedkv.tables.staging import StagingRing
from pagedkv.tables.step import OutputSet, Step
from pagedkv.tables.step_kernels import Staging, StepKernels

__all__ = ["Committer"]

_Array = np.ndarray


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
        self._mode = STABLE if stable_rows else BATCH_ORDER
        self.subscriber = mirror.subscribe()
        weakref.finalize(self, mirror.unsubscribe, self.subscriber)
        self.kernels = StepKernels(backend, geometry, with_views=not stable_rows)
        self.stored = self.kernels.stored
        self.outputs: list[OutputSet] = []
        self._state: Any = None
        self._packed: dict[int, Any] = {}
        self.add_outputs(1)
        # Per row: how often its writes were sent, and (while packing) the batch position that keeps it.
        self.versions = np.zeros((2, geometry.max_num_reqs), np.int64)
        self.versions[1] = -1
        hint = decode_words(geometry.max_num_reqs, len(geometry.specs))
        self.ring = StagingRing(backend, staging_depth, hint)
        self.staging = Staging(backend, bucket(hint))
        self.totals = np.zeros(2, np.int64)  # copies and bytes so far
        self.graphs = StepGraphs(backend, self.kernels)
        self.last_stream = 0
        self.last_event: Any = None
        self.pending: Any = None  # a captured step that was packed and not yet replayed
        self.call_event = backend.event()  # of calls that take no staging buffer
        self._staged: dict[str, Any] = {}
        self._take_state()
        seal(pack_at, self._packed[0], self.ring.buffer.words, *HOST_INPUTS.arrays, 0, 0, -1, self._mode)
        self._state = None  # the first step compiles the kernels, before it packs anything

    def add_outputs(self, num: int) -> None:
        """Make sure that there are `num` output sets."""
        while len(self.outputs) < num:
            shown = None if self.is_stable else self.stored
            self.outputs.append(OutputSet(self.backend, self.geometry, len(self.outputs), shown))
        self._state = None

    def commit(
        self,
        num_reqs: int,
        query_start_loc: Any,
        num_computed_tokens: Any,
        rows: Any,
        num_reqs_padded: int,
        num_tokens_padded: int,
        positions: Any,
        out: int,
        stream: Any,
    ) -> Step:
        """Enqueue a whole step; the arguments are those of `MultiGroupBlockTable.commit`.

        An ordinary step (ready int32 arrays on the host, room in the buffer, a graph that was captured)
        goes straight through; whatever it stumbles over is left to `_commit_any`, since nothing was
        changed then.
        """
        backend = self.backend
        if type(stream) is not backend.stream_type:
            stream = backend.stream(stream)
        stream_id = stream.ptr
        if stream_id and backend.is_capturing(stream_id):
            self._refuse_capture(stream_id)
        buffer = self.ring.buffer
        event_id = buffer.event_id
        if backend.is_done(event_id):
            backend.wait_for(event_id)
        if self.mirror.state is not self._state:
            self._prepare()
        key = -1
        # An empty array would stand for one on the device.
        arrays_given = positions is None and type(query_start_loc) is type(num_computed_tokens) is _Array
        if arrays_given and query_start_loc.size and (num_computed_tokens.size or not num_reqs):
            try:
                key, num_tokens = pack_at(
                    self._packed[out],
                    buffer.words,
                    query_start_loc,
                    num_computed_tokens,
                    NO_INT64,
                    NO_INT32 if rows is None else rows,
                    -1,
                    num_reqs,
                    num_reqs_padded,
                    num_tokens_padded,
                    self._mode,
                )
            except (TypeError, ValueError, KeyError, AttributeError):
                key = -1
        if key < 0:
            arrays = (query_start_loc, num_computed_tokens, positions, rows)
            return self._commit_any(arrays, num_reqs, num_reqs_padded, num_tokens_padded, out, stream)
        graph = buffer.graphs.get(key)
        if graph is None:
            self.order(stream_id)
            self.graphs.send(buffer, self.staging, key, self.outputs[out], HOST_INPUTS, stream)
        else:
            if stream_id != self.last_stream:
                self.order(stream_id)
            backend.launch(graph.graphExec, stream_id)
        backend.record(event_id, stream_id)
        self.last_event, self.last_stream = buffer.event, stream_id
        self.ring.buffer = buffer.next
        return Step(self.outputs[out], buffer.event, num_reqs, num_reqs_padded, num_tokens, num_tokens_padded)

    def pack(
        self,
        buffer: HostBuffer,
        inputs: Inputs,
        num_reqs: int,
        num_reqs_padded: int,
        tokens_padded: int,
        out: int,
        mode: int | None = None,
    ) -> tuple[int, int]:
        """Pack a step into a buffer; returns (key of its sizes, num_tokens), or (-words, 0).

        The latter where the buffer holds fewer words than the step needs. Every fault is raised; nothing
        was changed then.
        """
        if self.mirror.state is not self._state:
            self._prepare()
        mode = self._mode if mode is None else mode
        sizes = (num_reqs, num_reqs_padded, tokens_padded, mode)
        key, num_tokens = pack_at(self._packed[out], buffer.words, *inputs.arrays, *sizes)
        if key == -1:
            starts, computed, _, rows, num_positions = inputs.arrays
            most = self.geometry.max_num_batched_tokens
            found = find_fault(self.mirror.counts, most, starts, computed, rows, num_positions, *sizes)
            refuse(*found, self.geometry, tokens_padded)
        return key, num_tokens

    def _commit_any(
        self, arrays: Any, num_reqs: int, num_reqs_padded: int, tokens_padded: int, out: int, stream: Any
    ) -> Step:
        # The way of a step that is not ordinary: arrays to convert or on the device, or a fault to name.
        if not 0 <= out < len(self.outputs):
            raise ValueError(
                f"out must name one of {len(self.outputs)} output sets, got {out} (make more with outputs(n))"
            )
        starts, computed, positions, rows = arrays
        if (rows is None) == self.is_stable:
            rule = "be given when" if self.is_stable else "be None unless"
            raise ValueError(f"rows must {rule} the table has stable_rows, got {type(rows).__name__}")
        check_int("num_reqs", num_reqs, 0, self.geometry.max_num_reqs)
        inputs = step_inputs(self.backend, num_reqs, starts, computed, positions, rows)
        if inputs.device_key:
            self.outputs[out].overlaps.refuse_of_step(inputs.device)
        step = (inputs, num_reqs, num_reqs_padded, tokens_padded, out)
        buffer = self.ring.buffer
        key, num_tokens = self.pack(buffer, *step)
        if key < 0:
            buffer = self._grow(-key)
            key, num_tokens = self.pack(buffer, *step)
        self.order(stream.ptr)
        self.graphs.send(buffer, self.staging, key, self.outputs[out], inputs, stream)
        self.finish(buffer.event, stream.ptr)
        self.ring.buffer = buffer.next
        return Step(self.outputs[out], buffer.event, num_reqs, num_reqs_padded, num_tokens, tokens_padded)

    def commit_rows(self, stream: Any) -> None:
        """Send the dirty ranges alone, where there are any."""
        if not self.mirror.state.dirty[self.subscriber, 0]:
            return
        stream = self.backend.stream(stream)
        self._refuse_capture(stream.ptr)
        mode = STABLE_WRITES if self.is_stable else BATCH_ORDER_WRITES
        step = (HOST_INPUTS, 0, 0, -1, 0, mode)
        buffer = self._acquire()
        key, _ = self.pack(buffer, *step)
        if key < 0:
            buffer = self._grow(-key)
            key, _ = self.pack(buffer, *step)
        self.order(stream.ptr)
        self.backend.copy(self.staging.words, buffer, Sizes.of(key).words, stream)
        self.kernels.apply_writes(self.staging, Sizes.of(key), self.outputs[0], stream)
        self.finish(buffer.event, stream.ptr)
        self.ring.buffer = buffer.next

    def stage(self, name: str, array: Any, capacity: int, stream: Any) -> Any:
        """Copy a host array into its own persistent device array, in one copy, and return the view."""
        self._refuse_capture(stream.ptr)
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

    def order(self, stream_id: int) -> None:
        """Put an event wait between this call and the last one where their streams differ."""
        if self.last_event is not None and stream_id != self.last_stream:
            self.backend.wait(stream_id, self.last_event.ptr)

    def finish(self, event: Any, stream_id: int) -> None:
        """Record that everything enqueued so far belongs to this event."""
        self.backend.record(event.ptr, stream_id)
        self.last_event, self.last_stream = event, stream_id

    def capture(self, buffer: HostBuffer, key: int, out: int) -> None:
        """Capture a step of host inputs and the sizes of `key` ahead."""
        self.backend.compile()
        self.graphs.capture(buffer, self.staging, key, self.outputs[out])

    def _refuse_capture(self, stream_id: int) -> None:
        if stream_id and self.backend.is_capturing(stream_id):
            raise PagedKVError(
                "calls that copy from the host must not be captured: the host packs each step "
                "(capture captured_step(...), or give compute_slot_mapping device arrays)"
            )

    def _acquire(self) -> HostBuffer:
        self.backend.wait_for(self.ring.buffer.event_id)
        return self.ring.buffer

    def hold(self, step: Any) -> None:
        """Let no other step be packed before this captured one was replayed: it would be overwritten."""
        self.pending = step
        self._state = None  # what comes next goes by `_prepare`, and the short way pays nothing for it

    def _prepare(self) -> None:
        if self.pending is not None:
            raise PagedKVError(
                "a captured step was packed: replay its graph and call mark_replayed before the next step"
            )
        self.backend.compile()  # what cannot be compiled must not take the dirty ranges with it
        self._take_state()

    def _take_state(self) -> None:
        # The mirror's arrays stay; those of the subscribers are new whenever one was added.
        self._state = state = self.mirror.state
        shared = (state.blocks, state.layout, state.counts)
        own = (state.ranges[self.subscriber], state.dirty[self.subscriber])
        self._packed = {
            out: address_table(*shared, *own, self.versions, self.totals, outputs.batch, outputs.seen)
            for out, outputs in enumerate(self.outputs)
        }

    def _grow(self, words: int) -> HostBuffer:
        # The ring's buffer is free (its event was waited for). The device's end may still be read by
        # steps in flight, and graphs hold its address: wait for them, then bind and capture anew.
        if words > self.staging.words.size:
            self.backend.synchronize()
            self.staging = Staging(self.backend, bucket(words))
            for buffer in self.ring.buffers:
                buffer.drop_graphs()
        return self.ring.grow(words)
