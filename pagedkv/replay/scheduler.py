"""Scheduler: which tokens of which sequences run in a step."""

from collections.abc import Callable

import numpy as np

from pagedkv.replay.arrivals import Arrivals
from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.memory import BlockMemory
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.requests import Requests
from pagedkv.replay.row_changes import SharedPrefix
from pagedkv.replay.tally import Tally

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    The running sequences get the step's tokens first, the oldest first; where their blocks do not fit, the
    newest is preempted. What is left goes to waiting requests in order. One is admitted when all that it
    knows so far fits beside what the running ones still need for theirs, and a watermark stays free.

    Parameters
    ----------
    options : ReplayOptions
    requests : Requests
    batch : RunningBatch
    memory : BlockMemory
    arrivals : Arrivals
    tally : Tally
    """

    def __init__(
        self,
        options: ReplayOptions,
        requests: Requests,
        batch: RunningBatch,
        memory: BlockMemory,
        arrivals: Arrivals,
        tally: Tally,
    ) -> None:
        self._options, self._requests, self._batch = options, requests, batch
        self._memory, self._arrivals, self._tally = memory, arrivals, tally
        self._watermark = int(options.watermark * memory.num_blocks)
        self._known = requests.prompt_lens.copy()  # with the outputs sampled before a preemption
        self._final = requests.total_lens
        self._was_admitted = np.zeros(len(requests), np.bool_)

    def schedule(self, preempt: Callable[[int], None]) -> list[SharedPrefix]:
        """Set the batch's scheduled tokens and admit requests; returns what each admission shares.

        `preempt` takes a row out of the batch, with its blocks; nobody is admitted in such a step.
        """
        budget = self._spread()
        num_preempted = 0
        while int(self._memory.growth().sum()) > self._memory.num_free:
            self._preempt_newest(preempt)
            num_preempted += 1
            budget = self._spread()
        self._tally.num_preemptions += num_preempted
        return [] if num_preempted else self._admit(budget)

    def _spread(self) -> int:
        """Give tokens to the running sequences, oldest first; returns how many are left."""
        batch, budget = self._batch, self._options.max_num_batched_tokens
        remaining = batch.known - batch.computed
        total = int(remaining.sum())
        if total <= budget:
            batch.scheduled[:] = remaining
            return budget - total
        order = batch.oldest_first()
        wanted = remaining[order]
        left = budget - (np.cumsum(wanted) - wanted)
        batch.scheduled[order] = np.clip(left, 0, wanted)
        return 0

    def _preempt_newest(self, preempt: Callable[[int], None]) -> None:
        row = self._batch.newest()
        request = int(self._batch.request[row])
        self._known[request] = self._batch.known[row]
        self._arrivals.waiting.appendleft(request)
        preempt(row)

    def _admit(self, budget: int) -> list[SharedPrefix]:
        """Admit waiting requests in order while tokens, rows and blocks last."""
        waiting, batch, admitted = self._arrivals.waiting, self._batch, list[SharedPrefix]()
        if not waiting or not budget or batch.num_reqs == self._options.max_num_seqs:
            return admitted
        headroom = self._memory.num_free - self._memory.num_promised()
        while waiting and budget and batch.num_reqs < self._options.max_num_seqs:
            request = waiting[0]
            known = int(self._known[request])
            tokens, holder_row = self._memory.longest_prefix(request, known)
            headroom -= self._memory.num_needed(known, tokens)
            if headroom < (self._watermark if batch.num_reqs else 0):
                break
            waiting.popleft()
            scheduled = min(known - tokens, budget)
            budget -= scheduled
            row = batch.add(request, tokens, known, int(self._final[request]), scheduled)
            admitted.append(SharedPrefix(row, holder_row, tokens))
            self._count(request, tokens)
        return admitted

    def _count(self, request: int, tokens: int) -> None:
        if not self._was_admitted[request]:
            self._was_admitted[request] = True
            self._tally.num_prompt_tokens += int(self._requests.prompt_lens[request])
            self._tally.num_hit_tokens += tokens
