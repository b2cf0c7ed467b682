"""How a manager's sequences get blocks, settle them and give them back."""

from typing import Any, NamedTuple

from pagedkv.allocation import giving_back, placement, queries, settling
from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.manager_faults import raise_fault
from pagedkv.allocation.manager_tokens import ManagerTokens
from pagedkv.checks import IntArray, check_int
from pagedkv.constants import MAX_INT32

__all__ = ["Allocation", "ManagerBlocks"]


class Allocation(NamedTuple):
    """What one allocation did.

    Attributes
    ----------
    num_sequences : int
        Leading sequences of the batch that were served.
    block_ids : ndarray of int32
        Blocks that were taken, hits not among them, sequence by sequence; what they hold is undefined.
    num_computed_tokens : ndarray of int32, shape [num_sequences]
        Tokens that each sequence has in the cache already; its new ones follow them.
    """

    num_sequences: int
    block_ids: IntArray
    num_computed_tokens: IntArray


class ManagerBlocks(ManagerTokens):
    """Base of `KVCacheManager`: match, allocate, commit, preempt, free."""

    def match_prefix(self, seq: int) -> int:
        """Look a waiting sequence's prefix up: how many leading tokens are cached in every group.

        At most all but the last. Nothing is pinned. The first allocation takes what of this hit is still
        there, and says how much it was; without this call it takes none.

        Raises
        ------
        ValueError
            The sequence runs: what it hit was taken by its first allocation.
        StaleSequenceError, TypeError
            It is unknown, or not one handle.
        """
        fault, hit = queries.match(self._state.compiled_state(), self._handle(seq))
        raise_fault(self, fault, 0, [seq])
        return int(hit)

    def allocate_slots(self, seqs: Any, num_new_tokens: Any, *, num_lookahead_tokens: int = 0) -> Allocation:
        """Give every sequence of a batch blocks for its next tokens, in one compiled call, all or none.

        A sequence that starts takes the hit that `match_prefix` has found for it, as far as it is still
        there. This call looks for none by itself: without a `match_prefix` the whole prompt is computed.

        Parameters
        ----------
        seqs : array_like of int64, shape [B]
            Handles, each once.
        num_new_tokens : array_like of int, shape [B]
            Every token of the step, the drafts that it verifies included: those after the settled ones
            (`num_computed_tokens`), at least 1. Where a step is in flight and not committed, its tokens count
            too: in flight plus new. What lies past the model length gets nothing.
        num_lookahead_tokens : int
            Slots beyond the step, for what a drafter computes after it. Recurrent states have none.

        Raises
        ------
        OutOfBlocksError
            `index` is the first sequence that does not fit; nothing has changed.
        CapacityError
            There is no row left for a sequence that starts.
        StaleSequenceError, ValueError
            A handle is unknown or occurs twice, or a count is below 1.

        Notes
        -----
        With `MambaSpec(block_size, "align")` a state stands in the column of the step's last token, where the
        tables look for it. So `num_new_tokens` must be what the step computes, neither more nor less, and end
        within the model length. Where a step is cut short after all, allocate for it again: the last call
        before the step counts, and moves the state back.
        """
        return self._allocate(seqs, num_new_tokens, num_lookahead_tokens, exclusive=True)

    def try_allocate_slots(
        self, seqs: Any, num_new_tokens: Any, *, num_lookahead_tokens: int = 0
    ) -> Allocation:
        """Serve as many leading sequences of the batch as fit; otherwise as `allocate_slots`."""
        return self._allocate(seqs, num_new_tokens, num_lookahead_tokens, exclusive=False)

    def commit(self, seqs: Any, num_computed_tokens: Any) -> None:
        """Settle a batch: these tokens of each sequence are computed, and no step will undo them.

        Full blocks become reachable for others; blocks that a window has left are freed.

        Parameters
        ----------
        seqs : array_like of int64, shape [B]
            Sequences that hold a row.
        num_computed_tokens : array_like of int, shape [B]
            Tokens in the cache: the ones before and those that the step computed, which are known and were
            allocated for. A token that the step sampled is not among them: its KV comes with the next step.

        Raises
        ------
        ValueError
            A count is lower than before, or higher than tokens are known or were allocated for.
        """
        handles = self._handles(seqs)
        computed = self._numbers("num_computed_tokens", num_computed_tokens, handles)
        if self.pool.has_events:
            self._make_room(handles, computed, 0, self.pool.num_blocks)
        fault, at, blocks = settling.commit(self._state.compiled_state(), handles, computed, self._defers)
        raise_fault(self, fault, at, handles, computed, counts="num_computed_tokens")
        if blocks.size:
            self._defer(blocks)
        self._fetch_events()

    def preempt(self, seqs: Any) -> None:
        """Take blocks and rows of a batch back; tokens and keys stay, so that a resume hits what is left."""
        self._give_back(seqs, end=False)

    def free(self, seqs: Any) -> None:
        """End a batch of sequences; their handles are stale from now on."""
        for at in self._give_back(seqs, end=True):
            self._state.close_place(int(at))

    def _allocate(self, seqs: Any, num_new: Any, lookahead: int, *, exclusive: bool) -> Allocation:
        handles = self._handles(seqs)
        counts = self._numbers("num_new_tokens", num_new, handles)
        if type(lookahead) is not int or not 0 <= lookahead <= MAX_INT32:
            lookahead = check_int("num_lookahead_tokens", lookahead)
        self._state.grow_copies(handles.size * len(self.groups))
        if self.pool.has_events:
            self._make_room(handles, counts, lookahead, self.num_free_blocks)
        state = self._state.compiled_state()
        fault, done, needed, block_ids, computed, num_back = placement.allocate(
            state, handles, counts, lookahead, exclusive
        )
        if exclusive or fault not in (s.OUT_OF_BLOCKS, s.OUT_OF_ROWS):
            raise_fault(self, fault, done, handles, counts if fault == s.BAD_COUNT else needed)
        if num_back:
            self._defer(block_ids[-num_back:])
            block_ids = block_ids[:-num_back]
        self._fetch_events()
        return Allocation(done, block_ids, computed[:done])

    def _give_back(self, seqs: Any, *, end: bool) -> IntArray:
        handles = self._handles(seqs)
        places: IntArray
        fault, at, places, blocks = giving_back.give_back(
            self._state.compiled_state(), handles, end, self._defers
        )
        raise_fault(self, fault, at, handles)
        self._defer(blocks)
        return places
