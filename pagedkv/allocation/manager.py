"""KVCacheManager: the blocks of all sequences and groups, a whole batch per call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pagedkv.allocation import giving_back, placement, queries, settling
from pagedkv.allocation import manager_state as ms
from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.block_pool import BlockPool
from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.group_specs import GroupSpec
from pagedkv.allocation.hashing import BlockHasher
from pagedkv.allocation.manager_faults import raise_fault
from pagedkv.allocation.manager_tokens import ManagerTokens
from pagedkv.checks import IntArray, check_int
from pagedkv.errors import CapacityError
from pagedkv.mirror import HostMirror
from pagedkv.specs import ContextParallel

__all__ = ["Allocation", "KVCacheManager"]


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


class KVCacheManager(ManagerTokens):
    """Who holds which block, for all sequences and KV-cache groups; it writes the block tables itself.

    A sequence is a handle. It has a table row, stable until `move_rows`, from its first allocation until
    it is preempted or freed. A step is: `match_prefix` for those that start, `allocate_slots`,
    `take_block_copies`, (the model runs,) `append` the new tokens, `commit` what is computed.

    Parameters
    ----------
    groups : sequence of group specs
        One per KV-cache group.
    num_blocks : int
        Blocks of the pool, shared by all groups, the null block included.
    max_num_seqs : int
        Table rows: sequences that hold blocks at once. Waiting ones are not limited.
    max_model_len : int
        Tokens that a sequence can have.
    watermark : float
        Share of the pool that stays free when a sequence is admitted beside others, 0 <= watermark < 1.
    enable_prefix_caching : bool
        Whether full blocks are hashed and found again.
    algorithm, seed
        As `BlockHasher` has them.
    enable_events : bool
        Whether `take_events` tells what is cached.
    defer_frees : bool
        Whether blocks that are given back wait until every step begun before has ended.
    context_parallel : ContextParallel
        Ranks that share the sequences; a block of a sharded group then spans world_size blocks' tokens.
    mirror : HostMirror, optional
        A table's mirror to write into; a new one by default, for tables to commit.

    Examples
    --------
    >>> from pagedkv.allocation import FullAttentionSpec
    >>> manager = KVCacheManager([FullAttentionSpec(16)], 100, max_num_seqs=4, max_model_len=64)
    >>> seq = manager.add([7] * 40)
    >>> manager.allocate_slots([seq], [40]).block_ids
    array([1, 2, 3], dtype=int32)
    >>> manager.commit([seq], [40])
    >>> manager.free([seq])
    >>> manager.match_prefix(manager.add([7] * 40))
    32
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        watermark: float = 0.0,
        enable_prefix_caching: bool = True,
        algorithm: str = "sha256",
        seed: bytes | None = None,
        enable_events: bool = False,
        defer_frees: bool = False,
        context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen
        mirror: HostMirror | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.max_model_len = check_int("max_model_len", max_model_len, low=1)
        _check_groups(self.groups, enable_prefix_caching)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must lie in [0, 1), got {watermark}")
        world = context_parallel.world_size
        hash_block, alignment = ms.block_sizes(self.groups, world)
        hasher = BlockHasher(hash_block, algorithm, seed) if enable_prefix_caching else None
        self.table_groups = tuple(group.table_spec(max_model_len) for group in self.groups)
        """The groups as `MultiGroupBlockTable` takes them, beside `mirror=manager.mirror`."""
        pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching, enable_events=enable_events)
        if mirror is None:
            mirror = ms.new_mirror(self.table_groups, max_num_seqs, max_model_len, context_parallel)
        page = hash_block if enable_prefix_caching else 0
        limits = (max_model_len, alignment, page, int(watermark * num_blocks), 0)
        super().__init__(ms.ManagerState(self.groups, pool, hasher, mirror, limits, world), defer_frees)

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
        """
        tokens = self._tokens(token_ids)
        if not 1 <= tokens.size <= self.max_model_len:
            raise CapacityError(
                f"token_ids must hold 1 to {self.max_model_len} tokens (max_model_len), got {tokens.size}"
            )
        at = self._state.open_place(check_int("num_encoder_tokens", num_encoder_tokens))
        self._state.write_tokens(at, tokens, extra_keys)
        return self._state.handle(at)

    def match_prefix(self, seq: int) -> int:
        """Return how many leading tokens are cached in every group, at most all but the last.

        Nothing is pinned. The first allocation takes what is still there, and says how much it was.
        """
        fault, hit = queries.match(self._state.compiled_state(), seq)
        raise_fault(self, fault, 0, [seq])
        return int(hit)

    def allocate_slots(self, seqs: Any, num_new_tokens: Any, *, num_lookahead_tokens: int = 0) -> Allocation:
        """Give every sequence of a batch blocks for its next tokens, in one compiled call, all or none.

        Parameters
        ----------
        seqs : array_like of int64, shape [B]
            Handles, each once.
        num_new_tokens : array_like of int, shape [B]
            Tokens after the computed ones, at least 1; what lies past the model length gets nothing.
        num_lookahead_tokens : int
            Slots beyond these, for drafts.

        Raises
        ------
        OutOfBlocksError
            `index` is the first sequence that does not fit; nothing has changed.
        CapacityError
            There is no row left for a sequence that starts.
        StaleSequenceError, ValueError
            A handle is unknown or occurs twice, or a count is below 1.
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
            Tokens in the cache, not fewer than before and not more than there are blocks for.
        """
        handles = self._handles(seqs)
        computed = self._numbers("num_computed_tokens", num_computed_tokens, handles)
        if self.pool.has_events:
            self._make_room(handles, computed)
        fault, at, blocks = settling.commit(self._state.compiled_state(), handles, computed, self._defers)
        raise_fault(self, fault, at, handles, computed)
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
        if type(lookahead) is not int or lookahead < 0:
            lookahead = check_int("num_lookahead_tokens", lookahead)
        self._state.grow_copies(handles.size * len(self.groups))
        if self.pool.has_events:
            self._make_room(handles, counts + lookahead)
        state = self._state.compiled_state()
        fault, done, needed, block_ids, computed = placement.allocate(
            state, handles, counts, lookahead, exclusive
        )
        if exclusive or fault not in (s.OUT_OF_BLOCKS, s.OUT_OF_ROWS):
            raise_fault(self, fault, done, handles, needed)
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


def _check_groups(groups: Sequence[GroupSpec], caching: bool) -> None:
    if not 1 <= len(groups) <= 256:
        raise ValueError(f"groups must hold 1 to 256 specs, got {len(groups)}")
    bad = [type(group).__name__ for group in groups if caching and not group.prefix_cacheable]
    if bad:
        raise ValueError(f"prefix caching does not work with {', '.join(bad)} (enable_prefix_caching=False)")
