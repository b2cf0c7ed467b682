"""Committer: the way of a step from the mirror to the device, in one copy and a few kernels.

Packed words go to one staging buffer, cross in one copy, and `apply_writes`, `gather_rows` (stable rows
whose order changed) and `slot_mapping` bring every device array up to date. On a GPU the copy and the
kernels are one captured graph for each ring buffer and size bucket: one launch is all that a step costs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pagedkv.backends.buffers import HostBuffer
from pagedkv.kernels import _grid as grids
from pagedkv.kernels._layout import HEADER_WORDS, NUM_GATHER, NUM_WRITES, WRITE_WORDS
from pagedkv.mirror import HostMirror
from pagedkv.tables.device_tables import DeviceTables
from pagedkv.tables.geometry import Geometry
from pagedkv.tables.pack import Mode, PackFault, pack_step
from pagedkv.tables.refusals import refuse
from pagedkv.tables.staging import StagingRing, bucket
from pagedkv.tables.step import OutputSet

__all__ = ["Committer", "Inputs", "Sizes", "Staging"]

Launch = Callable[[tuple[int, int], Any], None]


class Inputs(NamedTuple):
    """A step's inputs: host arrays travel with it; for device arrays the host form is empty."""

    query_start_loc: Any
    num_computed_tokens: Any
    positions: Any
    rows: Any
    num_positions: int  # -1: positions are formed
    device: tuple[Any, Any, Any]  # the device forms of the first three, or None each


class Sizes(NamedTuple):
    """What a graph is captured for; every kernel is right for any step within these bounds."""

    words: int
    tokens: int
    positions: int  # batch positions to gather; 0 = none, and no gather_rows
    writes: bool


