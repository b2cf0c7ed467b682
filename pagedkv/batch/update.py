"""Taking a scheduler step in which requests come or go: in which order things happen."""

import numpy as np

from pagedkv.batch import advance as a
from pagedkv.batch.admission import Plan
from pagedkv.batch.ready import Admitted
from pagedkv.batch.rows import NO_BLOCKS, Rows
from pagedkv.batch.states import Int64Array, RequestStates, Standing

__all__ = ["add", "close_holes", "forget", "rest", "take", "wake"]


def take(states: RequestStates, rows: Rows, plan: Plan) -> Int64Array:
    """Take a step that was checked; returns the handles of the new requests, int64 [n].

    First everybody goes who does, so that rows and positions are free; then everybody comes, into the lowest
    holes; what holes are left are closed; and at last blocks are written, once every row is in its place.
    """
    forget(states, rows, plan.over)
    _leave(states, rows, plan.preempted, keep=False)
    _leave(states, rows, _resting(states, plan), keep=True)
    running = plan.running
    a.set_running(states.numbers, running.handles, running.scheduled, running.computed)
    new_slots, handles = _come(states, rows, plan)
    close_holes(states, rows)
    _write(rows, plan, new_slots)
    return handles


def add(states: RequestStates, rows: Rows, plan: Plan) -> Int64Array:
    """Let the new requests of a plan come, beside a batch that stays as it is, and return their handles."""
    new_slots, handles = _come(states, rows, plan)
    _write(rows, plan, new_slots)
    return handles


def forget(states: RequestStates, rows: Rows, slots: list[int]) -> None:
    """Let requests go for good."""
    _leave(states, rows, slots, keep=False)
    for slot in slots:
        states.close(slot)


def rest(states: RequestStates, rows: Rows) -> Standing:
    """Let the whole batch rest; returns how it stood, for `wake`."""
    before = states.standing()
    _leave(states, rows, states.slots[states.slots >= 0].tolist(), keep=True)
    states.condense()
    return before


def wake(states: RequestStates, rows: Rows, before: Standing) -> None:
    """Let the batch stand as it did before it was put to rest."""
    states.restore(before)
    rows.append(states.slots[states.slots >= 0].tolist(), NO_BLOCKS)


def close_holes(states: RequestStates, rows: Rows) -> None:
    """Move the highest requests into the lowest holes, and their rows with them."""
    srcs, tgts = states.condense()
    if srcs.size:
        rows.move(srcs, tgts)
        rows.enter(states.order[tgts].tolist())


def _leave(states: RequestStates, rows: Rows, slots: list[int], *, keep: bool) -> None:
    if not slots:
        return
    rows.leave(slots, keep=keep)
    if not keep:
        states.numbers[slots, a.PREEMPTED] = 1
    states.leave(np.array(slots)[states.numbers[slots, a.POSITION] >= 0])


def _come(states: RequestStates, rows: Rows, plan: Plan) -> tuple[list[int], Int64Array]:
    new_slots, handles = _open(states, plan.new)
    _start(states, new_slots, plan.new)
    _start(states, plan.resumed_slots, plan.resumed)
    starting = np.array(new_slots + plan.resumed_slots, np.int64)
    everybody = np.concatenate([starting, plan.running.slots])
    coming = everybody[states.numbers[everybody, a.POSITION] < 0].tolist()
    for slot in coming:
        states.enter(slot)
    rows.enter(coming)
    return new_slots, handles


def _write(rows: Rows, plan: Plan, new_slots: list[int]) -> None:
    if new_slots:
        rows.add(new_slots, plan.new.blocks)
    if plan.resumed_slots:
        rows.add(plan.resumed_slots, plan.resumed.blocks)
    if plan.running.handles.size:
        rows.append(plan.running.slots, plan.running.blocks)


def _resting(states: RequestStates, plan: Plan) -> list[int]:
    """Who is in the batch and in no list."""
    slots = states.slots[states.slots >= 0]
    is_named = states.numbers[slots, a.STAMP] == states.setup[a.STEP]
    return [slot for slot in slots[~is_named].tolist() if slot not in plan.resumed_slots]


def _open(states: RequestStates, new: Admitted) -> tuple[list[int], Int64Array]:
    slots = []
    given = [None] * len(new.req_ids) if new.handles is None else new.handles.tolist()
    for req_id, handle in zip(new.req_ids, given, strict=True):
        slots.append(states.open(req_id, states.new_handle() if handle is None else handle))
    return slots, states.numbers[slots, a.HANDLE]


def _start(states: RequestStates, slots: list[int], admitted: Admitted) -> None:
    if not slots:
        return
    numbers = states.numbers
    numbers[slots, a.COMPUTED] = admitted.computed
    numbers[slots, a.SCHEDULED] = admitted.scheduled
    numbers[slots, a.PREFILL] = admitted.num_prefill
    numbers[slots, a.PREEMPTED] = 0
