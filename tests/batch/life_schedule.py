"""What a scheduler draws for a step: who runs with how many tokens, in the form that a batch takes."""

import numpy as np

from pagedkv.batch import AdmittedRequests, RunningRequests, SchedulerOutput

from .life_model import Plan


class Schedule:
    """Draws the plans of one step, gets their blocks, and keeps what the scheduler has to tell.

    Parameters
    ----------
    world : World
    requests : list of Request
        All that live.
    rows : dict
        Names whose row the batch has not been told to give up, by name.
    """

    def __init__(self, world, requests, rows):
        self.world, self.requests, self.rows = world, requests, rows

    def draw(self, random, *, must_start=()):
        """Return the plans that got their blocks; each request at most once."""
        running = [request for request in self.requests if request.has_blocks]
        waiting = [request for request in self.requests if not request.has_blocks]
        for some in (running, waiting):
            random.shuffle(some)
        waiting.sort(key=lambda request: request not in must_start)
        plans, budget = [], random.choice([self.world.max_tokens, self.world.max_tokens, 6])
        share = random.choice([1.0, 1.0, 1.0, 0.8, 0.4])
        for request in running:
            if len(plans) < self.world.num_rows and random.random() < share:
                plans += self.go_on(request, budget - sum(plan.scheduled for plan in plans), random)
        for request in waiting:
            if len(plans) < self.world.num_rows and random.random() < 0.7:
                plans += self.start(request, budget - sum(plan.scheduled for plan in plans), plans, random)
        lookahead = random.randint(0, self.world.max_drafts)
        plans = self.world.blocks.grant(plans, lookahead)
        short = [plan for plan in plans if plan.scheduled > 1 and random.random() < 0.1]
        for plan in short:
            plan.cut_short(random.randint(1, plan.scheduled - 1))
        self.world.blocks.grant_less(short, lookahead)
        return plans

    def go_on(self, request, budget, random):
        """One chunk of what is left, or the last token with drafts."""
        world, blocks = self.world, self.world.blocks
        if request.is_unsettled and (not blocks.can_lag or random.random() < 0.4):
            blocks.settle([request])
        believed, is_told = request.believed, False
        if not request.is_unsettled:  # the scheduler knows what was rejected
            believed = request.computed
            is_told = believed != request.believed or random.random() < 0.3
        left = len(request.tokens) - request.computed
        room = min(budget, 10**9 if world.may_run_over else world.max_model_len - believed)
        if room < 1:
            return []
        request.drafts = []
        if left > 1:
            scheduled = min(left, room) if random.random() < 0.6 else random.randint(1, min(left, room))
        else:
            num = random.choice([world.max_drafts, random.randint(0, world.max_drafts)])
            request.draft([random.randint(0, 1) for _ in range(min(num, room - 1))])
            scheduled = 1 + len(request.drafts)
        if blocks.manager is None and not request.drafts and random.random() < 0.03:
            scheduled = 0
        return [Plan(request, "running", scheduled, believed=believed, is_told=is_told)]

    def start(self, request, budget, plans, random):
        world = self.world
        request.restart()
        hits = world.blocks.num_hits(request, random)
        room = min(budget, len(request.tokens) - hits)
        kind = "resumed" if request.is_known else "new"
        starting = sum(plan.request.name not in self.rows for plan in plans if plan.kind != "running")
        has_row = request.name in self.rows or len(self.rows) + starting < world.num_rows
        if room < 1 or (world.setup == "stable rows" and not has_row):
            return []
        scheduled = room if random.random() < 0.6 else random.randint(1, room)
        return [Plan(request, kind, scheduled, believed=hits)]


def output_of(world, plans, finished, preempted, random):
    """The scheduler's output, as arrays or as lists, with and without what may be left out."""
    by_kind = {kind: [p for p in plans if p.kind == kind] for kind in ("running", "new", "resumed")}
    return SchedulerOutput(
        running_of(world, by_kind["running"], random),
        admitted_of(world, by_kind["new"]),
        admitted_of(world, by_kind["resumed"]),
        finished,
        preempted,
    )


def running_of(world, plans, random):
    handles = np.array([plan.request.handle for plan in plans], np.int64)
    scheduled = np.array([plan.scheduled for plan in plans], np.int32)
    computed = None
    if any(plan.is_told for plan in plans):
        computed = np.array([plan.believed for plan in plans], np.int32)
    counts, ids = (None, None) if world.blocks.manager else flat(world, plans)
    if counts is not None and not counts.any() and random.random() < 0.8:
        counts, ids = None, None
    if random.random() < 0.1:
        handles, scheduled = handles.tolist(), scheduled.tolist()
    return RunningRequests(handles, scheduled, computed, counts, ids)


def admitted_of(world, plans):
    requests = [plan.request for plan in plans]
    counts, ids = (None, None) if world.blocks.manager else flat(world, plans)
    is_new = bool(plans) and plans[0].kind == "new"
    return AdmittedRequests(
        [request.name for request in requests],
        [len(request.tokens) for request in requests],
        [plan.scheduled for plan in plans],
        [plan.believed for plan in plans],
        counts,
        ids,
        [request.handle for request in requests] if is_new and world.blocks.manager else None,
    )


def flat(world, plans):
    """Blocks of each plan as counts [G, n] and ids, group by group."""
    groups = range(len(world.specs))
    counts = [[len(plan.blocks[g]) for plan in plans] for g in groups]
    ids = [block for g in groups for plan in plans for block in plan.blocks[g]]
    return np.array(counts, np.int32).reshape(len(world.specs), len(plans)), np.array(ids, np.int32)
