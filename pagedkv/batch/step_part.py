"""StepPart: the device's side of one micro-batch, with the names of a whole `Step`."""

from typing import Any, NamedTuple

import numpy as np

from pagedkv.tables.geometry import Geometry, aligned
from pagedkv.tables.step import Step

__all__ = ["PartArrays", "Place", "StepPart"]


class Place(NamedTuple):
    """Rows and tokens of a micro-batch within its step; `last_*` is one past the last."""

    first_req: int
    last_req: int
    first_token: int
    last_token: int


class PartArrays:
    """What split_batch writes for one micro-batch: device arrays at addresses that never change.

    Parameters
    ----------
    backend : backend
    geometry : Geometry
    """

    def __init__(self, backend: Any, geometry: Geometry) -> None:
        num_groups, max_num_reqs = len(geometry.groups), geometry.max_num_reqs
        self.query_start_loc = backend.zeros(max_num_reqs + 1, np.int32)
        self.seq_lens = backend.zeros(max_num_reqs, np.int32)
        self.token_reqs = backend.zeros(geometry.max_num_batched_tokens, np.int32)
        self.local_seq_lens = backend.zeros((num_groups, aligned(max_num_reqs)), np.int32)


class StepPart:
    """Device views of one micro-batch: slices of the step's arrays, and the arrays of its own.

    The slices are valid until the next commit into the step's output set, the others until the next split
    into the same `MicroBatches`. The slices start at a cut, so they are not aligned to 256 bytes, as all
    other arrays are: copy them for a consumer that needs it.

    Parameters
    ----------
    step : Step
        The whole step.
    arrays : PartArrays
    place : Place
        Where the micro-batch lies in the step.
    num_reqs, num_tokens : int
        Of its rows and tokens those that are real.
    ready : event
        Done once all arrays of the micro-batch hold its values, those of the step among them: a stream that
        runs it waits for this. One for all micro-batches of a split, and used again by the next split into
        the same `MicroBatches`. Of a split that is captured it belongs to the capture: a stream that waits
        for it joins in, and it means nothing afterwards. Where no kernels were enqueued (``enqueue=False``)
        it is the step's own: of a packed step `mark_replayed` records it behind the graph that holds them; a
        commit knows nothing of such a graph.
    """

    __slots__ = ("_arrays", "_first_req", "_first_token", "_step", "kept", "num_reqs", "num_reqs_padded",
                 "num_tokens", "num_tokens_padded", "ready")  # fmt: skip

    def __init__(
        self, step: Step, arrays: PartArrays, place: Place, num_reqs: int, num_tokens: int, ready: Any
    ) -> None:
        self._step, self._arrays, self.ready = step, arrays, ready
        self._first_req, self._first_token = place.first_req, place.first_token
        self.num_reqs, self.num_reqs_padded = num_reqs, place.last_req - place.first_req
        self.num_tokens, self.num_tokens_padded = num_tokens, place.last_token - place.first_token
        self.kept: dict[tuple[Any, ...], Any] = {}

    @property
    def geometry(self) -> Geometry:
        """As `Step.geometry`."""
        return self._step.geometry

    def resized(self, num_reqs_padded: int, num_tokens_padded: int) -> "StepPart":
        """As `Step.resized`."""
        first_req, first_token = self._first_req, self._first_token
        place = Place(first_req, first_req + num_reqs_padded, first_token, first_token + num_tokens_padded)
        return StepPart(self._step, self._arrays, place, self.num_reqs, self.num_tokens, self.ready)

    def block_table(self, group: int = 0) -> Any:
        """As `Step.block_table`, of the micro-batch's rows."""
        return self._step.block_table(group)[self._rows]

    def kernel_block_table(self, group: int = 0, view: int = 0) -> Any:
        """As `Step.kernel_block_table`, of the micro-batch's rows."""
        return self._step.kernel_block_table(group, view)[self._rows]

    def slot_mapping(self, group: int = 0) -> Any:
        """As `Step.slot_mapping`, of the micro-batch's tokens."""
        return self._step.slot_mapping(group)[self._tokens]

    @property
    def positions(self) -> Any:
        """As `Step.positions`, of the micro-batch's tokens."""
        return self._step.positions[self._tokens]

    @property
    def query_start_loc(self) -> Any:
        """First token of each row, counted from the micro-batch's first, int32 [num_reqs_padded + 1]."""
        return self._arrays.query_start_loc[: self.num_reqs_padded + 1]

    @property
    def seq_lens(self) -> Any:
        """Length of each sequence up to the micro-batch's last token, int32 [num_reqs_padded]."""
        return self._arrays.seq_lens[: self.num_reqs_padded]

    def local_seq_lens(self, group: int = 0) -> Any:
        """Tokens of `seq_lens` that this context-parallel rank holds, int32 [num_reqs_padded]."""
        return self._arrays.local_seq_lens[group][: self.num_reqs_padded]

    @property
    def token_to_req_indices(self) -> Any:
        """Row of each token, counted from the micro-batch's first, int32 [num_tokens_padded]."""
        return self._arrays.token_reqs[: self.num_tokens_padded]

    def state_indices(self, group: int) -> Any:
        """As `Step.state_indices`, of the micro-batch's rows."""
        return self._step.state_indices(group)[self._rows]

    def initial_state_indices(self, group: int) -> Any:
        """As `Step.initial_state_indices`, of the micro-batch's rows."""
        return self._step.initial_state_indices(group)[self._rows]

    def state_columns(self, group: int) -> Any:
        """As `Step.state_columns`, of the micro-batch's rows."""
        return self._step.state_columns(group)[:, self._rows]

    @property
    def _rows(self) -> slice:
        return slice(self._first_req, self._first_req + self.num_reqs_padded)

    @property
    def _tokens(self) -> slice:
        return slice(self._first_token, self._first_token + self.num_tokens_padded)
