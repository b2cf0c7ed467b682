"""The kinds of KV-cache groups, for the manager: what a group's layers read decides what is kept."""

from typing import Protocol

from pagedkv.allocation.attention_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from pagedkv.allocation.state_specs import CrossAttentionSpec, EncoderOnlyAttentionSpec, MambaSpec
from pagedkv.specs import KVCacheGroupSpec

__all__ = [
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "GroupSpec",
    "MambaSpec",
    "SlidingWindowSpec",
]


class GroupSpec(Protocol):
    """What the manager asks of a group."""

    @property
    def block_size(self) -> int:
        """Tokens a block on one rank."""

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks of this kind can be found by their prefix."""

    def rule(self) -> tuple[int, int, int]:
        """Kind, span and spare blocks, as `group_rules` has them."""

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that nothing reads any more."""

    def max_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks that one request can hold at once; the rest of its table is NULL."""

    def table_spec(self, max_model_len: int) -> KVCacheGroupSpec:
        """The group as the block tables see it."""
