"""Faults of the host: of the batch, its rows, its metadata and the scheduler that feeds it."""

import numpy as np

from pagedkv.batch import InputBatch, batch_commits, written_rows
from pagedkv.batch.managed_rows import ManagedRows
from pagedkv.batch.states import RequestStates
from pagedkv.batch.written_rows import BatchOrderRows, StableRows
from pagedkv.mirror import HostMirror

from .life_blocks import FreeListBlocks
from .life_manager import ManagedBlocks


def nothing(*_arguments, **_named):
    """Left out."""


def resume_appends(patch):
    def add(self, slots, blocks):
        self._mirror.append_rows(self._rows(slots), *blocks)

    patch.setattr(written_rows._WrittenRows, "add", add)


def condense_forgets_a_row(patch):
    patch.setattr(BatchOrderRows, "move", lambda self, s, t: self._mirror.move_rows(s[:-1], t[:-1]))


def holes_are_not_closed(patch):
    def condense(self):
        self.setup[0], self.holes = self.num_reqs - len(self.holes), []
        return np.empty(0, np.int32), np.empty(0, np.int32)

    patch.setattr(RequestStates, "condense", condense)


def left_rows_keep_their_ids(patch):
    patch.setattr(HostMirror, "clear_rows", nothing)


def rest_forgets_the_blocks(patch):
    def append(self, slots, blocks):
        self._kept.forget(slots)
        super(BatchOrderRows, self).append(slots, blocks)

    patch.setattr(BatchOrderRows, "append", append)


def kept_blocks_outlive_a_resume(patch):
    patch.delattr(BatchOrderRows, "add")


def rest_gives_the_row_away(patch):
    leave = StableRows.leave
    patch.setattr(StableRows, "leave", lambda self, slots, **_: leave(self, slots, keep=False))


def swaps_move_names_only(patch):
    patch.setattr(BatchOrderRows, "swap", nothing)


def order_is_left_alone(patch):
    patch.setattr(InputBatch, "_put_in_order", nothing)


def manager_rows_are_remembered(patch):
    of_step = ManagedRows.of_step

    def remembering(self, rows, handles):
        known = self.__dict__.setdefault("known", {})
        found = of_step(self, rows, handles)
        lines = zip(handles.tolist(), found.tolist(), strict=True)
        return np.array([known.setdefault(handle, row) for handle, row in lines], np.int32)

    patch.setattr(ManagedRows, "of_step", remembering)


def rejected_tokens_advance(patch):
    update = InputBatch.update

    def updating(self, output):
        return update(self, output._replace(running=output.running._replace(num_computed_tokens=None)))

    patch.setattr(InputBatch, "update", updating)


def device_counts_are_ignored(patch):
    commit = InputBatch.commit
    patch.setattr(
        InputBatch, "commit", lambda self, **given: commit(self, **given | {"num_computed_tokens": None})
    )


def host_arrays_are_used_again(patch):
    fill = InputBatch._fill

    def filling(self, num_reqs, padded):
        host, *others = fill(self, num_reqs, padded)
        memory = self.__dict__.setdefault("memory", np.empty(4096, np.int32))
        again = memory[: host.size].reshape(host.shape)
        again[:] = host
        return again, *others

    patch.setattr(InputBatch, "_fill", filling)


def dummies_use_live_rows(patch):
    def commit_dummy(self, num_reqs, starts, computed, out, stream):
        rows = np.arange(num_reqs, dtype=np.int32)
        return self.table.commit(num_reqs, starts, computed, rows=rows, out=out, stream=stream)

    patch.setattr(InputBatch, "_commit_dummy", commit_dummy)


def dummies_do_not_let_the_batch_rest(patch):
    patch.setattr(batch_commits, "rest", nothing)


def schedulers_free_a_block_early(patch):
    num_unread = FreeListBlocks.num_unread

    def one_more(self, spec, computed, count):
        found = num_unread(self, spec, computed, count)
        return min(found + (found > 0 and spec.state_mode is None), count)

    patch.setattr(FreeListBlocks, "num_unread", one_more)


def schedulers_settle_what_was_rejected(patch):
    settle = ManagedBlocks.settle

    def settling(self, requests):
        known = [request.computed for request in requests]
        for request in requests:
            request.computed = min(request.believed, len(request.tokens))
        settle(self, requests)
        for request, computed in zip(requests, known, strict=True):
            request.computed = computed

    patch.setattr(ManagedBlocks, "settle", settling)
