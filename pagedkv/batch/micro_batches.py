"""MicroBatches: a step in parts that run one after the other, each with metadata of its own."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pagedkv.batch.cutting import check_cuts, part_of, places_of, reads_before_written
from pagedkv.batch.metadata import StepMetadata, over
from pagedkv.batch.step_part import PartArrays, Place, StepPart
from pagedkv.checks import as_int32, check_int, check_shape
from pagedkv.constants import NULL_BLOCK_ID
from pagedkv.kernels import _grid as grids
from pagedkv.tables.inputs import check_rows_given
from pagedkv.tables.multi_group import MultiGroupBlockTable
from pagedkv.tables.step import Step

__all__ = ["MicroBatches"]

_MOST_MADE = 256
_Made = tuple[StepPart, Callable[[Any, Any], None]]


class MicroBatches:
    """Device buffers for the micro-batches of a step, at addresses that never change.

    A split writes them anew; where two steps are in flight, each needs buffers of its own.

    Parameters
    ----------
    table : MultiGroupBlockTable
        Whose steps are split.
    num : int
        Micro-batches of a step at most.

    Raises
    ------
    ValueError, TypeError
        `num` is no int, or less than 1.
    BackendUnavailableError
        The kernels cannot be compiled here.
    """

    def __init__(self, table: MultiGroupBlockTable, num: int = 2) -> None:
        check_int("number of micro-batches", num, 1)
        self._committer = table._committer  # noqa: SLF001
        self._mirror = table.mirror
        backend, geometry = self._committer.backend, self._committer.geometry
        backend.compile()  # which a capture must not do
        self._arrays = [PartArrays(backend, geometry) for _ in range(num)]
        self._groups = backend.asarray(geometry.groups)
        self._ready, self._ready_in_capture = backend.event(), backend.event()
        self._made: dict[tuple[int, ...], _Made] = {}

    @property
    def num(self) -> int:
        """Micro-batches of a step at most."""
        return len(self._arrays)

    def split(
        self, metadata: StepMetadata, cuts: Sequence[int], stream: Any = None, *, enqueue: bool = True
    ) -> tuple[StepMetadata, ...]:
        """Split a step into micro-batches, in one small kernel for each and without a copy.

        Micro-batch k holds the tokens from ``cuts[k - 1]`` up to ``cuts[k]``. A request that is cut has a row
        in both: in the earlier one its sequence ends at the cut, in the later one the tokens before the cut
        count as computed. Padding is kept, at the end of the last. Which rows a micro-batch takes is decided
        by `query_start_loc_cpu`; where the device has its own, it must split the tokens over the same rows at
        the cuts.

        Parameters
        ----------
        metadata : StepMetadata
            Of a whole step of the table, padded or not.
        cuts : sequence of int
            Token indices, strictly increasing, inside (0, T); none leave one micro-batch.
        stream : CuPy stream, optional
            Where the kernels go; it may be capturing. CuPy's current stream where None.
        enqueue : bool
            False where a graph that holds the kernels of these very cuts and rows is launched instead.

        Returns
        -------
        tuple of StepMetadata
            One for each micro-batch, its number in `ubatch`; valid as the step's arrays are, and until the
            next split into these buffers. A stream that runs one of them waits for its ``step.ready``; see
            `StepPart`.

        Raises
        ------
        ValueError
            Cuts out of order or range, or too many; a step of another table, or a micro-batch; a cut within
            a request where a group holds recurrent states, whose blocks are those of the whole step.
        TypeError
            A cut is no int.
        PagedKVError
            A captured step was packed and not replayed yet, and nothing is being captured.
        """
        step, places = self._check(metadata, cuts)
        parts = [part_of(metadata.batch, place, k) for k, place in enumerate(places)]
        sizes = [(part.num_reqs_unpadded, part.num_tokens_unpadded) for part in parts]
        backend = self._committer.backend
        with backend.activate():
            made = [self._make(step, k, *at) for k, at in enumerate(zip(places, sizes, strict=True))]
            ready = step.ready
            if enqueue:
                ready = self._launch(places, [launch for _, launch in made], backend.stream(stream))
            for part, _ in made:
                part.ready = ready
            return tuple(over(part, host) for (part, _), host in zip(made, parts, strict=True))

    def may_split(self, metadata: StepMetadata, cuts: Sequence[int], rows: Any = None) -> bool:
        """Whether no micro-batch reads a block that only a later one writes (a prefix shared in one step).

        `split` does not ask this. Read off the host mirror as it is: ask before the rows change.

        Parameters
        ----------
        metadata, cuts
            As for `split`.
        rows : int32 [num_reqs], optional
            With stable rows: as they were committed.

        Raises
        ------
        ValueError, TypeError
            As `split`; or rows that do not fit.
        """
        _, places = self._check(metadata, cuts)
        batch, geometry = metadata.batch, self._committer.geometry
        check_rows_given(rows, stable=self._committer.is_stable)
        lines = np.arange(batch.num_reqs_unpadded, dtype=np.int32)
        if rows is not None:
            lines = as_int32("rows", rows, -1, geometry.max_num_reqs - 1)
            check_shape("rows", lines, (batch.num_reqs_unpadded,), "[num_reqs]")
        parts = [part_of(batch, place, k) for k, place in enumerate(places)]
        for g, spec in enumerate(geometry.specs):
            if spec.state_mode == "none" or spec.max_num_encoder_tokens is not None:
                continue  # a running state and an encoder's tokens are one request's own
            blocks = np.where(lines[:, None] >= 0, self._mirror.block_table(g)[lines], NULL_BLOCK_ID)
            if reads_before_written(blocks, spec.block_size * geometry.shard(g).world_size, places, parts):
                return False
        return True

    def _check(self, metadata: StepMetadata, cuts: Sequence[int]) -> tuple[Step, list[Place]]:
        step, batch = metadata.step, metadata.batch
        if isinstance(step, StepPart):
            raise ValueError(  # noqa: TRY004 - it is the right type, but not a whole step
                f"metadata must be of a whole step, got micro-batch {batch.ubatch} (give all cuts at once)"
            )
        if step.geometry is not self._committer.geometry:
            raise ValueError(
                "metadata must be of a step of the table that MicroBatches was built for, got another's"
            )
        places = places_of(batch, check_cuts(cuts, batch.num_actual_tokens, self.num - 1))
        states = [g for g, spec in enumerate(step.geometry.specs) if spec.state_mode is not None]
        for before, place in pairwise(places):
            if states and place.first_req < before.last_req:
                raise ValueError(
                    f"cuts must lie between requests where a group holds recurrent states, got "
                    f"{place.first_token} inside request {place.first_req} (group {states[0]})"
                )
        return step, places

    def _make(self, step: Step, k: int, place: Place, sizes: tuple[int, int]) -> _Made:
        key = (id(step.outputs), k, *place, *sizes)
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _MOST_MADE:  # eager steps of ever new sizes
                self._made.clear()
            outputs, arrays = step.outputs, self._arrays[k]
            inputs = (self._groups, outputs.query_start_loc, outputs.seq_lens, outputs.token_reqs)
            own = (arrays.query_start_loc, arrays.seq_lens, arrays.token_reqs, arrays.local_seq_lens)
            launch = self._committer.backend.bind("split_batch", (*inputs, *own, *place))
            made = self._made[key] = StepPart(step, arrays, place, *sizes, step.ready), launch
        return made

    def _launch(self, places: list[Place], launches: list[Any], stream: Any) -> Any:
        committer = self._committer
        is_captured = stream.ptr != 0 and committer.backend.is_capturing(stream.ptr)
        if not is_captured:  # a consumer's graph has its own order
            committer.refuse_pending()
            committer.order(stream.ptr)
        for place, launch in zip(places, launches, strict=True):
            tokens, reqs = place.last_token - place.first_token, place.last_req - place.first_req
            launch(grids.split_batch(tokens, reqs, len(self._groups)), stream)
        if is_captured:  # recorded in a capture, an event is good for nothing else
            committer.backend.record(self._ready_in_capture.ptr, stream.ptr)
            return self._ready_in_capture
        committer.finish(self._ready, stream.ptr)
        return self._ready
