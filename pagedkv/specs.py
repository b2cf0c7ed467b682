"""What a KV-cache group and a context-parallel world look like, and the block arithmetic both imply."""

from dataclasses import dataclass
from math import gcd

import numpy as np

from pagedkv.checks import IntArray, check_int
from pagedkv.constants import MAX_INT32

__all__ = ["ContextParallel", "KVCacheGroupSpec", "KernelView", "cdiv", "max_block_id", "table_width"]


_STATE_MODES = (None, "none", "align", "all")


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for integers."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Who owns which token when a sequence's KV cache is spread over ranks.

    Chunks of `interleave` tokens go round the ranks: position p of a virtual block of
    `block_size * world_size` tokens belongs to rank ``(p // interleave) % world_size``. With prefill
    (pcp) and decode (dcp) context parallel together, world_size = pcp * dcp and
    rank = pcp_rank * dcp + dcp_rank.

    Parameters
    ----------
    world_size : int
        Ranks that share a sequence, at least 1.
    rank : int
        This rank, ``0 <= rank < world_size``.
    interleave : int
        Consecutive tokens that one rank holds, in tokens; must divide every sharded block size.
    """

    world_size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        check_int("context parallel world_size", self.world_size, 1)
        check_int("context parallel rank", self.rank, 0, self.world_size - 1)
        check_int("context parallel interleave", self.interleave, 1)

    def local_lengths(self, lengths: IntArray) -> IntArray:
        """Return how many of the first `lengths` positions of a sequence this rank holds.

        Parameters
        ----------
        lengths : int32 [n]
            Tokens, at least 0; the results grow with them.

        Returns
        -------
        ndarray of int32, shape [n]
            A new array.
        """
        wide = lengths.astype(np.int64)
        base = wide // self.interleave // self.world_size * self.interleave
        rest = np.clip(wide - base * self.world_size - self.rank * self.interleave, 0, self.interleave)
        local: IntArray = (base + rest).astype(np.int32)
        return local


@dataclass(frozen=True, slots=True)
class KernelView:
    """A group's table in the attention kernel's smaller blocks.

    Manager block b holds the kernel blocks ``b * stride + j`` for ``0 <= j < ratio``, where
    ``ratio = block_size // kernel_block_size``; NULL stays NULL in all of them.

    Parameters
    ----------
    kernel_block_size : int
        Tokens in a kernel block; must divide the group's block size.
    stride : int, optional
        Kernel blocks from one manager block to the next; `ratio` unless larger (packed caches).
    """

    kernel_block_size: int
    stride: int | None = None

    def resolve(self, block_size: int) -> tuple[int, int]:
        """Return (ratio, stride) for a manager block of `block_size` tokens, or raise ValueError."""
        kernel = check_int("kernel_block_size", self.kernel_block_size, 1)
        if block_size % kernel:
            raise ValueError(
                f"kernel_block_size must divide block_size {block_size}, got {kernel} "
                f"(remainder {block_size % kernel})"
            )
        ratio = block_size // kernel
        stride = ratio if self.stride is None else check_int("kernel view stride", self.stride, 1)
        if stride < ratio:
            raise ValueError(f"kernel view stride must be at least the ratio {ratio}, got {stride}")
        return ratio, stride


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """One KV-cache group: the layers that share a block table.

    Parameters
    ----------
    block_size : int
        Tokens in a manager block.
    kernel_views : tuple of KernelView, (kernel_block_size, stride) or int
        Block sizes in which attention kernels read this group's table; none by default.
    cp_sharded : bool
        False: every context-parallel rank holds all of the group's tokens (replicated).
    slot_mapping : bool
        False: the group is not written by slot (recurrent state); its slots are all PAD.
    max_num_blocks_per_req : int, optional
        Row capacity in blocks; blocks for the model length (and no CP division) where None.
    sliding_window : int, optional
        Window of the group's attention, in tokens. Tables with stable rows then hand out NULL in the
        columns that lie wholly below the window of the step's first token.
    state_mode : {None, "none", "align", "all"}
        The group holds recurrent states instead of keys and values, one a block: "none", the running state
        is in column 0; "align" and "all", the state after position p is in column ``p // block_size``.
        Every rank holds all of them, and nothing is written by slot.
    num_speculative_blocks : int
        With `state_mode`: columns behind the running state, one for each draft token.
    max_num_encoder_tokens : int, optional
        The group holds the encoder's tokens (cross attention), at most so many a request. A step's decoder
        tokens are not written to it: their slots are PAD.
    """

    block_size: int
    kernel_views: tuple[KernelView | tuple[int, int] | int, ...] = ()
    cp_sharded: bool = True
    slot_mapping: bool = True
    max_num_blocks_per_req: int | None = None
    sliding_window: int | None = None
    state_mode: str | None = None
    num_speculative_blocks: int = 0
    max_num_encoder_tokens: int | None = None

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
        if not isinstance(self.kernel_views, tuple):
            kind = type(self.kernel_views).__name__
            raise TypeError(f"kernel_views must be a tuple of views, got {kind} (write (view,))")
        for ratio_stride in self.views():
            del ratio_stride  # resolving raises where a view is wrong
        if self.max_num_blocks_per_req is not None:
            check_int("max_num_blocks_per_req", self.max_num_blocks_per_req, 1)
        if self.sliding_window is not None:
            check_int("sliding_window", self.sliding_window, 1)
        if self.state_mode not in _STATE_MODES:
            raise LookupError(f"state_mode must be one of {_STATE_MODES}, got {self.state_mode!r}")
        drafts = check_int("num_speculative_blocks", self.num_speculative_blocks)
        if drafts and self.state_mode is None:
            raise ValueError(f"num_speculative_blocks must be 0 without a state_mode, got {drafts}")
        if self.max_num_encoder_tokens is not None:
            check_int("max_num_encoder_tokens", self.max_num_encoder_tokens, 1)
        if (self.state_mode, self.max_num_encoder_tokens, self.sliding_window).count(None) < 2:
            raise ValueError(
                "a group must have at most one of state_mode, max_num_encoder_tokens and sliding_window, "
                f"got {self.state_mode!r}, {self.max_num_encoder_tokens} and {self.sliding_window}"
            )

    @property
    def written_by_slot(self) -> bool:
        """Whether a step's tokens have slots in this group; otherwise they are all PAD."""
        return self.slot_mapping and self.state_mode is None and self.max_num_encoder_tokens is None

    def views(self) -> list[tuple[int, int]]:
        """(ratio, stride) of every kernel view, in the order given."""
        return [_as_view(view).resolve(self.block_size) for view in self.kernel_views]

    def shard(self, context_parallel: ContextParallel) -> ContextParallel:
        """Return the context-parallel world in which this group lives: world 1 where it is replicated.

        Raises
        ------
        ValueError
            The interleave does not divide the block size of a sharded group.
        """
        if not self.cp_sharded or self.state_mode is not None or context_parallel.world_size == 1:
            return ContextParallel()
        if self.block_size % context_parallel.interleave:
            raise ValueError(
                f"context parallel interleave must divide block_size {self.block_size}, "
                f"got {context_parallel.interleave}"
            )
        return context_parallel


def _as_view(view: KernelView | tuple[int, int] | int) -> KernelView:
    if isinstance(view, KernelView):
        return view
    return KernelView(*view) if isinstance(view, tuple) else KernelView(view)


def table_width(
    spec: KVCacheGroupSpec,
    max_model_len: int,
    context_parallel: ContextParallel,
    token_alignment: int | None = 128,
) -> int:
    """Columns of a group's table: the one place every consumer's width comes from.

    Blocks for `max_model_len` tokens, or the encoder's (of which a sharded group holds one in
    `world_size`), and a state group's draft columns; or the spec's own capacity. Rounded up so that
    width * block_size is a multiple of `token_alignment`, but for groups that attention does not read.
    """
    columns = spec.max_num_blocks_per_req
    if columns is None:
        length = max_model_len if spec.max_num_encoder_tokens is None else spec.max_num_encoder_tokens
        columns = cdiv(length, spec.block_size * spec.shard(context_parallel).world_size)
        if spec.state_mode is not None:
            columns = (1 if spec.state_mode == "none" else columns) + spec.num_speculative_blocks
    if token_alignment is None or spec.state_mode is not None or not spec.slot_mapping:
        return columns
    step = check_int("token_alignment", token_alignment, 1) // gcd(token_alignment, spec.block_size)
    return cdiv(columns, step) * step


def max_block_id(spec: KVCacheGroupSpec, slot_bits: int = 64) -> int:
    """Largest block id whose kernel blocks fit int32 and whose slots, where it has any, fit `slot_bits`."""
    limits = [MAX_INT32]
    limits += [(MAX_INT32 - (ratio - 1)) // stride for ratio, stride in spec.views()]
    has_slots = spec.written_by_slot or spec.max_num_encoder_tokens is not None
    if slot_bits == 32 and has_slots:
        limits.append((MAX_INT32 - (spec.block_size - 1)) // spec.block_size)
    return min(limits)
