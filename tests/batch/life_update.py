"""How a life's batch takes a step: whole, or with some requests that come late and one that goes late."""

from .life_schedule import output_of


def update(life, plans, random):
    """Tell the batch what the scheduler decided, and check that it knows it; returns the plans that stay."""
    batch = life.batch
    preempted = [name for name in life.preempted if name in batch]
    late = [
        plan
        for plan in plans
        if plan.kind == "new" and plan.request.name not in batch and random.random() < 0.1
    ]
    early = [plan for plan in plans if plan not in late]
    output = output_of(life.world, early, life.finished, preempted, random)
    order = order_of(life.order, early, {*life.finished, *preempted})
    handles = batch.update(output).tolist()
    for name in (*life.finished, *preempted):
        life.rows.pop(name, None)
    life.finished, life.preempted = [], []
    for plan in early:
        take(life, plan, handles.pop(0) if plan.kind == "new" else plan.request.handle)
    assert not handles
    check_batch(life, early)
    if life.world.threshold is None:
        assert batch.req_ids == order
    else:
        check_order(life, early)
    for plan in late:
        take(life, plan, add_late(life, plan))
    leaving = random.choice(plans) if plans and random.random() < 0.05 else None
    if leaving is not None:
        remove_late(life, leaving)
    plans = [plan for plan in plans if plan is not leaving]
    check_batch(life, plans)
    return plans


def order_of(before, plans, leaving):
    """Who comes takes the lowest place that is left, then the last ones close the holes."""
    stays = {plan.request.name for plan in plans if plan.kind != "new"} - leaving
    order = [name if name in stays else None for name in before]
    names = [p.request.name for kind in ("new", "resumed", "running") for p in plans if p.kind == kind]
    for name in names:
        if name not in order:
            order = [*order, None] if None not in order else order
            order[order.index(None)] = name
    while None in order:
        last = order.pop()
        if last is not None:
            order[order.index(None)] = last
    return order


def take(life, plan, handle):
    """What is true once the batch has taken a plan."""
    request = plan.request
    assert request.handle in (None, handle)
    life.rows[request.name] = True
    request.handle, request.is_known = handle, True
    if plan.kind != "running":
        request.num_prefill, request.has_blocks = len(request.tokens), True
        request.computed = plan.believed
        life.blocks.load(plan)
    request.believed = plan.believed + plan.scheduled


def add_late(life, plan):
    """One request comes after the update; the others stay where they are."""
    before, request = life.batch.req_ids, plan.request
    handle = life.batch.add_request(
        request.name,
        len(request.tokens),
        plan.scheduled,
        plan.believed,
        plan.blocks,
        request.handle,
    )
    assert life.batch.req_ids == [*before, request.name]
    return handle


def remove_late(life, plan):
    """One request is over before the step runs; the last one takes its place."""
    before, name = life.batch.req_ids, plan.request.name
    place = before.index(name)
    life.end(plan.request)
    life.finished.remove(name)
    del life.rows[name]
    assert life.batch.remove_request(name) == place
    assert life.batch.req_ids[place : place + 1] == [None], "a hole until somebody fills it"
    life.batch.condense()
    before[place] = before[-1]
    assert life.batch.req_ids == before[:-1]


def check_batch(life, plans):
    """Names, handles and numbers agree, whoever stands where."""
    batch = life.batch
    by_name = {plan.request.name: plan for plan in plans}
    names = batch.req_ids
    same = len(names) == len(by_name) and set(names) == set(by_name)
    assert same, "those of the step are in the batch, and nobody else"
    plans = [by_name[name] for name in names]
    lengths = [plan.scheduled for plan in plans]
    assert batch.handles.tolist() == [plan.request.handle for plan in plans]
    assert [batch.position_of(name) for name in names] == list(range(len(names)))
    assert batch.num_computed_tokens.tolist() == [plan.believed for plan in plans]
    assert batch.num_scheduled_tokens.tolist() == lengths
    assert batch.sizes() == (len(plans), sum(lengths), max(lengths, default=0))
    assert len(batch) == sum(request.is_known for request in life.requests)
    before = [
        life.in_step.index(name) if name in life.in_step and plan.kind != "new" else -1
        for name, plan in zip(names, plans, strict=True)
    ]
    assert batch.previous_positions.tolist() == before


def check_order(life, plans):
    """Decodes, short extends, long extends, prefills."""
    by_name = {plan.request.name: plan for plan in plans}
    low = life.world.threshold
    limits = (low, low if life.world.short_extend is None else life.world.short_extend)
    classes = [
        sum(plan.scheduled > limit for limit in limits) if plan.believed else 3
        for plan in (by_name[name] for name in life.batch.req_ids)
    ]
    assert classes == sorted(classes)
