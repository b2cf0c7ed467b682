"""The same for a `KVCacheManager`, which writes the tables itself and finds prefixes again."""

from collections import Counter
from dataclasses import replace

import numpy as np

from pagedkv.allocation import KVCacheManager, MambaSpec

from .life_model import NULL


class ManagedBlocks:
    """A manager, and what the rest of an engine tells it."""

    def __init__(self, groups, num_blocks, num_rows, max_model_len, context_parallel, memory, *, caching):
        self.manager = KVCacheManager(
            groups,
            num_blocks,
            max_num_seqs=num_rows,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
            algorithm="siphash",
            seed=bytes(16),
            context_parallel=context_parallel,
        )
        self.memory, self.num_blocks = memory, num_blocks
        self.num_told = {}  # request -> tokens that the manager knows
        # A state has its place only once the step before is committed.
        self.can_lag = not any(isinstance(g, MambaSpec) and g.cache_mode == "align" for g in groups)

    @property
    def num_free(self):
        return self.manager.num_free_blocks

    def specs(self, views):
        """The groups as the tables see them, with kernel views."""
        return [
            spec if spec.state_mode is not None else replace(spec, kernel_views=views(spec.block_size))
            for spec in self.manager.table_groups
        ]

    def grant(self, plans, lookahead):
        """Let the manager serve the leading ones of a batch; who starts has what it hits."""
        plans = sorted(plans, key=lambda plan: plan.kind != "running")
        served = self.allocate(plans, [plan.kind == "running" for plan in plans], lookahead)
        copies = self.manager.take_block_copies()
        for source, target in copies.tolist():
            self.memory.copy(source, target)
        self.manager.copies_done(copies)
        plans = plans[: served.num_sequences]
        for plan, computed in zip(plans, served.num_computed_tokens.tolist(), strict=True):
            if plan.kind != "running":
                plan.believed = computed
                plan.scheduled = min(plan.scheduled, len(plan.request.tokens) - computed)
        return plans

    def grant_less(self, plans, lookahead):
        """Allocate again for steps that are cut short: a state has another place then."""
        served = self.allocate(plans, [True] * len(plans), lookahead)
        assert served.num_sequences == len(plans), "fewer tokens need no more blocks"

    def allocate(self, plans, run, lookahead):
        """For the tokens of a step, and for those whose number the manager has not been told yet."""
        handles = [plan.request.handle for plan in plans]
        settled = self.manager.num_computed_tokens(handles).tolist() if plans else []
        counts = [
            plan.scheduled + (plan.believed - known) * runs
            for plan, runs, known in zip(plans, run, settled, strict=True)
        ]
        served = self.manager.try_allocate_slots(handles, counts, num_lookahead_tokens=lookahead)
        self.memory.wipe(served.block_ids.tolist())
        return served

    def settle(self, requests):
        """Tell the manager the tokens that came and how many are computed."""
        handles = [request.handle for request in requests]
        news = [request.tokens[self.num_told[request] :] for request in requests]
        self.manager.append(handles, [token for new in news for token in new], [len(new) for new in news])
        self.manager.commit(handles, [request.computed for request in requests])
        for request in requests:
            self.num_told[request] = len(request.tokens)
            request.is_unsettled = False

    def give_back(self, request, *, end):
        if end:
            self.manager.free([request.handle])
            del self.num_told[request]
        else:
            self.manager.preempt([request.handle])

    def row(self, request):
        """What its table row names, a list a group."""
        row = int(self.manager.rows([request.handle])[0])
        counts = [self.manager.num_blocks_held(g)[row] for g in range(len(self.manager.groups))]
        return [self.manager.block_table(g)[row, :n].tolist() for g, n in enumerate(counts)]

    live = row

    def holders(self):
        """How many cells of live sequences name each block."""
        running = [request for request in self.num_told if request.has_blocks]
        lists = [ids for request in running for ids in self.row(request)]
        return Counter(block for ids in lists for block in ids if block != NULL)

    def arrive(self, request):
        request.handle = self.manager.add(np.array(request.tokens))
        self.num_told[request] = len(request.tokens)

    def num_hits(self, request, random):
        """Tokens that are in the cache already."""
        del random
        return self.manager.match_prefix(request.handle)

    def load(self, plan):
        """Hits lie where they lie."""
