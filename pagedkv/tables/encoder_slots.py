"""EncoderSlotMapping: where the encoder's tokens are written, for a cross-attention group.

A step's decoder tokens have no slots in such a group. The encoder's tokens are written once, in the step
in which the encoder runs for a request; this maps them through the request's row, as a small step of its
own: prefix sums and rows cross in one copy, and slot_mapping forms the positions and the slots.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.checks import IntArray, as_int32, check_int, check_shape
from pagedkv.errors import CapacityError
from pagedkv.tables.committer import Committer
from pagedkv.tables.device_tables import DeviceTables
from pagedkv.tables.inputs import HOST_ONLY, check_rows_given
from pagedkv.tables.multi_group import MultiGroupBlockTable
from pagedkv.tables.output_set import OutputSet
from pagedkv.tables.pack import TOKENS_SEEN
from pagedkv.tables.pack_encoder import encoder_geometry, encoder_words, pack_encoder
from pagedkv.tables.sizes import Sizes, bucket
from pagedkv.tables.staging import StagingRing
from pagedkv.tables.step_kernels import Staging, StepKernels

__all__ = ["EncoderSlotMapping", "EncoderSlots"]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderSlots:
    """Device views of one encoder mapping; valid until the next call of the same `EncoderSlotMapping`.

    Parameters
    ----------
    slot_mapping : int64 [num_tokens]
        Slot of each encoder token, request after request.
    positions : int64 [num_tokens]
        Position of each in its encoder sequence.
    query_start_loc : int32 [num_reqs + 1]
        Prefix sums of the lengths.
    seq_lens : int32 [num_reqs]
        The lengths.
    num_reqs, num_tokens : int
        Requests of the step, and encoder tokens.
    ready : event
        Done once the arrays hold these values; used again after `staging_depth` further calls of the same
        mapping.
    """

    slot_mapping: Any
    positions: Any
    query_start_loc: Any
    seq_lens: Any
    num_reqs: int
    num_tokens: int
    ready: Any


class EncoderSlotMapping:
    """Slots of the encoder's tokens in one cross-attention group.

    Parameters
    ----------
    table : MultiGroupBlockTable
        The tables of all groups.
    group : int
        The cross-attention group: its spec has `max_num_encoder_tokens`.
    max_num_tokens : int
        Most encoder tokens of one step, over all requests.

    Attributes
    ----------
    slot_mapping, positions : int64 [max_num_tokens]
        All of what `compute` writes, for consumers that read padded sizes: PAD and 0 past the last token.
    query_start_loc : int32 [max_num_reqs + 1]
        Likewise; the last value repeats.
    seq_lens : int32 [max_num_reqs]
        Likewise; 0 past the last request.

    Raises
    ------
    ValueError
        The group is not there, or holds no encoder tokens.

    Examples
    --------
    >>> from pagedkv.specs import KVCacheGroupSpec
    >>> groups = [16, KVCacheGroupSpec(4, max_num_encoder_tokens=10)]
    >>> table = MultiGroupBlockTable(groups, 4, 64, 64, backend="numpy")
    >>> mapping = EncoderSlotMapping(table, 1, 32)
    >>> table.add_row(([5], [3, 8]), 0)
    >>> table.add_row(([6], [9]), 1)
    >>> step = table.commit(2, [0, 1, 2], [0, 0])
    >>> step.slot_mapping(1)
    array([-1, -1])
    >>> mapping.compute([6, 0]).slot_mapping
    array([12, 13, 14, 15, 32, 33])
    """

    def __init__(self, table: MultiGroupBlockTable, group: int, max_num_tokens: int) -> None:
        self._committer = committer = table._committer  # noqa: SLF001
        check_int("group", group, 0, len(committer.geometry.specs) - 1)
        most = committer.geometry.specs[group].max_num_encoder_tokens
        if most is None:
            raise ValueError(
                f"group must be one that holds encoder tokens, got group {group} "
                "(give its KVCacheGroupSpec max_num_encoder_tokens)"
            )
        self.max_num_encoder_tokens = most
        self.max_num_tokens = check_int("max_num_tokens", max_num_tokens, 1)
        backend, max_num_reqs = committer.backend, committer.geometry.max_num_reqs
        geometry = encoder_geometry(committer.geometry, group, self.max_num_tokens)
        with backend.activate():
            self._kernels = StepKernels(backend, geometry, with_views=False)
            self._outputs = OutputSet(backend, geometry, 0, _stored_group(committer, group))
            most_words = bucket(encoder_words(max_num_reqs))
            self._ring = StagingRing(backend, len(committer.ring.buffers), most_words)
            self._staging = Staging(backend, most_words)
        self.slot_mapping = self._outputs.slot_mapping(0, self.max_num_tokens)
        self.positions = self._outputs.view("positions", self.max_num_tokens)
        self.query_start_loc = self._outputs.view("query_start_loc", max_num_reqs + 1)
        self.seq_lens = self._outputs.view("seq_lens", max_num_reqs)

    def compute(self, encoder_lens: Any, rows: Any = None, stream: Any = None) -> EncoderSlots:
        """Map positions 0 to length - 1 of each request through its row, from the committed tables.

        One copy to the device. A request's blocks must have been committed before, by the step's own
        `commit` for instance; what lies outside them maps to PAD.

        Parameters
        ----------
        encoder_lens : int32 [num_reqs]
            Encoder tokens of each request of the batch; 0 where the encoder does not run for it in this
            step, so that each request's slots are made once. On the host.
        rows : int32 [num_reqs], optional
            With stable rows: the table row of each request, -1 for a dummy. On the host.
        stream : CuPy stream, optional
            CuPy's current stream of the table's device where None.

        Returns
        -------
        EncoderSlots

        Raises
        ------
        CapacityError, ValueError, TypeError
            Lengths below 0, above max_num_encoder_tokens or together above max_num_tokens, more of them
            than max_num_reqs; rows out of range, or not given exactly where the table has stable rows.
            Nothing was enqueued or changed.
        PagedKVError
            The stream is being captured; or a captured step was packed and not yet replayed.
        """
        lens = as_int32("encoder_lens", encoder_lens, 0, self.max_num_encoder_tokens)
        num_tokens = self._count(lens)
        lines = self._lines(rows, lens.size)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        with self._committer.backend.activate():
            ready = self._send(starts, lines, num_tokens, stream)
        return EncoderSlots(
            self._outputs.slot_mapping(0, num_tokens),
            self._outputs.view("positions", num_tokens),
            self._outputs.view("query_start_loc", lens.size + 1),
            self._outputs.view("seq_lens", lens.size),
            lens.size,
            num_tokens,
            ready,
        )

    def _count(self, lens: IntArray) -> int:
        most = self._committer.geometry.max_num_reqs
        if lens.size > most:
            raise CapacityError(
                f"encoder_lens must hold at most max_num_reqs = {most} lengths, got {lens.size}"
            )
        num_tokens = int(lens.sum(dtype=np.int64))
        if num_tokens > self.max_num_tokens:
            raise CapacityError(
                f"encoder_lens must add up to at most max_num_tokens = {self.max_num_tokens}, "
                f"got {num_tokens} (run the encoder for fewer requests in one step)"
            )
        return num_tokens

    def _lines(self, rows: Any, num_reqs: int) -> IntArray | None:
        check_rows_given(rows, stable=self._committer.is_stable)
        if rows is None:
            return None
        lines = as_int32("rows", rows, -1, self._committer.geometry.max_num_reqs - 1)
        check_shape("rows", lines, (num_reqs,), "[num_reqs]")
        return lines

    def _send(self, starts: IntArray, lines: IntArray | None, num_tokens: int, stream: Any) -> Any:
        # A call like the committer's own: one line of events with it, and counted with its copies.
        committer, backend, seen = self._committer, self._committer.backend, self._outputs.seen
        stream = backend.stream(stream)
        committer.refuse_capture(stream.ptr)
        committer.refuse_pending()
        buffer = self._ring.buffer
        backend.wait_for(buffer.event_id)
        fill = max(num_tokens, int(seen[TOKENS_SEEN]))
        words = bucket(pack_encoder(buffer.words, starts, lines, committer.geometry.max_num_reqs, fill))
        run = self._kernels.run(buffer, self._staging, Sizes(words, fill, 0, False), self._outputs, HOST_ONLY)
        committer.order(stream.ptr)
        run(stream)
        seen[TOKENS_SEEN] = num_tokens
        committer.totals += (1, 4 * words)
        committer.finish(buffer.event, stream.ptr)
        self._ring.buffer = buffer.next
        return buffer.event


def _stored_group(committer: Committer, group: int) -> DeviceTables:
    """Return the committed tables with the counts of one group alone."""
    tables = copy.copy(committer.stored)
    tables.num_blocks = tables.num_blocks[group : group + 1]
    return tables
