"""Groups of attention layers that store keys and values: full, sliding window, chunked local."""

from dataclasses import dataclass

from pagedkv.allocation import group_rules as rules
from pagedkv.checks import check_int
from pagedkv.specs import KVCacheGroupSpec, cdiv

__all__ = ["ChunkedLocalAttentionSpec", "FullAttentionSpec", "SlidingWindowSpec"]


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Every token reads every token before it.

    Parameters
    ----------
    block_size : int
        Tokens a block on one rank.
    cp_sharded : bool
        Whether context-parallel ranks share the tokens; otherwise each holds all of them.
    """

    block_size: int
    cp_sharded: bool = True
    prefix_cacheable = True

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, low=1)

    def rule(self) -> tuple[int, int, int]:
        """Kind, span and spare blocks."""
        return rules.FULL, 0, 0

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: all tokens stay."""
        del num_computed_tokens
        return 0

    def max_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int, world_size: int = 1
    ) -> int:
        """Blocks for the model length, of which each of `world_size` context-parallel ranks holds a share."""
        del max_in_flight_tokens
        return cdiv(max_model_len, self.block_size * (world_size if self.cp_sharded else 1))

    def table_spec(self, max_model_len: int) -> KVCacheGroupSpec:
        """The group as the block tables see it."""
        del max_model_len
        return KVCacheGroupSpec(self.block_size, cp_sharded=self.cp_sharded)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """A token reads itself and the `sliding_window - 1` tokens before it.

    Parameters
    ----------
    block_size : int
        Tokens a block.
    sliding_window : int
        Tokens of the window, at least 1.
    extra_retained_tokens : int
        Tokens before the window that stay all the same.
    """

    block_size: int
    sliding_window: int
    extra_retained_tokens: int = 0
    prefix_cacheable = True

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, low=1)
        check_int("sliding_window", self.sliding_window, low=1)
        check_int("extra_retained_tokens", self.extra_retained_tokens)

    @property
    def _span(self) -> int:
        return self.sliding_window - 1 + self.extra_retained_tokens

    def rule(self) -> tuple[int, int, int]:
        """Kind, span and spare blocks."""
        return rules.WINDOW, self._span, 0

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the window of the next one."""
        return max(0, num_computed_tokens - self._span)

    def max_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks for the window and one step's tokens, and one: a window rarely starts with a block."""
        return cdiv(min(self._span + max_in_flight_tokens, max_model_len), self.block_size) + 1

    def table_spec(self, max_model_len: int) -> KVCacheGroupSpec:
        """The group as the block tables see it."""
        del max_model_len
        return KVCacheGroupSpec(self.block_size, cp_sharded=False, sliding_window=self._span + 1)


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec:
    """A token reads the tokens of its own chunk only.

    Parameters
    ----------
    block_size : int
        Tokens a block.
    attention_chunk_size : int
        Tokens a chunk; a block that two chunks share stays until both are done with it.
    """

    block_size: int
    attention_chunk_size: int
    prefix_cacheable = True

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, low=1)
        check_int("attention_chunk_size", self.attention_chunk_size, low=1)

    def rule(self) -> tuple[int, int, int]:
        """Kind, span and spare blocks."""
        return rules.CHUNKED, self.attention_chunk_size, 0

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens of the chunks before the next token's."""
        return num_computed_tokens - num_computed_tokens % self.attention_chunk_size

    def max_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks for a chunk and one step's tokens, and one where chunks do not start with a block."""
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + (self.attention_chunk_size % self.block_size != 0)

    def table_spec(self, max_model_len: int) -> KVCacheGroupSpec:
        """The group as the block tables see it."""
        del max_model_len
        return KVCacheGroupSpec(self.block_size, cp_sharded=False)
