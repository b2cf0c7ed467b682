"""A whole engine: requests arrive, run in chunks and with drafts, rest, lose their blocks, and end.

Everything is drawn from the `random` that each action gets; every step is checked whole.
"""

from .life_commit import Committer
from .life_drafts import map_drafts
from .life_expect import Expected
from .life_model import Request
from .life_pass import Pass
from .life_schedule import Schedule
from .life_split import Splitter
from .life_update import update
from .life_world import World


class Life:
    """One engine, and what is true of it."""

    def __init__(self, setup, backend, random):
        self.world = World(setup, backend, random)
        self.batch, self.blocks = self.world.batch, self.world.blocks
        self.requests = []  # all that live
        self.finished, self.preempted = [], []  # names to tell the batch
        self.rows = {}  # names whose row it has not been told to give up
        self.order = []  # names in the batch
        self.in_step = []  # names in the last step
        self.committer, self.splitter = Committer(self.world), Splitter(self.world)
        self.num_named = 0

    # --- requests ---------------------------------------------------------------------------------

    def arrive(self, random):
        """A prompt, often one that starts as others do; a name that was just given up is used again."""
        living = {request.name for request in self.requests}
        gone = [name for name in self.finished if name not in living]
        if gone and random.random() < 0.7:
            name = gone[0]
        else:
            name, self.num_named = f"r{self.num_named}", self.num_named + 1
        return self.add(name, random)

    def add(self, name, random):
        most = self.world.max_model_len
        length = random.choice([1, random.randint(1, most - 1), random.randint(1, most - 1), most - 1])
        known = random.choice(self.requests).tokens if self.requests else []
        tokens = known[: random.randint(0, length)] if random.random() < 0.7 else []
        tokens = tokens + [random.randint(0, 1) for _ in range(length - len(tokens))]
        limit = random.choice([most, random.randint(length + 1, most)])
        request = Request(name, tokens, limit, self.world.tags)
        self.blocks.arrive(request)
        self.requests.append(request)
        return request

    def preempt(self, random):
        """Some lose their blocks; the batch is told, or sees them rest until they come back."""
        running = [request for request in self.requests if request.has_blocks]
        for request in random.sample(running, min(len(running), random.randint(1, 2))):
            if request.is_unsettled:
                self.blocks.settle([request])
            self.blocks.give_back(request, end=False)
            request.restart()
            if random.random() < 0.6:
                self.preempted.append(request.name)

    def abort(self, random):
        """Some end, whether they run, rest or wait."""
        if self.requests:
            self.end(random.choice(self.requests))

    def end(self, request):
        if request.has_blocks or self.blocks.manager:
            self.blocks.give_back(request, end=True)
        request.has_blocks = False
        self.requests.remove(request)
        self.finished.append(request.name)

    def start_anew(self, random):
        """A request goes on under its name with another prompt, as a streaming session does."""
        known = [request for request in self.requests if request.is_known]
        if not known:
            return
        old = random.choice(known)
        self.end(old)
        self.finished.remove(old.name)
        new = self.add(old.name, random)
        self.step(random, must_start=[new])

    # --- steps ------------------------------------------------------------------------------------

    def step(self, random, *, must_start=()):
        """Schedule, update, commit, run, sample."""
        while len(self.requests) <= self.world.num_rows and random.random() < 0.4:
            self.arrive(random)
        plans = Schedule(self.world, self.requests, self.rows).draw(random, must_start=must_start)
        started = [plan.request for plan in plans]
        self.finished += [request.name for request in must_start if request not in started]  # no room
        plans = update(self, plans, random)
        if self.world.threshold is None and random.random() < 0.2:
            self.batch.reorder(random.sample(range(len(plans)), len(plans)))
        by_name = {plan.request.name: plan for plan in plans}
        plans = [by_name[name] for name in self.batch.req_ids]
        rows = [self.blocks.row(plan.request) for plan in plans]
        expected = Expected(self.world, plans, rows)
        metadata = self.committer.commit(expected, random)
        self.order = self.in_step = self.batch.req_ids
        self.run(metadata, expected, random)

    def run(self, metadata, expected, random):
        """The forward pass, whole or in micro-batches; then what was sampled, and the next drafts."""
        requests = [plan.request for plan in expected.plans]
        run = Pass(self.world)
        if expected.num_tokens > 1 and random.random() < 0.3:
            for part, some in self.splitter.split(metadata, expected, random):
                run.run(part, some)
        else:
            run.run(metadata, requests)
        for plan, rows in zip(expected.plans, expected.rows, strict=True):
            self.sample(plan, rows, run, random)
        over = [request for request in requests if len(request.tokens) == request.limit]
        if random.random() < 0.7:
            map_drafts(self.world, expected, over, random)
        self.check_resting(run, requests)
        for request in over:
            self.blocks.settle([request])
            self.end(request)

    def check_resting(self, run, in_step):
        """Those that hold blocks and are not in the step still have their KV."""
        for request in self.requests:
            if request.has_blocks and request not in in_step:
                if request.is_unsettled and not self.blocks.can_lag:
                    self.blocks.settle([request])
                run.check_resting(request)

    def sample(self, plan, rows, run, random):
        """Some drafts are accepted, and one token is sampled where all known ones are computed."""
        request, num_drafts = plan.request, len(plan.request.drafts)
        if plan.scheduled == 0:
            return
        request.is_unsettled = True
        request.computed = plan.end - num_drafts
        num_accepted = 0
        if request.computed == len(request.tokens):
            most = min(num_drafts, request.limit - len(request.tokens) - 1)
            num_accepted = random.choice([most, 0, random.randint(0, most)])
            request.computed += num_accepted
            run.accept(request, num_accepted, rows)
            request.extend([*request.drafts[:num_accepted], random.randint(0, 1)])

    def dummy(self, random):
        """A step of nobody: with rows in batch order the batch rests for it."""
        run = Pass(self.world)
        run.run_dummy(self.committer.dummy(random))
        self.check_resting(run, ())
        if self.world.setup == "batch order":
            self.order = []

    def finish(self, random):
        """Everybody ends: the pool is whole again, and nothing is left in rows or batch."""
        for request in list(self.requests):
            self.end(request)
        update(self, [], random)
        assert self.blocks.num_free == self.blocks.num_blocks - 1, "blocks are lost"
        assert (self.batch.num_reqs, len(self.batch)) == (0, 0)
        mirror = self.world.table.mirror
        for g in range(len(self.world.specs)):
            assert not mirror.block_table(g).any()
            assert not mirror.num_blocks(g).any()
