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
from pagedkv.constants import MAX_INT32
from pagedkv.mirror import HostMirror
from pagedkv.tables.faults import find_fault
from pagedkv.tables.geometry import Geometry
from pagedkv.tables.graphs import StepGraphs
from pagedkv.tables.inputs import HOST_INPUTS, NO_INT32, NO_INT64, Inputs, check_rows_given, step_inputs
from pagedkv.tables.modes import BATCH_ORDER, BATCH_ORDER_WRITES, STABLE, STABLE_WRITES
from pagedkv.tables.output_set import OutputSet
from pagedkv.tables.pack import pack_at
from pagedkv.tables.refusals import refuse
from pagedkv.tables.sizes import Sizes, decode_words
from pagedkv.tables.step import Step
from pagedkv.tables.step_kernels import StepKernels
from pagedkv.tables.transfers import Transfers

__all__ = ["Committer"]

_Array = np.ndarray


class Committer(Transfers):
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
        hint = decode_words(geometry.max_num_reqs, len(geometry.specs))
        super().__init__(backend, staging_depth, hint)
        self.geometry, self.mirror = geometry, mirror
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
        self.graphs = StepGraphs(backend, self.kernels)
        self._take_state()
        seal(pack_at, self._packed[0], self.ring.buffer.words, *HOST_INPUTS.arrays, 0, 0, -1, self._mode)
        self._state = None  # the first step compiles the kernels, before it packs anything

    def add_outputs(self, num: int) -> None:
        """Make sure that there are `num` output sets."""
        while len(self.outputs) < num:
            shown = None if self.is_stable else self.stored
            self.outputs.append(OutputSet(self.backend, self.geometry, len(self.outputs), shown))
        self._state = None

    def output_set(self, out: int) -> OutputSet:
        """Return the output set of this number, or raise."""
        num = len(self.outputs)
        if not 0 <= check_int("out", out, -MAX_INT32) < num:
            raise ValueError(f"out must name one of {num} output sets, got {out} (make more with outputs(n))")
        return self.outputs[out]

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
            self.refuse_capture(stream_id)
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
                outputs = self.outputs[out]
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
            except (TypeError, ValueError, LookupError, AttributeError):
                key = -1
        if key < 0:
            arrays = (query_start_loc, num_computed_tokens, positions, rows)
            return self._commit_any(arrays, num_reqs, num_reqs_padded, num_tokens_padded, out, stream)
        graph = buffer.graphs.get(key)
        if graph is None:
            self.order(stream_id)
            self.graphs.send(buffer, self.staging, key, outputs, HOST_INPUTS, stream)
        else:
            if stream_id != self.last_stream:
                self.order(stream_id)
            backend.launch(graph.graphExec, stream_id)
        backend.record(event_id, stream_id)
        self.last_event, self.last_stream = buffer.event, stream_id
        self.ring.buffer = buffer.next
        return Step(outputs, buffer.event, num_reqs, num_reqs_padded, num_tokens, num_tokens_padded)

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
        outputs = self.output_set(out)
        starts, computed, positions, rows = arrays
        check_rows_given(rows, stable=self.is_stable)
        check_int("num_reqs", num_reqs, 0, self.geometry.max_num_reqs)
        inputs = step_inputs(self.backend, num_reqs, starts, computed, positions, rows)
        if inputs.device_key:
            outputs.overlaps.refuse_of_step(inputs.device)
        step = (inputs, num_reqs, num_reqs_padded, tokens_padded, out)
        buffer = self.ring.buffer
        key, num_tokens = self.pack(buffer, *step)
        if key < 0:
            buffer = self._grow(-key)
            key, num_tokens = self.pack(buffer, *step)
        self.order(stream.ptr)
        self.graphs.send(buffer, self.staging, key, outputs, inputs, stream)
        self.finish(buffer.event, stream.ptr)
        self.ring.buffer = buffer.next
        return Step(outputs, buffer.event, num_reqs, num_reqs_padded, num_tokens, tokens_padded)

    def commit_rows(self, stream: Any) -> None:
        """Send the dirty ranges alone, where there are any."""
        if not self.mirror.state.dirty[self.subscriber, 0]:
            return
        stream = self.backend.stream(stream)
        self.refuse_capture(stream.ptr)
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

    def capture(self, buffer: HostBuffer, key: int, out: int) -> None:
        """Capture a step of host inputs and the sizes of `key` ahead."""
        self.backend.compile()
        self.graphs.capture(buffer, self.staging, key, self.outputs[out])

    def hold(self, step: Any) -> None:
        """Let no other step be packed before this captured one was replayed: it would be overwritten."""
        self.pending = step
        self._state = None  # what comes next goes by `_prepare`, and the short way pays nothing for it

    def _prepare(self) -> None:
        self.refuse_pending()
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
