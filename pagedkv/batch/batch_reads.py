"""Who is in the batch: what an input batch tells of its requests."""

from collections.abc import Hashable

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.filling import sizes
from pagedkv.batch.rows import Rows
from pagedkv.batch.states import Int64Array, RequestStates
from pagedkv.checks import IntArray

__all__ = ["BatchReads"]


class BatchReads:
    """Base of `InputBatch`: reads, each an array of its own in batch order.

    An array has an element for each of P positions: for the `num_reqs` requests, and -1 for each hole that
    `remove_request` left. Without holes P is num_reqs.
    """

    _states: RequestStates
    _rows: Rows

    @property
    def num_reqs(self) -> int:
        """Requests in the batch, holes not counted."""
        return self._states.num_reqs - len(self._states.holes)

    @property
    def req_ids(self) -> list[Hashable]:
        """Names in batch order, one for each of P positions; None in holes."""
        slots = self._states.slots.tolist()
        return [self._states.name_of(slot) if slot >= 0 else None for slot in slots]

    @property
    def handles(self) -> Int64Array:
        """Handles in batch order, int64 [P]; -1 in holes."""
        return self._states.column(a.HANDLE)

    @property
    def slots(self) -> Int64Array:
        """Low words of the handles, int64 [P]: small numbers that stay with a request; -1 in holes.

        State that an engine keeps by slot needs no moves; a step gathers it by these.
        """
        return self._states.slots.copy()

    @property
    def rows(self) -> IntArray:
        """Table rows in batch order, int32 [P], as `rows` of other calls take them; -1 in holes.

        With a manager they are asked of it, and -1 as well where a request has no blocks.

        Raises
        ------
        StaleSequenceError
            The manager has freed a sequence that is still in the batch.
        """
        return self._rows.of_batch()

    @property
    def num_computed_tokens(self) -> IntArray:
        """Tokens in the cache before the step, int32 [P], as far as the host knows; -1 in holes."""
        return self._states.column(a.COMPUTED).astype(np.int32)

    @property
    def num_scheduled_tokens(self) -> IntArray:
        """Tokens of the step, int32 [P]; -1 in holes."""
        return self._states.column(a.SCHEDULED).astype(np.int32)

    @property
    def previous_positions(self) -> IntArray:
        """Where each request stood in the step committed last, int32 [P]; -1: it was not in it, or a hole.

        That step is the last `commit` or `pack`, whatever has moved since; a `dummy` is none. By these an
        engine that runs ahead gathers the last step's sampled tokens on the device: read them before the next
        commit.
        """
        return self._states.committed_positions()

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

    def _slot(self, req_id: Hashable) -> int:
        slot = self._states.slot_of(req_id)
        if slot is None:
            raise LookupError(f"request {req_id!r} must be known, got none of this name (it is over, or new)")
        return slot
