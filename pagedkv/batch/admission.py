"""Checking a scheduler step: everything that can be wrong with it, before anything is changed."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pagedkv._rowops import Fault, find_fault
from pagedkv.batch import advance as a
from pagedkv.batch.ready import Admitted, Running, raise_length, ready_admitted, ready_running
from pagedkv.batch.rows import Blocks, Rows
from pagedkv.batch.scheduler_output import SchedulerOutput
from pagedkv.batch.states import Int64Array, RequestStates
from pagedkv.checks import IntArray
from pagedkv.errors import CapacityError, StaleSequenceError
from pagedkv.mirror import HostMirror

__all__ = ["Plan", "plan_update"]


class Plan(NamedTuple):
    """A step that can be taken: who comes, stays and goes, by slot."""

    over: list[int]  # finished, or starting anew under the same id
    preempted: list[int]
    new: Admitted
    resumed: Admitted
    resumed_slots: list[int]
    running: Running


def plan_update(
    states: RequestStates,
    rows: Rows,
    mirror: HostMirror,
    output: SchedulerOutput,
    *,
    beside_others: bool = False,
) -> Plan:
    """Check a step whole, and resolve its ids; `beside_others` where the batch stays as it is as well.

    Raises
    ------
    LookupError
        A resumed or preempted id is unknown.
    StaleSequenceError
        A running handle names no request any more.
    CapacityError
        More requests, tokens or blocks than there is room for.
    ValueError, TypeError
        A request is named twice, a number is out of range, or shapes do not match.
    """
    num_groups = mirror.num_groups if rows.is_written else None
    new = ready_admitted("new", output.new, num_groups)
    resumed = ready_admitted("resumed", output.resumed, num_groups)
    running = ready_running(output.running, num_groups)
    over, preempted, resumed_slots = _resolve(states, output, new, resumed)
    plan = Plan(over, preempted, new, resumed, resumed_slots, running)
    _check_running(states, plan)
    _check_handles(states, rows, plan)
    plan = _with_hits(states, rows, plan, output)
    staying = states.slots[states.slots >= 0] if beside_others else states.slots[:0]
    _check_room(states, rows, plan, staying)
    if rows.is_written:
        for admitted in (new, resumed):
            held = np.zeros((mirror.num_groups, len(admitted.req_ids)), np.int32)
            _check_blocks(mirror, admitted.req_ids.__getitem__, held, admitted.blocks)
        slots = running.slots

        def name_at(place: int) -> Hashable:
            return states.name_of(int(slots[place]))

        _check_blocks(mirror, name_at, rows.num_held(slots), running.blocks)
        _check_kept(states, rows, mirror, slots)
    return plan


def _refuse_running(code: int, place: int, states: RequestStates, running: Running) -> NoReturn:
    # For a fault that `check_running` found in ready arrays: their shapes are right, and nothing is below 0.
    handle = int(running.handles[place])
    if code == a.Code.STALE:
        raise StaleSequenceError(
            f"handles must name known requests, got {handle} at place {place} "
            "(it is over, or its id started anew: take the handle that update returned)"
        )
    if code == a.Code.REPEATED:
        raise ValueError(f"running must name each request once, got handle {handle} again at place {place}")
    request = states.name_of(handle & a.SLOT_MASK)
    if code == a.Code.PREEMPTED:
        raise ValueError(
            f"request {request!r} must come back through resumed, got it running "
            "(it was preempted, and has no blocks)"
        )
    line = states.numbers[handle & a.SLOT_MASK]
    computed = running.computed[place] if running.computed.size else line[a.COMPUTED] + line[a.SCHEDULED]
    raise_length(int(computed) + int(running.scheduled[place]), request)


def _resolve(
    states: RequestStates, output: SchedulerOutput, new: Admitted, resumed: Admitted
) -> tuple[list[int], list[int], list[int]]:
    _check_ids(states, "finished", output.finished)
    _check_ids(states, "preempted", output.preempted)
    # Ids that are finished may be unknown: they were aborted before they ever ran.
    over = {slot: None for req_id in output.finished if (slot := states.slot_of(req_id)) is not None}
    over |= {slot: None for req_id in new.req_ids if (slot := states.slot_of(req_id)) is not None}
    named = {}
    for kind, req_ids in (("preempted", output.preempted), ("resumed", resumed.req_ids)):
        slots = [states.slot_of(req_id) for req_id in req_ids]
        for slot, req_id in zip(slots, req_ids, strict=True):
            if slot is None or (slot in over and kind == "resumed"):
                raise LookupError(
                    f"{kind} must name known requests that go on, got {req_id!r} "
                    "(a request that starts, or starts anew, belongs to new)"
                )
        named[kind] = list(dict.fromkeys(slot for slot in slots if slot is not None and slot not in over))
    return list(over), named["preempted"], named["resumed"]


def _check_ids(states: RequestStates, kind: str, req_ids: Any) -> None:
    """Refuse what would name nobody without a word: a single id, or handles."""
    if isinstance(req_ids, str | bytes) or not hasattr(req_ids, "__iter__"):
        raise TypeError(f"{kind} must be a sequence of ids, got {req_ids!r} (write [id])")
    for req_id in req_ids:
        if states.slot_of(req_id) is None and (slot := states.slot_of_handle(req_id)) is not None:
            raise ValueError(
                f"{kind} must hold ids, got the handle of request {states.name_of(slot)!r} (name the id)"
            )


def _check_running(states: RequestStates, plan: Plan) -> None:
    running = plan.running
    states.setup[a.STEP] += 1
    step = int(states.setup[a.STEP])
    code, place = a.check_running(states.numbers, running.handles, running.scheduled, running.computed, step)
    if code not in (a.Code.DONE, a.Code.CHANGES):
        _refuse_running(code, place, states, running)
    others = {**dict.fromkeys(plan.over, "finished or new"), **dict.fromkeys(plan.preempted, "preempted")}
    others |= dict.fromkeys(plan.resumed_slots, "resumed")
    for slot, kind in others.items():
        if states.numbers[slot, a.STAMP] == step:
            raise ValueError(
                f"request {states.name_of(slot)!r} must be named once, got it running and {kind}"
            )


def _check_handles(states: RequestStates, rows: Rows, plan: Plan) -> None:
    new, given = plan.new, plan.new.handles
    if rows.is_written:
        if given is not None:
            raise ValueError("handles must be None without a manager: update returns those that it makes")
        return
    if given is None:
        if new.req_ids:
            raise ValueError("handles must be given with a manager: those of manager.add")
        return
    rows.check_handles(given)
    slots = (given & a.SLOT_MASK).tolist()
    if len(set(slots)) < len(slots):
        raise ValueError(f"handles must be the manager's, each once, got {given.tolist()}")
    for slot, req_id in zip(slots, new.req_ids, strict=True):
        is_known = slot < len(states.numbers) and states.numbers[slot, a.HANDLE] >= 0
        if is_known and slot not in plan.over:
            raise ValueError(
                f"the handle of request {req_id!r} must be free, got that of {states.name_of(slot)!r} "
                "(name it in finished, once the manager has freed it)"
            )


def _with_hits(states: RequestStates, rows: Rows, plan: Plan, output: SchedulerOutput) -> Plan:
    """Let those that start without a word of it have as many computed tokens as a manager has of them."""
    new, resumed = plan.new, plan.resumed
    if output.new.num_computed_tokens is None and new.req_ids:
        new = _as_managed(rows, new, new.handles)
    if output.resumed.num_computed_tokens is None and resumed.req_ids:
        resumed = _as_managed(rows, resumed, states.numbers[plan.resumed_slots, a.HANDLE])
    return plan._replace(new=new, resumed=resumed)


def _as_managed(rows: Rows, admitted: Admitted, handles: Any) -> Admitted:
    known = rows.num_computed(handles)
    return admitted if known is None else admitted._replace(computed=known)


def _check_room(states: RequestStates, rows: Rows, plan: Plan, staying: Int64Array) -> None:
    new, resumed, running = plan.new, plan.resumed, plan.running
    most = states.order.size
    num_reqs = len(new.req_ids) + len(resumed.req_ids) + running.handles.size + staying.size
    if num_reqs > most:
        raise CapacityError(f"a step must have at most {most} requests (max_num_reqs), got {num_reqs}")
    total = sum(int(part.scheduled.sum(dtype=np.int64)) for part in (new, resumed, running))
    total += int(states.numbers[staying, a.SCHEDULED].sum())
    most_tokens = int(states.setup[a.MAX_TOKENS])
    if total > most_tokens:
        raise CapacityError(
            f"a step must have at most {most_tokens} tokens (max_num_batched_tokens), got {total}"
        )
    given_up = {*plan.over, *plan.preempted}
    has_row = states.numbers[:, a.ROW] >= 0
    num_free = rows.num_free + sum(bool(has_row[slot]) for slot in given_up)
    needed = len(new.req_ids) + sum(not has_row[slot] or slot in given_up for slot in plan.resumed_slots)
    if needed > num_free:
        raise CapacityError(
            f"requests must have table rows: {num_free} of {most} are free, got {needed} that start "
            "(name those that lost their blocks in preempted, or raise max_num_reqs)"
        )


def _check_kept(states: RequestStates, rows: Rows, mirror: HostMirror, slots: Int64Array) -> None:
    found = rows.past_limits(slots)
    if found is not None:
        slot, group, block_id = found
        raise ValueError(
            f"block_ids must lie in [0, {mirror.layout[group, 2]}], got {block_id} for request "
            f"{states.name_of(slot)!r} in group {group} (a table that takes no larger ids joined the mirror "
            "while it rested: resume it with others)"
        )


def _check_blocks(
    mirror: HostMirror, name_at: Callable[[int], Hashable], held: IntArray, blocks: Blocks
) -> None:
    if not blocks.counts.size and not blocks.ids.size:
        return  # [0, 0] as well, which stands for none
    lines = np.arange(held.shape[1], dtype=np.int32)
    fault, group, place, value = find_fault(mirror.layout, held, lines, blocks.counts, blocks.ids, False)
    if fault == Fault.NONE:
        return
    if fault == Fault.TOTAL:
        raise ValueError(f"block_ids must hold {value} ids, the sum of the counts, got {place}")
    width, limit = (int(x) for x in mirror.layout[group, 1:])
    where = f"request {name_at(place)!r} in group {group}"
    if fault == Fault.CAPACITY:
        raise CapacityError(
            f"{where} must hold at most {width} blocks, got {value} "
            "(raise max_model_len or max_num_blocks_per_req, or resume it with fewer)"
        )
    raise ValueError(f"block_ids must lie in [0, {limit}], got {value} for {where}")