class Staging:
    """The device's end of the copy, and the kernels bound to it.

    Parameters
    ----------
    backend : backend
    num_words : int
        Words that it holds.
    """

    def __init__(self, backend: Any, num_words: int) -> None:
        self.words = backend.zeros(num_words, np.int32)
        self.bound: dict[Any, tuple[Launch, Launch, Launch]] = {}


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
        self.mode = Mode.STABLE if stable_rows else Mode.BATCH_ORDER
        self.subscriber = mirror.subscribe()
        self.stored = DeviceTables(backend, geometry, with_views=not stable_rows)
        self.groups, self.views = backend.asarray(geometry.groups), backend.asarray(geometry.views)
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
        self.last_stream: Any = None
        self.last_event: Any = None
        self._staged: dict[str, Any] = {}
        self._no_ints, self._no_positions = backend.zeros(1, np.int32), backend.zeros(1, np.int64)

    def add_outputs(self, num: int) -> None:
        """Make sure that there are `num` output sets."""
        while len(self.outputs) < num:
            shown = None if self.mode is Mode.STABLE else self.stored
            self.outputs.append(OutputSet(self.backend, self.geometry, shown))

    def pack(
        self,
        buffer: HostBuffer,
        inputs: Inputs,
        num_reqs: int,
        num_reqs_padded: int,
        tokens_padded: int,
        outputs: OutputSet,
        mode: Mode,
    ) -> tuple[int, int, int]:
        """Pack a step into a buffer; returns (0, words, num_tokens), or raises with nothing changed.

        The one fault that is handed back is GROW, with the words needed.
        """
        state = self.mirror.state
        code, value, place = pack_step(
            buffer.words,
            state.blocks,
            state.layout,
            state.counts,
            state.ranges[self.subscriber],
            state.dirty[self.subscriber],
            outputs.batch,
            self.versions,
            inputs.query_start_loc,
            inputs.num_computed_tokens,
            inputs.positions,
            inputs.rows,
            num_reqs,
            num_reqs_padded,
            outputs.reqs_seen,
            tokens_padded,
            outputs.tokens_seen,
            self.geometry.max_num_batched_tokens,
            inputs.num_positions,
            self.mode is Mode.STABLE and self.geometry.has_windows,
            int(mode),
        )
        if code > PackFault.GROW:
            refuse(code, value, place, self.geometry, tokens_padded)
        return code, value, place

    def commit(
        self,
        inputs: Inputs,
        num_reqs: int,
        num_reqs_padded: int,
        tokens_padded: int,
        out: int,
        stream: Any,
    ) -> tuple[HostBuffer, int]:
        """Enqueue a whole step; returns its buffer (whose event is the step's) and its tokens."""
        outputs, ring = self.outputs[out], self.ring
        buffer = ring.acquire()
        step = (inputs, num_reqs, num_reqs_padded, tokens_padded, outputs, self.mode)
        code, words, num_tokens = self.pack(buffer, *step)
        if code:
            buffer = self._grow(words)
            code, words, num_tokens = self.pack(buffer, *step)
        most_tokens = num_tokens if num_tokens >= 0 else -num_tokens - 1
        sizes = self.sizes(buffer, words, max(most_tokens, tokens_padded, outputs.tokens_seen))
        self.order(stream)
        self._send(buffer, sizes, out, inputs.device, stream)
        outputs.tokens_seen, outputs.reqs_seen = most_tokens, num_reqs
        self.finish(buffer.event, stream)
        ring.advance()
        return buffer, num_tokens

    def commit_rows(self, stream: Any) -> bool:
        """Send the dirty ranges alone; returns whether there were any."""
        if not self.mirror.state.dirty[self.subscriber, 0]:
            return False
        mode = Mode.WRITES_ONLY if self.mode is Mode.STABLE else Mode.BATCH_ORDER
        step = (_NOTHING, 0, 0, -1, self.outputs[0], mode)
        buffer = self.ring.acquire()
        code, words, _ = self.pack(buffer, *step)
        if code:
            buffer = self._grow(words)
            _, words, _ = self.pack(buffer, *step)
        self.order(stream)
        self._copy(buffer, self.staging.words, words, stream)
        apply_writes, _, _ = self.kernels(self.staging, 0, _NOTHING.device)
        apply_writes(grids.apply_writes(words // WRITE_WORDS), stream)
        self.finish(buffer.event, stream)
        self.ring.advance()
        return True

    def stage(self, name: str, array: Any, capacity: int, stream: Any) -> Any:
        """Copy a host array into its own persistent device array, in one copy, and return the view."""
        if name not in self._staged:
            self._staged[name] = self.backend.zeros(capacity, array.dtype)
        target, words = self._staged[name][: array.size], array.view(np.int32)
        buffer = self.ring.acquire()
        if words.size > buffer.words.size:
            buffer = self.ring.grow(words.size)
        buffer.words[: words.size] = words
        self.order(stream)
        self._copy(buffer, target.view(np.int32), words.size, stream)
        self.finish(buffer.event, stream)
        self.ring.advance()
        return target

    def order(self, stream: Any) -> None:
        """Put an event wait between this call and the last one where their streams differ."""
        if self.last_event is not None and self.backend.stream_id(stream) != self.last_stream:
            self.backend.wait(stream, self.last_event)

    def finish(self, event: Any, stream: Any) -> None:
        """Record that everything enqueued so far belongs to this event."""
        self.backend.record(event, stream)
        self.last_event, self.last_stream = event, self.backend.stream_id(stream)

    def sizes(self, buffer: HostBuffer, words: int, tokens: int) -> Sizes:
        """Round a packed step up to the sizes of its graph; nothing is rounded where none is captured."""
        header = buffer.words
        return Sizes(
            bucket(words) if self.use_graphs else words,
            token_bucket(tokens),
            token_bucket(header[NUM_GATHER]),
            bool(header[NUM_WRITES]),
        )

    def enqueue(self, buffer: HostBuffer, staging: Staging, sizes: Sizes, out: int, device: Any) -> Any:
        """Return ``run(stream)``: the copy and the kernels of a step of these sizes."""
        apply_writes, gather_rows, slot_mapping = self.kernels(staging, out, device)
        num_groups = max(len(self.geometry.specs), 1)

        def run(stream: Any) -> None:
            self.backend.copy(staging.words, buffer, sizes.words, stream)
            if sizes.writes:
                apply_writes(grids.apply_writes(sizes.words // WRITE_WORDS), stream)
            if sizes.positions:
                gather_rows(grids.gather_rows(sizes.positions, num_groups), stream)
            slot_mapping(grids.slot_mapping(sizes.tokens, self.geometry.max_num_reqs, num_groups), stream)

        return run

    def kernels(self, staging: Staging, out: int, device: Any) -> tuple[Launch, Launch, Launch]:
        """Return the step's kernels bound to a staging array, an output set and device inputs."""
        key = (out, *(0 if array is None else array.data.ptr for array in device))
        bound = staging.bound.get(key)
        if bound is None:
            bound = staging.bound[key] = self._bind(staging, self.outputs[out], device)
        return bound

    def bind_slot_mapping(self, inputs: tuple[Any, Any, Any], scalars: tuple[int, ...]) -> Launch:
        """Bind slot_mapping alone: (query_start_loc, positions, rows) on the device, scalars given."""
        query_start_loc, positions, rows = inputs
        tables, outputs = self.stored, self.outputs[0]
        return self.backend.bind(  # type: ignore[no-any-return]
            "slot_mapping",
            (
                self.staging.words,
                self.groups,
                query_start_loc,
                self._no_ints,
                positions,
                self._no_ints if rows is None else rows,
                tables.tables,
                tables.num_blocks,
                outputs.slots,
                outputs.positions,
                outputs.seq_lens,
                outputs.query_start_loc,
                *scalars,
            ),
        )

    def _bind(self, staging: Staging, outputs: OutputSet, device: Any) -> tuple[Launch, Launch, Launch]:
        bind = self.backend.bind
        stored, shown = self.stored, outputs.shown
        query_start_loc, computed, positions = device
        query_start_loc = self._no_ints if query_start_loc is None else query_start_loc
        computed = self._no_ints if computed is None else computed
        positions = self._no_positions if positions is None else positions
        rows = (shown.tables, shown.num_blocks)
        return (
            bind(
                "apply_writes",
                (staging.words, self.groups, self.views, shown.first_live)
                + (stored.tables, stored.num_blocks, *rows, shown.kernel_tables),
            ),
            bind(
                "gather_rows",
                (staging.words, self.groups, self.views, computed, stored.tables, stored.num_blocks)
                + (*rows, shown.first_live, shown.kernel_tables),
            ),
            bind(
                "slot_mapping",
                (staging.words, self.groups, query_start_loc, computed, positions, self._no_ints, *rows)
                + (outputs.slots, outputs.positions, outputs.seq_lens, outputs.query_start_loc)
                + (-1, 0, 0, 0),
            ),
        )

    def _send(self, buffer: HostBuffer, sizes: Sizes, out: int, device: Any, stream: Any) -> None:
        if self.use_graphs:
            key = (sizes, out, *(0 if array is None else array.data.ptr for array in device))
            graph = buffer.graphs.get(key)
            if graph is None:
                graph = self.capture(buffer, sizes, out, device)
                buffer.graphs[key] = graph
            self.backend.launch(graph, stream)
        else:
            self.enqueue(buffer, self.staging, sizes, out, device)(stream)
        self.num_h2d_copies += 1
        self.num_h2d_bytes += 4 * sizes.words

    def capture(self, buffer: HostBuffer, sizes: Sizes, out: int, device: Any) -> Any:
        """Capture a step of these sizes."""
        return self.backend.capture(self.enqueue(buffer, self.staging, sizes, out, device))

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


_NO_INT32 = np.empty(0, np.int32)
_NOTHING = Inputs(np.zeros(1, np.int32), _NO_INT32, np.empty(0, np.int64), _NO_INT32, -1, (None, None, None))


def decode_words(num_reqs: int, num_groups: int, new_blocks: int | None = None) -> int:
    """Words of a decode step of `num_reqs` requests in which `new_blocks` blocks are appended."""
    blocks = num_reqs * num_groups if new_blocks is None else new_blocks
    return HEADER_WORDS + 3 * (num_reqs + 4) + (WRITE_WORDS + 1) * blocks + 8


def token_bucket(num: int) -> int:
    """Round up to 0, 1024, 8192, 65536, ...: the grids that graphs are captured with."""
    size = 1024
    while size < num:
        size *= 8
    return size if num else 0
