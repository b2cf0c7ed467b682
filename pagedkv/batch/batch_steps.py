"""Taking a scheduler step: the short way where nobody comes or goes, and the order of the batch."""

from pagedkv.batch import advance as a
from pagedkv.batch.admission import plan_update
from pagedkv.batch.batch_commits import BatchCommits
from pagedkv.batch.ready import ready_running
from pagedkv.batch.reordering import classes_of, order_by_class, swaps_of
from pagedkv.batch.rows import NO_BLOCKS
from pagedkv.batch.scheduler_output import RunningRequests, SchedulerOutput
from pagedkv.batch.states import Int64Array
from pagedkv.batch.update import take
from pagedkv.mirror import HostMirror
from pagedkv.tables.inputs import NO_INT32, NO_INT64

__all__ = ["BatchSteps"]

_DONE, _UNORDERED = int(a.Code.DONE), int(a.Code.UNORDERED)
_INT32, _INT64 = NO_INT32.dtype, NO_INT64.dtype


class BatchSteps(BatchCommits):
    """Base of `InputBatch`: the update of a step."""

    _mirror: HostMirror

    def update(self, output: SchedulerOutput) -> Int64Array:
        """Take one scheduler step: who goes, who comes, which blocks are new, in the right order.

        Parameters
        ----------
        output : SchedulerOutput

        Returns
        -------
        ndarray of int64, shape [n]
            Handles of the new requests, in their order.

        Raises
        ------
        LookupError, StaleSequenceError
            An id or a handle is unknown.
        CapacityError
            More requests, tokens or blocks than there is room for.
        ValueError, TypeError
            A request is named twice, or a number, shape or dtype is wrong. Nothing has changed then.
        """
        if type(output) is not SchedulerOutput:
            raise TypeError(f"output must be a SchedulerOutput, got {type(output).__name__}")
        running, new, resumed, finished, preempted = output
        try:
            comes_or_goes = len(new.req_ids) or len(resumed.req_ids) or len(finished) or len(preempted)
        except (TypeError, AttributeError):  # to be refused by its name
            comes_or_goes = True
        if not (comes_or_goes or self._states.holes):
            code = self._advance(running)
            if code == _DONE:
                return NO_INT64
            if code == _UNORDERED:
                self._put_in_order()
                return NO_INT64
        plan = plan_update(self._states, self._rows, self._mirror, output)
        handles = take(self._states, self._rows, plan)
        if self._states.setup[a.DECODE_THRESHOLD] >= 0:
            self._put_in_order()
        return handles

    def _advance(self, running: RunningRequests) -> int:
        """Take a step of running requests alone; a fault is left for `plan_update` to name."""
        handles, scheduled, computed, counts, ids = running
        if counts is None and ids is None:
            counts, ids = NO_BLOCKS
        elif self.manager is not None:
            return a.Code.BLOCKS
        state, tables = self._states.addresses, self._mirror.addresses
        try:
            if computed is None:
                computed = NO_INT32
            elif not len(computed):
                computed = None
            # The compiler's refusal takes longer to compose than what it would refuse to convert.
            int32s = scheduled.dtype is computed.dtype is counts.dtype is ids.dtype is _INT32
            if int32s and handles.dtype is _INT64:
                return a.advance(state, tables, handles, scheduled, computed, counts, ids)
        except (TypeError, ValueError, AttributeError):  # arrays to convert, or to refuse
            pass
        ready = ready_running(running, None if self.manager is not None else self._mirror.num_groups)
        return a.advance(state, tables, *ready[:3], *ready.blocks)

    def _put_in_order(self) -> None:
        numbers, setup = self._states.numbers[self._states.slots], self._states.setup
        thresholds = (int(setup[a.DECODE_THRESHOLD]), int(setup[a.SHORT_EXTEND_THRESHOLD]))
        classes = classes_of(numbers[:, a.COMPUTED].copy(), numbers[:, a.SCHEDULED].copy(), *thresholds)
        self._permute(order_by_class(classes))

    def _permute(self, order: Int64Array) -> None:
        first, second = swaps_of(order)
        if first.size:
            self._rows.swap(first, second)
            self._states.permute(order)
            self._rows.enter(self._states.order[first].tolist() + self._states.order[second].tolist())
