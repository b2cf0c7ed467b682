"""Engine: a serving engine's step over the library's manager and tables, without a model."""

from collections.abc import Callable

import numpy as np

from pagedkv.checks import IntArray
from pagedkv.replay.arrivals import Arrivals
from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.contents import Contents
from pagedkv.replay.findings import Findings
from pagedkv.replay.host_step import HostStep
from pagedkv.replay.layout import Layout
from pagedkv.replay.memory import BlockMemory
from pagedkv.replay.meter import Meter
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.oracle import ContentOracle
from pagedkv.replay.ranks import RankTables
from pagedkv.replay.requests import Int64Array, Requests
from pagedkv.replay.rows import RowKeeper
from pagedkv.replay.scheduler import Scheduler
from pagedkv.replay.step_log import StepLog
from pagedkv.replay.tally import Tally

__all__ = ["Engine"]


class Engine:
    """Runs requests to their end: every step schedules, allocates, commits, verifies and settles.

    A sequence's last output token is sampled but never computed, as in any engine: a request of p prompt
    and n output tokens takes p + n - 1 positions.

    Parameters
    ----------
    requests : Requests
    options : ReplayOptions

    Attributes
    ----------
    tally : Tally
        Counts over the run.
    log : StepLog
        Values per step.
    findings : Findings
        What verification found.
    oracle : ContentOracle or None
        None with verification off.
    """

    def __init__(self, requests: Requests, options: ReplayOptions) -> None:
        self.options = options
        self.num_blocks = options.resolved_num_blocks()
        self.max_model_len = options.max_model_len or int(requests.total_lens.max())
        max_tokens, max_seqs = options.max_num_batched_tokens, options.max_num_seqs
        self.layout = Layout(options.groups, options.context_parallel, max_tokens)
        self.log, self.findings, self.tally = StepLog(), Findings(), Tally()
        self.batch = RunningBatch(max_seqs)
        self.tables = RankTables(self.layout, max_seqs, self.max_model_len, max_tokens, options.backend)
        mirror, length = self.tables.mirror, self.max_model_len
        self.memory = BlockMemory(options, length, self.layout, mirror, self.batch, requests)
        self.oracle = self._new_oracle(requests) if options.verify else None
        self.arrivals = self._accept(requests)
        self._rows = RowKeeper(self.batch, self.memory, self.log, options.compact_every)
        self._scheduler = Scheduler(options, requests, self.batch, self.memory, self.arrivals, self.log)
        self._meter = Meter(self.layout, self.batch, self.memory, self.tables, self.max_model_len)
        self._steps = list[HostStep]()  # the last commit's, one per rank

    def _new_oracle(self, requests: Requests) -> ContentOracle:
        contents = Contents(requests, self.max_model_len, self.layout.num_groups)
        num_samples, seed = self.options.num_samples, self.options.seed
        return ContentOracle(self.layout, contents, self.num_blocks, self.findings, num_samples, seed)

    def _accept(self, requests: Requests) -> Arrivals:
        """Reject the requests that would never fit, however long they waited."""
        lengths = requests.total_lens
        peak = self.layout.peak_blocks(lengths).sum(axis=0)
        fits = (lengths <= self.max_model_len) & (peak <= self.num_blocks - 1)
        self.tally.num_rejected = int((~fits).sum())
        return Arrivals(requests, np.flatnonzero(fits), immediate=self.options.arrivals == "immediate")

    def run(self, on_step: Callable[["Engine"], None] = lambda _: None) -> None:
        """Run until every request that fits is complete; `on_step` is called after each step."""
        self.arrivals.update()
        while self.batch.num_reqs or not self.arrivals.is_exhausted:
            if not self.batch.num_reqs and not self.arrivals.waiting:
                self.arrivals.skip_idle()
            self.step()
            on_step(self)

    def step(self) -> None:
        """Run one step; somebody must be running or waiting."""
        self.log.start()
        self.findings.step = self.log.num_steps
        block_ids = self._scheduler.schedule(self._preempt)
        self._commit()
        self._compute(block_ids)
        self._finish()

    def _preempt(self, place: int) -> None:
        self.log.lap("schedule")
        self._check(np.array([place]))
        self._rows.preempt(place)

    def _commit(self) -> None:
        batch = self.batch
        query_start_loc = np.zeros(batch.num_reqs + 1, np.int32)
        np.cumsum(batch.scheduled, out=query_start_loc[1:])
        self._steps = self.tables.commit(
            query_start_loc, batch.computed.astype(np.int32), batch.row.astype(np.int32)
        )
        self.log.lap("commit")

    def _compute(self, block_ids: IntArray) -> None:
        """Let the step's tokens be in the cache: written, and samples read back, where that is verified."""
        batch, oracle = self.batch, self.oracle
        if oracle:
            oracle.forget(block_ids)
            oracle.write(self._steps, batch.request, batch.computed, batch.scheduled)
        batch.computed[:] += batch.scheduled
        if oracle:
            oracle.sample(self._steps, batch.request, batch.computed, batch.scheduled)
            self.log.lap("verify")

    def _check(self, places: Int64Array) -> None:
        """Read back sequences whole, through the tables as last committed."""
        batch = self.batch
        if self.oracle and len(places):
            columns = self.memory.num_columns()[:, places]
            where = batch.committed_place[places].tolist()
            requests, computed = batch.request[places], batch.computed[places]
            self.oracle.check_rows(self._steps, where, requests, computed, columns)
            self.log.lap("verify")

    def _finish(self) -> None:
        """Sample the next tokens, read the step's figures, settle, and let complete sequences go."""
        batch, tally = self.batch, self.tally
        has_moved = batch.moved != 0
        batch.mark_committed()
        has_sampled = batch.computed == batch.known
        batch.known[:] += has_sampled
        is_complete = has_sampled & (batch.known >= batch.final)
        num_tokens = int(batch.scheduled.sum())
        values = self._meter.read()
        self.log.lap("finish")
        self._check(np.flatnonzero(has_moved | is_complete))
        self.memory.settle()
        self.memory.append_sampled(np.flatnonzero(has_sampled & ~is_complete))
        self.log.lap("allocate")
        self._rows.finish(np.flatnonzero(is_complete))
        self._rows.compact()
        tally.num_completed += int(is_complete.sum())
        tally.num_scheduled_tokens += num_tokens
        self.arrivals.advance(self.options.step_ms * 1e-3 + self.options.token_us * 1e-6 * num_tokens)
        self.log.lap("finish")
        self.log.record(time=self.arrivals.now, num_tokens=num_tokens, **values)
