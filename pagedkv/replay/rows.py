"""RowKeeper: batch and memory change together when sequences leave."""

import numpy as np

from pagedkv.replay.batch import RunningBatch
from pagedkv.replay.memory import BlockMemory
from pagedkv.replay.requests import Int64Array
from pagedkv.replay.step_log import StepLog

__all__ = ["RowKeeper"]


class RowKeeper:
    """Takes sequences out of the batch, and moves rows now and then.

    A sequence keeps its table row while it runs. Moves are not needed for anything here but a smaller table:
    they happen so that they are verified.

    Parameters
    ----------
    batch : RunningBatch
    memory : BlockMemory
    log : StepLog
        Its stopwatch: the manager's calls are "allocate", row moves "rows".
    compact_every : int
        Steps from one compaction to the next; 0: never.
    """

    def __init__(self, batch: RunningBatch, memory: BlockMemory, log: StepLog, compact_every: int) -> None:
        self._batch, self._memory, self._log = batch, memory, log
        self._compact_every = compact_every

    def preempt(self, place: int) -> None:
        """Take a sequence's blocks and row; it waits again."""
        places = np.array([place])
        self._memory.preempt(places)
        self._batch.remove(places)
        self._log.lap("allocate")

    def finish(self, places: Int64Array) -> None:
        """Let complete sequences go."""
        if len(places):
            self._memory.free(places)
            self._batch.remove(places)
            self._log.lap("allocate")

    def compact(self) -> None:
        """Move the highest rows into holes, where it is time to."""
        if self._compact_every and self._log.num_steps % self._compact_every == 0:
            self._memory.compact_rows()
            self._log.lap("rows")
