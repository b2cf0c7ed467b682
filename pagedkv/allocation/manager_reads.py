"""What a manager tells, and the copies, steps and rows between it and the rest of an engine."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.allocation import queries
from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.block_pool import BlockPool
from pagedkv.allocation.group_specs import CrossAttentionSpec
from pagedkv.allocation.logical_blocks import as_int64
from pagedkv.allocation.manager_faults import raise_fault
from pagedkv.allocation.manager_state import ManagerState
from pagedkv.allocation.stats import KVCacheStats, manager_stats
from pagedkv.checks import IntArray, as_int32, as_ready, check_int, check_shape
from pagedkv.constants import MAX_INT32
from pagedkv.mirror import HostMirror
from pagedkv.specs import KVCacheGroupSpec

__all__ = ["ManagerReads"]

Handles = npt.NDArray[np.int64]


class ManagerReads:
    """Base of `KVCacheManager`: everything that neither takes nor gives back blocks."""

    groups: tuple[Any, ...]
    max_model_len: int

    def __init__(self, state: ManagerState, defer_frees: bool) -> None:
        self._state = state
        self._defers = defer_frees
        self._max_num_encoder_tokens = min(
            (group.max_num_encoder_tokens for group in self.groups if isinstance(group, CrossAttentionSpec)),
            default=0,
        )
        self._num_copies_taken = 0
        self._step = 0
        self._open_steps: list[int] = []
        self._deferred: list[tuple[int, IntArray]] = []
        self._events: list[Any] = []

    @property
    def pool(self) -> BlockPool:
        """The pool; take nothing from it by hand while the manager runs."""
        return self._state.pool

    @property
    def table_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups as `MultiGroupBlockTable` takes them, beside `mirror=manager.mirror`.

        For kernel views: `dataclasses.replace(group, kernel_views=(8,))` of those that have them.
        """
        return tuple(group.table_spec(self.max_model_len) for group in self.groups)

    @property
    def mirror(self) -> HostMirror:
        """The mirror that the manager writes; tables commit it."""
        return self._state.mirror

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._state.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that are held."""
        return self._state.pool.usage

    @property
    def num_unfinished_copies(self) -> int:
        """Block copies that wait for `take_block_copies`, or were taken and not reported by `copies_done`.

        Each pins two blocks: whoever holds them may be freed, and they are still not free.
        """
        return int(self._state.arrays.totals[s.NUM_COPIES]) + self._num_copies_taken

    def block_table(self, group: int = 0) -> IntArray:
        """Read-only view of a group's table, int32 [max_num_seqs, width], by row."""
        return self.mirror.block_table(group)

    def num_blocks_held(self, group: int = 0) -> IntArray:
        """Read-only view of a group's row counts, int32 [max_num_seqs]."""
        return self.mirror.num_blocks(group)

    def rows(self, seqs: Any) -> IntArray:
        """Table row of each sequence, int32 [B], as a step's `rows`; -1 where it has none."""
        return self._read(seqs, s.ROW)

    def num_tokens(self, seqs: Any) -> IntArray:
        """Tokens of each sequence, int32 [B]."""
        return self._read(seqs, s.NUM_TOKENS)

    def num_computed_tokens(self, seqs: Any) -> IntArray:
        """Settled tokens of each sequence, int32 [B]."""
        return self._read(seqs, s.NUM_COMPUTED)

    def translate(self, seqs: Any, positions: Any, group: int = 0) -> npt.NDArray[np.int64]:
        """Return the slot of one position of each sequence, PAD_SLOT_ID where it has no block.

        Under context parallelism these are this rank's slots, PAD_SLOT_ID for the positions of others.

        Parameters
        ----------
        seqs : array_like of int64, shape [n]
            Repeats are fine.
        positions : array_like of int, shape [n]
        group : int

        Returns
        -------
        ndarray of int64, shape [n]
        """
        handles, where = self._handles(seqs), as_int64("positions", positions)
        check_shape("positions", where, handles.shape, "[len(seqs)]")
        check_int("group", group, 0, len(self.groups) - 1)
        out = np.empty(handles.size, np.int64)
        fault, at = queries.translate(self._state.compiled_state(), handles, where, group, out)
        raise_fault(self, fault, at, handles)
        return out

    def num_common_prefix_blocks(self, seqs: Any, group: int = 0) -> int:
        """Leading blocks that all these running sequences hold, whoever else holds them."""
        handles = self._handles(seqs)
        check_int("group", group, 0, len(self.groups) - 1)
        fault, at, num = queries.common_prefix(self._state.compiled_state(), handles, group)
        raise_fault(self, fault, at, handles)
        return int(num)

    def num_blocks_needed(self, seqs: Any, num_new_tokens: Any, *, num_lookahead_tokens: int = 0) -> IntArray:
        """Blocks that each sequence would take for its next tokens, int32 [B].

        Hits count as far as `match_prefix` found them; copies of shared blocks are left out.
        """
        handles = self._handles(seqs)
        counts = self._numbers("num_new_tokens", num_new_tokens, handles)
        lookahead = check_int("num_lookahead_tokens", num_lookahead_tokens)
        needed: IntArray
        fault, at, needed = queries.needed_blocks(self._state.compiled_state(), handles, counts, lookahead)
        raise_fault(self, fault, at, handles, counts)
        return needed

    def num_free_hit_blocks(self, seq: int) -> int:
        """Blocks of a waiting sequence's hit that nobody holds: it takes them from the free ones.

        Counted of what `match_prefix` found, as far as it is still there.
        """
        fault, num = queries.free_hits(self._state.compiled_state(), self._handle(seq))
        raise_fault(self, fault, 0, [seq])
        return int(num)

    def stats(self) -> KVCacheStats:
        """Return the manager in numbers."""
        return manager_stats(self.pool.stats(), self._state.arrays, self.num_unfinished_copies)

    def line(self, handle: int) -> IntArray:
        """Return the numbers of a live sequence, as `sequence_state` has them: for messages and tests."""
        line: IntArray = self._state.arrays.sequences[handle & 0xFFFFFFFF]
        return line

    def _handles(self, seqs: Any) -> Handles:
        if type(seqs) is np.ndarray and seqs.dtype == np.int64 and seqs.ndim == 1:
            return as_ready(seqs)
        handles = np.asarray(seqs)
        if handles.ndim == 0 and handles.dtype.kind in "iu":
            raise TypeError(f"seqs must be a list of handles, got one handle (pass [{handles}])")
        if handles.size == 0:
            return np.empty(0, np.int64)
        if handles.dtype.kind not in "iu" or handles.ndim != 1:
            raise TypeError(f"seqs must be a list of handles, got {handles.dtype} {list(handles.shape)}")
        return as_ready(np.ascontiguousarray(handles, np.int64))

    def _handle(self, seq: Any) -> int:
        if type(seq) is not int:
            seq = seq.item() if isinstance(seq, np.integer | np.ndarray) and seq.ndim == 0 else seq
        if type(seq) is int and -(1 << 63) <= seq < 1 << 63:
            return seq
        got = seq if isinstance(seq, int) else type(seq).__name__
        raise TypeError(f"seq must be one handle, got {got} (call once for each sequence)")

    def _numbers(self, name: str, values: Any, handles: Handles) -> Any:
        """One int32 for each handle; compiled calls check the values."""
        given: Any = np.asarray(values)
        numbers = given
        if given.dtype == np.int64 and given.ndim == 1:
            numbers = given.astype(np.int32)
            if not (numbers == given).all():
                numbers = as_int32(name, values)
        elif given.dtype != np.int32 or not given.flags.carray:
            numbers = as_ready(as_int32(name, values, -MAX_INT32))
        if numbers.shape != handles.shape:
            check_shape(name, numbers, handles.shape, "[len(seqs)]")
        return numbers

    def _tokens(self, token_ids: Any) -> IntArray:
        ready = type(token_ids) is np.ndarray and token_ids.dtype == np.int32 and token_ids.ndim == 1
        if ready and token_ids.flags.carray and token_ids.size and token_ids.min() >= 0:
            return token_ids  # type: ignore[no-any-return]
        return as_ready(as_int32("token_ids", token_ids))

    def _read(self, seqs: Any, column: int) -> IntArray:
        handles = self._handles(seqs)
        numbers: IntArray
        fault, at, numbers = queries.read(self._state.compiled_state(), handles, column)
        raise_fault(self, fault, at, handles)
        return numbers
