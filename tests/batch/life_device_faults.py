"""Faults of the device: of what the kernels write, and of where drafts are mapped."""

import numpy as np

from pagedkv import MultiGroupBlockTable
from pagedkv.kernels import gather_rows_numpy, slot_mapping_numpy, split_batch_numpy, state_indices_numpy
from pagedkv.kernels._layout import BLOCK_SIZE, MAX_MODEL_LEN, WINDOW_REACH


def drafts_take_the_slots_of_the_step(patch):
    compute = MultiGroupBlockTable.compute_slot_mapping

    def computing(self, *arguments, **named):
        return compute(self, *arguments, **named | {"out": 0})

    patch.setattr(MultiGroupBlockTable, "compute_slot_mapping", computing)


def slots_keep_their_tail(patch):
    kernel = slot_mapping_numpy.slot_mapping

    def mapping(*arguments):
        slots = arguments[8]
        before = slots.copy()
        kernel(*arguments)
        slots[:] = np.where(slots == -1, before, slots)

    patch.setattr(slot_mapping_numpy, "slot_mapping", mapping)


def positions_pass_the_model_length(patch):
    kernel = slot_mapping_numpy.slot_mapping

    def mapping(staging, geometry, *arguments):
        geometry = geometry.copy()
        geometry[:, MAX_MODEL_LEN] = 2**40
        kernel(staging, geometry, *arguments)

    patch.setattr(slot_mapping_numpy, "slot_mapping", mapping)


def larger_batches_stay_shown(patch):
    bring = gather_rows_numpy.bring

    def bringing(row, *arguments):
        if row >= 0:
            bring(row, *arguments)

    patch.setattr(gather_rows_numpy, "bring", bringing)


def windows_lose_a_column_early(patch):
    def first_live(p, count, group):
        reach = int(group[WINDOW_REACH])
        seen = np.maximum(p - reach, 0) // int(group[BLOCK_SIZE])
        return np.minimum((seen + (seen > 0)) * (reach >= 0), count)

    patch.setattr(gather_rows_numpy, "first_live", first_live)


def draft_states_stand_a_column_further(patch):
    blocks = state_indices_numpy._blocks

    def shifted(group, tables, num_blocks, columns):
        return blocks(group, tables, num_blocks, columns + np.arange(columns.shape[1]).clip(max=1))

    patch.setattr(state_indices_numpy, "_blocks", shifted)


def cut_requests_keep_their_length(patch):
    kernel = split_batch_numpy.split_batch

    def splitting(*arguments):
        kernel(*arguments)
        seq_lens, part, (first, last, *_) = arguments[2], arguments[5], arguments[8:]
        part[: last - first] = seq_lens[first:last]

    patch.setattr(split_batch_numpy, "split_batch", splitting)
