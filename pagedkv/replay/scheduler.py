"""Scheduler: which tokens of which sequences run in a step."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedkv.checks import IntArray
from pagedkv.replay.arrivals import Arrivals
from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.memory import BlockMemory
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.requests import Requests
from pagedkv.replay.step_log import StepLog

__all__ = ["Scheduler"]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Who was refused last, and the blocks that there were for it."""

    request: int = -1
    headroom: int = -1


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    The running sequences get the step's tokens first, the oldest first; where their blocks do not fit, the
    newest is preempted. What is left goes to waiting requests in order. One is admitted when all that it
    knows so far fits beside what the running ones still need for theirs, and a watermark stays free; so
    everybody fits in a step that admits.

    Parameters
    ----------
    options : ReplayOptions
    requests : Requests
    batch : RunningBatch
    memory : BlockMemory
    arrivals : Arrivals
    log : StepLog
        Its stopwatch: the manager's calls are "allocate".
    """

    def __init__(
        self,
        options: ReplayOptions,
        requests: Requests,
        batch: RunningBatch,
        memory: BlockMemory,
        arrivals: Arrivals,
        log: StepLog,
    ) -> None:
        self._options, self._batch, self._memory = options, batch, memory
        self._arrivals, self._log = arrivals, log
        self._watermark = int(options.watermark * memory.num_blocks)
        self._known = requests.prompt_lens.copy()  # with the outputs sampled before a preemption
        self._final = requests.total_lens
        self._refusal = _Refusal()

    def schedule(self, preempt: Callable[[int], None]) -> IntArray:
        """Set the batch's scheduled tokens, admit requests, allocate; returns the blocks handed out.

        `preempt` takes a place out of the batch, with its blocks; nobody is admitted in such a step.
        """
        budget = self._spread()
        num_admitted = self._admit(budget)
        self._log.lap("schedule")
        while (block_ids := self._memory.allocate(num_admitted)) is None:
            self._log.lap("allocate")
            self._preempt_newest(preempt)
            self._spread()
            self._log.lap("schedule")
        self._log.lap("allocate")
        return block_ids

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
        place = self._batch.newest()
        request = int(self._batch.request[place])
        self._known[request] = self._batch.known[place]
        self._arrivals.waiting.appendleft(request)
        preempt(place)

    def _admit(self, budget: int) -> int:
        """Admit waiting requests in order while tokens, rows and blocks last; returns how many."""
        waiting, batch, num_admitted = self._arrivals.waiting, self._batch, 0
        if not self._may_admit(budget):
            return 0
        headroom = self._memory.num_free - self._memory.num_promised()
        while self._may_admit(budget):
            request, spare = waiting[0], self._watermark if batch.num_reqs else 0
            if self._refusal.request == request and headroom <= self._refusal.headroom:
                break  # nothing was given back since
            tokens, needed = self._match(request)
            if headroom - needed < spare:
                self._refusal = _Refusal(request, headroom)
                break
            waiting.popleft()
            headroom -= needed
            known = int(self._known[request])
            scheduled = min(known - tokens, budget)
            budget -= scheduled
            batch.add(request, tokens, known, int(self._final[request]), scheduled)
            num_admitted += 1
        return num_admitted

    def _may_admit(self, budget: int) -> bool:
        has_place = self._batch.num_reqs < self._options.max_num_seqs
        return bool(self._arrivals.waiting and budget and has_place)

    def _match(self, request: int) -> tuple[int, int]:
        self._log.lap("schedule")
        found = self._memory.match(request, int(self._known[request]))
        self._log.lap("allocate")
        return found
