"""Groups that store something else: recurrent states, the encoder's tokens, nothing."""

from dataclasses import dataclass

from pagedkv.allocation import group_rules as rules
from pagedkv.checks import check_int
from pagedkv.specs import KVCacheGroupSpec, cdiv

__all__ = ["CrossAttentionSpec", "EncoderOnlyAttentionSpec", "MambaSpec"]


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A recurrent state instead of keys and values: a block holds the state after its last token.

    Parameters
    ----------
    block_size : int
        Tokens from one kept state to the next ("align"); the states between are overwritten.
    cache_mode : {"none", "align"}
        "none": one running state per sequence, in logical block 0. "align": the running state is in the
        block of the step's last token, and where a step ended on a block boundary, the state there is kept
        for the prefix cache.
    num_speculative_blocks : int
        Further state blocks behind the running one, for drafts.

    Notes
    -----
    A step without drafts leaves its state in the first of the blocks that it writes (column 0 of a step's
    `state_indices`). Where drafts are verified by a kernel that keeps one state a token, column 0 has the
    state after the first token, and column j that after the j-th draft. The next step starts from the block
    of column 0. So after a of the drafts were accepted, copy the block of column a onto it, in every layer,
    before `commit` offers it to others.

    With "align", a step writes its last state into the column of its last token, drafts included and
    lookahead not, behind which only the drafts' blocks stand: allocate exactly the tokens that it computes. A
    commit moves that block to the column of the last computed token, so that rejected drafts leave it where
    the next step reads. So commit a step before the next one is allocated.
    """

    block_size: int
    cache_mode: str = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, low=1)
        check_int("num_speculative_blocks", self.num_speculative_blocks)
        if self.cache_mode not in ("none", "align"):
            raise LookupError(f"cache_mode must be one of none, align, got {self.cache_mode!r}")

    @property
    def prefix_cacheable(self) -> bool:
        """Only kept states can be found again."""
        return self.cache_mode == "align"

    def rule(self) -> tuple[int, int, int]:
        """Kind, span and spare blocks."""
        kind = rules.STATE_ALIGNED if self.cache_mode == "align" else rules.STATE
        return kind, 0, self.num_speculative_blocks

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last token, whose state stands for the rest; none where one block holds every state."""
        return max(0, num_computed_tokens - 1) if self.cache_mode == "align" else 0

    def max_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The running state, its drafts, and with "align" the state that it was made from."""
        del max_in_flight_tokens, max_model_len
        return 1 + self.num_speculative_blocks + (self.cache_mode == "align")

    def table_spec(self, max_model_len: int) -> KVCacheGroupSpec:
        """The group as the block tables see it: written by state, not by slot."""
        del max_model_len
        return KVCacheGroupSpec(
            self.block_size,
            cp_sharded=False,
            state_mode=self.cache_mode,
            num_speculative_blocks=self.num_speculative_blocks,
        )


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec:
    """Decoder tokens read the encoder's tokens, which are stored once.

    Parameters
    ----------
    block_size : int
        Tokens a block.
    max_num_encoder_tokens : int
        Encoder tokens that a sequence can have.
    """

    block_size: int
    max_num_encoder_tokens: int
    prefix_cacheable = False

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, low=1)
        check_int("max_num_encoder_tokens", self.max_num_encoder_tokens, low=1)

    def rule(self) -> tuple[int, int, int]:
        """Kind, span and spare blocks."""
        return rules.CROSS, 0, 0

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: every decoder token reads all of the encoder's."""
        del num_computed_tokens
        return 0

    def max_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks for the encoder's tokens."""
        del max_in_flight_tokens, max_model_len
        return cdiv(self.max_num_encoder_tokens, self.block_size)

    def table_spec(self, max_model_len: int) -> KVCacheGroupSpec:
        """The group as the block tables see it."""
        del max_model_len
        return KVCacheGroupSpec(
            self.block_size, cp_sharded=False, max_num_encoder_tokens=self.max_num_encoder_tokens
        )


@dataclass(frozen=True, slots=True)
class EncoderOnlyAttentionSpec:
    """Attention within one pass: nothing is stored, nothing is found again; the table has one NULL column."""

    block_size: int = 1
    prefix_cacheable = False

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, low=1)

    def rule(self) -> tuple[int, int, int]:
        """Kind, span and spare blocks."""
        return rules.ENCODER_ONLY, 0, 0

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: nothing is stored, so no block ever goes."""
        del num_computed_tokens
        return 0

    def max_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """None."""
        del max_in_flight_tokens, max_model_len
        return 0

    def table_spec(self, max_model_len: int) -> KVCacheGroupSpec:
        """The group as the block tables see it."""
        del max_model_len
        return KVCacheGroupSpec(
            self.block_size, cp_sharded=False, slot_mapping=False, max_num_blocks_per_req=1
        )
