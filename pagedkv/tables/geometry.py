"""Geometry: where each group's table and kernel views lie, as the host and the kernels see it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.kernels import _layout as layout
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

__all__ = ["Geometry", "aligned"]

_NO_GROUP = (0, 0, 0, 1, 1, 0, 1, 0, 0, -1)  # no rows, no columns, no slots
_ALIGNMENT = 64  # int32 elements: every table and line starts on 256 bytes, as DLPack consumers expect


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and places of a table set; built once, never changed.

    Parameters
    ----------
    specs : tuple of KVCacheGroupSpec
    widths : tuple of int
        Columns of each group's table, in blocks.
    max_num_reqs, max_num_batched_tokens, max_model_len : int
        Limits: rows; tokens of a step; tokens of a sequence.
    table_offsets : tuple of int
        First element of each group's table in the arena, and its total size.
    view_offsets : tuple of tuple of int
        First element of each group's kernel views in the kernel-table arena.
    num_kernel_elements : int
        Size of that arena.
    groups : int64 [max(num_groups, 1), GEOMETRY_WORDS]
    views : int64 [num_views, VIEW_WORDS]
    states : int64 [num_states, STATE_WORDS]
        The groups of recurrent states, in the order of their groups.
    num_state_elements : int
        Size of the arena of their state indices.
    """

    specs: tuple[KVCacheGroupSpec, ...]
    widths: tuple[int, ...]
    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    table_offsets: tuple[int, ...]
    view_offsets: tuple[tuple[int, ...], ...]
    num_kernel_elements: int
    groups: npt.NDArray[np.int64]
    views: npt.NDArray[np.int64]
    states: npt.NDArray[np.int64]
    num_state_elements: int

    @classmethod
    def build(
        cls,
        specs: Sequence[KVCacheGroupSpec],
        widths: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_model_lens: Sequence[int],
        context_parallel: ContextParallel,
    ) -> "Geometry":
        """Place every table and view, and write down what the kernels need of each group."""
        groups = np.zeros((max(len(specs), 1), layout.GEOMETRY_WORDS), np.int64)
        if not specs:  # a step without groups has positions and lengths all the same
            groups[0, layout.TABLE_OFFSET : layout.FIRST_VIEW] = _NO_GROUP
        groups[:, layout.SLOT_STRIDE] = aligned(max_num_batched_tokens)
        groups[:, layout.REQ_STRIDE] = aligned(max_num_reqs)
        views: list[tuple[int, int, int]] = []
        view_offsets = []
        table_end = kernel_end = 0
        table_offsets = []
        for g, (spec, width) in enumerate(zip(specs, widths, strict=True)):
            shard = spec.shard(context_parallel)
            groups[g, layout.FIRST_VIEW], groups[g, layout.NUM_VIEWS] = len(views), len(spec.views())
            offsets = []
            for ratio, stride in spec.views():
                views.append((kernel_end, ratio, stride))
                offsets.append(kernel_end)
                kernel_end = aligned(kernel_end + max_num_reqs * width * ratio)
            groups[g, layout.TABLE_OFFSET : layout.FIRST_VIEW] = (
                table_end,
                width,
                max_num_reqs,
                spec.block_size,
                shard.world_size,
                shard.rank,
                shard.interleave,
                spec.written_by_slot,
                max_model_lens[g],
                -1 if spec.sliding_window is None else spec.sliding_window - 1,
            )
            table_offsets.append(table_end)
            table_end = aligned(table_end + max_num_reqs * width)
            view_offsets.append(tuple(offsets))
        return cls(
            tuple(specs),
            tuple(widths),
            max_num_reqs,
            max_num_batched_tokens,
            max(max_model_lens, default=0),
            (*table_offsets, table_end),
            tuple(view_offsets),
            kernel_end,
            groups,
            np.array(views, np.int64).reshape(-1, layout.VIEW_WORDS),
            *_states(specs, max_num_reqs),
        )

    def shard(self, group: int) -> ContextParallel:
        """Return the context-parallel world in which a group lives: world 1 where it is replicated."""
        world, rank, interleave = self.groups[group, layout.CP_WORLD : layout.CP_INTERLEAVE + 1].tolist()
        return ContextParallel(world, rank, interleave)

    @property
    def has_windows(self) -> bool:
        """Whether some group hands out NULL below a sliding window."""
        return bool((self.groups[:, layout.WINDOW_REACH] >= 0).any())


def _states(specs: Sequence[KVCacheGroupSpec], max_num_reqs: int) -> tuple[npt.NDArray[np.int64], int]:
    """Describe the state groups, and return with them the size of the arena of their indices."""
    states, end = [], 0
    for g, spec in enumerate(specs):
        if spec.state_mode is not None:
            states.append((g, spec.state_mode != "none", spec.num_speculative_blocks, end))
            end = aligned(end + max_num_reqs * (1 + spec.num_speculative_blocks))
    return np.array(states, np.int64).reshape(-1, layout.STATE_WORDS), end


def aligned(num_elements: int) -> int:
    """Round up to where the next table, or the next group's line of an array, may start."""
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
