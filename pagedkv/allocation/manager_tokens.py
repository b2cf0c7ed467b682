"""How a manager's sequences get and lose tokens, and how one becomes several."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.allocation import forking, giving_back, growth
from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.manager_faults import raise_fault
from pagedkv.allocation.manager_steps import ManagerSteps
from pagedkv.checks import IntArray, check_int
from pagedkv.errors import CapacityError, OutOfBlocksError

__all__ = ["ManagerTokens"]

_ONE_EACH = np.empty(0, np.int32)
_NO_KEY = np.empty(0, np.uint64)


class ManagerTokens(ManagerSteps):
    """Base of `KVCacheManager`: add, append, truncate, fork."""

    def add(self, token_ids: Any, *, extra_keys: ExtraKeys | None = None, num_encoder_tokens: int = 0) -> int:
        """Add a sequence that waits; it holds nothing yet.

        Parameters
        ----------
        token_ids : array_like of int, shape [n]
            Its prompt, at least one token.
        extra_keys : ExtraKeys, optional
            What besides the tokens its KV depends on.
        num_encoder_tokens : int
            Tokens of the encoder, for cross-attention groups.

        Returns
        -------
        int
            The sequence's handle.

        Raises
        ------
        CapacityError
            More tokens than the model length, or more of the encoder than a cross-attention group takes.
        ValueError
            Tokens of an encoder without a cross-attention group.
        """
        tokens = self._tokens(token_ids)
        if not 1 <= tokens.size <= self.max_model_len:
            raise CapacityError(
                f"token_ids must hold 1 to {self.max_model_len} tokens (max_model_len), got {tokens.size}"
            )
        for _, start, length in extra_keys.multimodal if extra_keys else ():
            if start + length > tokens.size:
                raise ValueError(
                    f"multimodal items must lie in the prompt of {tokens.size} tokens, got {start} + {length}"
                )
        encoded, most = check_int("num_encoder_tokens", num_encoder_tokens), self._max_num_encoder_tokens
        if encoded and not most:
            raise ValueError(
                f"num_encoder_tokens must be 0 without cross attention, got {encoded} "
                "(give the manager a CrossAttentionSpec group)"
            )
        if encoded > most:
            raise CapacityError(
                f"num_encoder_tokens must be at most {most}, got {encoded} "
                "(shorten the encoder's input, or raise max_num_encoder_tokens of the group)"
            )
        at = self._state.open_place(encoded)
        self._state.write_tokens(at, tokens, extra_keys)
        return self._state.handle(at)

    def append(self, seqs: Any, token_ids: Any, lens: Any = None) -> None:
        """Append tokens to a batch of sequences: sampled ones, or drafts.

        Parameters
        ----------
        seqs : array_like of int64, shape [B]
        token_ids : array_like of int, shape [sum of lens]
        lens : array_like of int, shape [B], optional
            Tokens for each sequence; one each by default.

        Raises
        ------
        CapacityError
            A sequence would exceed the model length; nothing has changed.
        """
        handles = self._handles(seqs)
        tokens = self._tokens(token_ids)
        lengths = _ONE_EACH if lens is None else self._numbers("lens", lens, handles)
        hasher = self._state.hasher
        secret, start = (hasher.secret, hasher.start) if hasher else (_NO_KEY, _NO_KEY)
        fault, at = growth.append(self._state.compiled_state(), handles, tokens, lengths, secret, start)
        if fault == s.OUT_OF_BLOCKS:  # of pages: some sequences have outgrown theirs
            self._grow_extents(handles, lengths)
            fault, at = growth.append(self._state.compiled_state(), handles, tokens, lengths, secret, start)
        if fault == s.BAD_COUNT and at < 0:
            total, name = (
                (int(lengths.sum()), "sum(lens)") if lens is not None else (handles.size, "len(seqs)")
            )
            raise ValueError(f"token_ids must hold {name} = {total} tokens, got {tokens.size}")
        raise_fault(self, fault, at, handles, lengths, counts="lens")

    def truncate(self, seq: int, num_tokens: int) -> None:
        """Drop a sequence's tokens from `num_tokens` on, as after rejected drafts.

        Blocks of tokens that were not computed stay for the next ones.

        Raises
        ------
        ValueError
            More tokens than there are, or back to where a window or a recurrent state cannot follow.
        """
        seq, num_tokens = self._handle(seq), check_int("num_tokens", num_tokens, low=1)
        fault, blocks = giving_back.truncate(self._state.compiled_state(), seq, num_tokens, self._defers)
        raise_fault(self, fault, 0, [seq], num_tokens, counts="num_tokens")
        self._defer(blocks)
        self._state.cut_extras(seq & 0xFFFFFFFF, num_tokens)

    def fork(self, seq: int, n: int = 1) -> npt.NDArray[np.int64]:
        """Add n sequences that share a sequence's tokens and computed blocks.

        The first of the sharers to write into a part-filled block gets a copy of it; running states are
        copied at once (see `take_block_copies`).

        Raises
        ------
        OutOfBlocksError, CapacityError
            There are too few blocks for the states, or rows; nothing has changed.
        """
        seq, n = self._handle(seq), check_int("n", n)
        state = self._state
        fault, per_child = forking.needs(state.compiled_state(), seq)
        raise_fault(self, fault, 0, [seq])
        at = seq & 0xFFFFFFFF
        if n * per_child > self.num_free_blocks:
            raise OutOfBlocksError(n * per_child, self.num_free_blocks, num_copies=self.num_unfinished_copies)
        if state.arrays.sequences[at, s.ROW] >= 0 and n > state.arrays.rows[0]:
            raise CapacityError(
                f"fork needs {n} rows: {state.arrays.rows[0]} of {self.mirror.max_num_reqs} are free "
                "(free or preempt a sequence, or raise max_num_seqs)"
            )
        state.grow_copies(n * len(self.groups))
        self.pool.make_room_for_events(n * per_child)
        children = np.empty(n, np.int64)
        for i in range(n):
            child = state.open_place()
            forking.fork(state.compiled_state(), at, child)
            state.share_tokens(at, child)
            children[i] = state.handle(child)
        self._fetch_events()
        return children

    def _grow_extents(self, handles: npt.NDArray[np.int64], lengths: IntArray) -> None:
        lines = self._state.arrays.sequences[handles & 0xFFFFFFFF]
        totals = lines[:, s.NUM_TOKENS] + (lengths if lengths.size else 1)
        size = self._state.store.page_size
        for i in np.flatnonzero(totals > lines[:, s.NUM_PAGES] * size):
            self._state.store.grow(self._state.arrays.sequences[int(handles[i]) & 0xFFFFFFFF], int(totals[i]))
        self._state.sync_store()
