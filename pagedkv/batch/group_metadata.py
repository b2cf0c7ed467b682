"""CommonAttentionMetadata: what the attention layers of one KV-cache group read of a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedkv.batch.batch_metadata import BatchMetadata, BoolArray, writable
from pagedkv.batch.forwarding import FromBatch
from pagedkv.checks import IntArray
from pagedkv.specs import KVCacheGroupSpec

if TYPE_CHECKING:
    from pagedkv.batch.step_part import StepPart
    from pagedkv.tables.step import Step

__all__ = ["CommonAttentionMetadata", "WritableGroup"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CommonAttentionMetadata:
    """What the attention layers of one group read of a step; R requests and T tokens, padding included.

    Every field of `batch` can be read here as well; `causal` alone may differ. The arrays are on the device,
    valid until the next commit into the same output set.

    Parameters
    ----------
    batch : BatchMetadata
        What all groups share.
    group : int
    spec : KVCacheGroupSpec
    block_table_tensor : int32 [R, width]
        In manager blocks; NULL in the padding.
    slot_mapping : int64 [T], or int32 where the table was built so
        PAD where nothing is written.
    dcp_local_seq_lens : int32 [R]
        Tokens of `seq_lens` that this context-parallel rank holds; `seq_lens` where the group is replicated.
    step : Step or StepPart
        Where the arrays come from.
    """

    batch: BatchMetadata
    group: int
    spec: KVCacheGroupSpec
    block_table_tensor: Any
    slot_mapping: Any
    dcp_local_seq_lens: Any
    step: "Step | StepPart"

    query_start_loc = FromBatch[Any]()
    query_start_loc_cpu = FromBatch[IntArray]()
    seq_lens = FromBatch[Any]()
    seq_lens_cpu_upper_bound = FromBatch[IntArray]()
    num_computed_tokens_cpu = FromBatch[IntArray]()
    positions = FromBatch[Any]()
    token_to_req_indices = FromBatch[Any]()
    is_prefilling = FromBatch[BoolArray]()
    num_reqs = FromBatch[int]()
    num_actual_tokens = FromBatch[int]()
    num_reqs_unpadded = FromBatch[int]()
    num_tokens_unpadded = FromBatch[int]()
    max_query_len = FromBatch[int]()
    max_seq_len = FromBatch[int]()
    ubatch = FromBatch[int]()

    @property
    def causal(self) -> bool:
        """`BatchMetadata.causal`, but False for cross attention: each token sees all of the encoder's."""
        return self.batch.causal if self.spec.max_num_encoder_tokens is None else False

    def __repr__(self) -> str:
        """Sizes alone, as that of `BatchMetadata`."""
        return f"CommonAttentionMetadata(group={self.group}, spec={self.spec}, batch={self.batch})"

    def kernel_block_table(self, view: int = 0) -> Any:
        """Block table in a view's kernel blocks, int32 [R, width * ratio]."""
        return self.step.kernel_block_table(self.group, view)

    def state_indices(self) -> Any:
        """Blocks of the states that the step writes, int32 [R, 1 + drafts]; see `Step.state_indices`."""
        return self.step.state_indices(self.group)

    def initial_state_indices(self) -> Any:
        """Block of the state before the step, int32 [R]; NULL where nothing is computed yet."""
        return self.step.initial_state_indices(self.group)

    def state_columns(self) -> Any:
        """Last computed, first and last scheduled column, int32 [3, R]; see `Step.state_columns`."""
        return self.step.state_columns(self.group)

    def dcp_local_seq_lens_cpu_upper_bound(self) -> IntArray:
        """Share of `seq_lens_cpu_upper_bound` on this rank, int32 [R]; a new array in each call."""
        return self.step.geometry.shard(self.group).local_lengths(self.batch.seq_lens_cpu_upper_bound)


WritableGroup = writable(CommonAttentionMetadata)
