"""Who holds which block, in the simplest way: a list of free ids, of which rows are told."""

from collections import Counter

from tests.tables.models import below_window, shard

from .life_model import NULL


def cdiv(a, b):
    return -(-a // b)


class FreeListBlocks:
    """A scheduler's allocator that the tables know nothing of.

    Blocks that nobody reads any more (below a window, states that were gone on from) are handed to others
    while the table row still names them.
    """

    manager = None
    can_lag = True

    def __init__(self, specs, num_blocks, max_model_len, context_parallel, memory):
        self.specs, self.max_model_len, self.context_parallel = specs, max_model_len, context_parallel
        self.memory, self.num_blocks = memory, num_blocks
        self.free = list(range(num_blocks - 1, 0, -1))
        self.told = {}  # request -> ids of its row, a list a group
        self.held = {}  # the same, NULL where a block was given back

    @property
    def num_free(self):
        return len(self.free)

    def num_columns(self, spec, end, lookahead):
        size = spec.block_size * shard(spec, self.context_parallel)[0]
        if spec.state_mode == "none":
            return 1 + spec.num_speculative_blocks
        if spec.state_mode is not None:
            return cdiv(max(min(end, self.max_model_len), 1), size) + spec.num_speculative_blocks
        return cdiv(min(end + lookahead, self.max_model_len), size)

    def num_unread(self, spec, computed, count):
        """Leading columns that nobody reads once so many tokens are computed."""
        if spec.state_mode == "align":
            return max(computed - 1, 0) // spec.block_size
        return below_window(computed, count, spec, self.context_parallel)

    def grant(self, plans, lookahead):
        """Give each plan its blocks; those that do not fit are left out."""
        return [plan for plan in plans if self.serve(plan, lookahead)]

    def grant_less(self, plans, lookahead):
        """What was given for a step that is cut short stays for the next one."""

    def serve(self, plan, lookahead):
        request, starts = plan.request, plan.kind != "running"
        told = [[] for _ in self.specs] if starts else self.told[request]
        new = []
        for spec, ids in zip(self.specs, told, strict=True):
            wanted = self.num_columns(spec, plan.believed + plan.scheduled, lookahead)
            num = max(wanted - len(ids), 0)
            new.append([NULL] * min(self.num_unread(spec, plan.believed, num) if starts else 0, num))
            new[-1] += [None] * (num - len(new[-1]))
        if sum(ids.count(None) for ids in new) > len(self.free):
            return False
        plan.blocks = [[self.free.pop() if block is None else block for block in ids] for ids in new]
        for ids in plan.blocks:
            self.memory.wipe(ids)
        self.told[request] = [ids + more for ids, more in zip(told, plan.blocks, strict=True)]
        held = [[] for _ in self.specs] if starts else self.held[request]
        self.held[request] = [ids + more for ids, more in zip(held, plan.blocks, strict=True)]
        return True

    def settle(self, requests):
        """The scheduler has heard how many tokens are computed."""
        for request in requests:
            request.is_unsettled = False
            for spec, ids in zip(self.specs, self.held[request], strict=True):
                for column in range(self.num_unread(spec, request.computed, len(ids))):
                    self.give(ids[column])
                    ids[column] = NULL

    def give(self, block):
        if block != NULL:
            self.free.append(block)

    def give_back(self, request, *, end):
        """Whether it ends or comes back later, its blocks are free."""
        del self.told[request], end
        for ids in self.held.pop(request):
            for block in ids:
                self.give(block)

    def row(self, request):
        """What its table row names, a list a group."""
        return [list(ids) for ids in self.told[request]]

    def live(self, request):
        """The same without what is somebody else's."""
        return self.held[request]

    def holders(self):
        """How many cells of live requests name each block."""
        lists = [ids for groups in self.held.values() for ids in groups]
        return Counter(block for ids in lists for block in ids if block != NULL)

    def arrive(self, request):
        """Nothing to do before it starts."""

    def num_hits(self, request, random):
        """Tokens that somebody has computed elsewhere; they are loaded into the first blocks."""
        return random.choice([0, 0, random.randint(0, len(request.tokens) - 1)])

    def load(self, plan):
        """Bring what was computed elsewhere into the blocks of a request that starts."""
        request = plan.request
        for g, (spec, ids) in enumerate(zip(self.specs, self.held[request], strict=True)):
            if spec.state_mode is not None:
                column = 0 if spec.state_mode == "none" else max(plan.believed - 1, 0) // spec.block_size
                if plan.believed:
                    self.memory.write(g, ids[column], 0, request.tags[plan.believed - 1])
                continue
            for position in range(plan.believed):
                place = place_of(position, ids, spec, self.context_parallel)
                if place is not None and place[0] != NULL:
                    self.memory.write(g, *place, request.tags[position])


def place_of(position, ids, spec, context_parallel):
    """(block, offset) of a token in a row, dealt out one by one; None where another rank holds it."""
    world, rank, interleave = shard(spec, context_parallel)
    column, offset = divmod(position, spec.block_size * world)
    if (offset // interleave) % world != rank:
        return None
    here = sum((o // interleave) % world == rank for o in range(offset))
    return (ids[column] if column < len(ids) else NULL), here
