"""Options of a replay: one frozen record, with the defaults that the command line shows."""

from dataclasses import dataclass, field
from typing import Literal

from pagedkv.replay.errors import ReplayInputError
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

__all__ = ["DEFAULT_BYTES_PER_TOKEN", "DEFAULT_KV_MEMORY", "ReplayOptions"]

DEFAULT_KV_MEMORY = 64 << 30
"""Bytes of KV cache on each rank: what an 80 GB device has left beside an 8B model in bfloat16."""

DEFAULT_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
"""K and V, 32 layers, 8 KV heads of 128 values, 2 bytes each: an 8B model with grouped queries."""


@dataclass(frozen=True)
class ReplayOptions:
    """What to replay and how; lengths in tokens, memory in bytes.

    Attributes
    ----------
    trace : str, optional
        File, ``-`` for standard input, None for the built-in traffic.
    num_blocks : int, optional
        Blocks of the pool, the null block included; from the memory budget where None.
    kv_memory, bytes_per_token : int
        Memory budget of a rank, and what a token takes in all layers of all groups.
    max_model_len : int, optional
        The trace's longest prompt + output where None.
    groups : tuple of KVCacheGroupSpec
        KV-cache groups; all take their blocks from one pool.
    context_parallel : ContextParallel
        World and interleave; every rank is simulated.
    watermark : float
        Share of the pool that an admission must leave free while others run.
    prefix_caching : bool
        Whether full blocks are found again by the hash of their tokens and all before them.
    hash : str
        How blocks are hashed, as `BlockHasher` has it.
    compact_every : int
        Steps from one move of the highest rows into holes to the next; 0: never.
    num_samples : int
        Positions read back in each group at every step.
    """

    trace: str | None = None
    arrivals: Literal["trace", "immediate"] = "trace"
    step_ms: float = 10.0
    token_us: float = 20.0
    num_blocks: int | None = None
    kv_memory: int = DEFAULT_KV_MEMORY
    bytes_per_token: int = DEFAULT_BYTES_PER_TOKEN
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    groups: tuple[KVCacheGroupSpec, ...] = field(default_factory=lambda: (KVCacheGroupSpec(16),))
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    backend: str = "auto"
    limit: int | None = None
    seed: int = 0
    verify: bool = True
    num_samples: int = 64
    watermark: float = 0.01
    prefix_caching: bool = True
    hash: str = "siphash"
    compact_every: int = 32
    skip_invalid: bool = False
    json: str | None = None
    plot: str | None = None
    quiet: bool = False

    def resolved_num_blocks(self) -> int:
        """Blocks of the pool: as asked for, or as many as the memory budget holds.

        A block holds `block_size` tokens of one group's layers, that is 1 / num_groups of a token's bytes;
        groups of unequal block sizes share blocks of the largest.

        Raises
        ------
        ReplayInputError
            The budget holds no block beside the null block.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        block_size = max(spec.block_size for spec in self.groups)
        num_blocks = self.kv_memory * len(self.groups) // (block_size * self.bytes_per_token)
        if num_blocks < 2:
            raise ReplayInputError(
                f"--kv-memory must hold at least 2 blocks of {block_size} tokens x {self.bytes_per_token} "
                f"bytes, got {self.kv_memory} bytes (raise it, or lower --bytes-per-token)"
            )
        return num_blocks
