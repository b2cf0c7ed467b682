"""Who is in the batch: what an input batch tells of its requests."""

from collections.abc import Hashable

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.filling import sizes
from pagedkv.batch.states import Int64Array, RequestStates
from pagedkv.checks import IntArray

__all__ = ["BatchReads"]


class BatchReads:
    """Base of `InputBatch`: reads, each an array of its own in batch order."""

    _states: RequestStates

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return self._states.num_reqs - len(self._states.holes)

    @property
    def req_ids(self) -> list[Hashable]:
        """Names in batch order; None where `remove_request` left a hole."""
        slots = self._states.slots.tolist()
        return [self._states.name_of(slot) if slot >= 0 else None for slot in slots]

    @property
    def handles(self) -> Int64Array:
        """Handles in batch order, int64 [num_reqs]; -1 in holes."""
        return self._column(a.HANDLE, -1)

    @property
    def slots(self) -> Int64Array:
        """Low words of the handles, int64 [num_reqs]: small numbers that stay with a request.

        State that an engine keeps by slot needs no moves; a step gathers it by these.
        """
        return self._states.slots.copy()

    @property
    def rows(self) -> IntArray:
        """Table rows in batch order, int32 [num_reqs]; with a manager, see `KVCacheManager.rows`."""
        return self._column(a.ROW, -1).astype(np.int32)

    @property
    def num_computed_tokens(self) -> IntArray:
        """Tokens in the cache before the step, int32 [num_reqs], as far as the host knows."""
        return self._column(a.COMPUTED, 0).astype(np.int32)

    @property
    def num_scheduled_tokens(self) -> IntArray:
        """Tokens of the step, int32 [num_reqs]."""
        return self._column(a.SCHEDULED, 0).astype(np.int32)

    @property
    def previous_positions(self) -> IntArray:
        """Where each request stood in the step before, int32 [num_reqs]; -1 for those that were not in it.

        By these an engine that runs ahead gathers the last step's sampled tokens on the device.
        """
        return self._column(a.PREVIOUS, -1).astype(np.int32)

    def sizes(self) -> tuple[int, int, int]:
        """Return num_reqs, num_tokens and max_query_len of the step, as `GraphSizes.dispatch` takes them."""
        num_reqs, num_tokens, longest = sizes(self._states.addresses)
        return num_reqs - len(self._states.holes), num_tokens, longest

    def __contains__(self, req_id: Hashable) -> bool:
        """Whether a request is known, in the batch or resting."""
        return self._states.slot_of(req_id) is not None

    def __len__(self) -> int:
        """Return how many requests are known."""
        return len(self._states)

    def position_of(self, req_id: Hashable) -> int | None:
        """Position of a request, None where it rests.

        Raises
        ------
        LookupError
            The request is unknown.
        """
        position = int(self._states.numbers[self._slot(req_id), a.POSITION])
        return position if position >= 0 else None

    def handle_of(self, req_id: Hashable) -> int:
        """Handle of a known request, for `RunningRequests`.

        Raises
        ------
        LookupError
            The request is unknown.
        """
        return int(self._states.numbers[self._slot(req_id), a.HANDLE])

    def _column(self, field: int, in_holes: int) -> Int64Array:
        slots = self._states.slots
        return np.where(slots >= 0, self._states.numbers[slots, field], in_holes)

    def _slot(self, req_id: Hashable) -> int:
        slot = self._states.slot_of(req_id)
        if slot is None:
            raise LookupError(f"request {req_id!r} must be known, got none of this name (it is over, or new)")
        return slot
