"""StepMetadata: what the attention of one step reads, for all groups and for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagedkv.batch.batch_metadata import BatchMetadata, BoolArray, WritableBatch, writable
from pagedkv.batch.group_metadata import CommonAttentionMetadata, WritableGroup
from pagedkv.checks import IntArray
from pagedkv.tables.kept import keep
from pagedkv.tables.step import Step

if TYPE_CHECKING:
    from pagedkv.batch.micro_batches import MicroBatches
    from pagedkv.batch.step_part import StepPart

__all__ = ["BatchMetadata", "CommonAttentionMetadata", "StepMetadata"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepMetadata:
    """What attention reads of a step or of one micro-batch: ``metadata[g]`` is group g's.

    Parameters
    ----------
    batch : BatchMetadata
        What all groups share; also where there are no groups.
    groups : tuple of CommonAttentionMetadata
    step : Step or StepPart
        Where the device arrays come from.
    """

    batch: BatchMetadata
    groups: tuple[CommonAttentionMetadata, ...]
    step: "Step | StepPart"

    def __repr__(self) -> str:
        """Sizes alone, as that of `BatchMetadata`."""
        return f"StepMetadata(num_groups={len(self.groups)}, batch={self.batch})"

    @staticmethod
    def of(
        step: Step,
        host: IntArray,
        is_prefilling: BoolArray,
        max_query_len: int,
        max_seq_len: int,
        causal: bool = True,
    ) -> "StepMetadata":
        """Make a step's metadata from arrays that it may keep; nothing is checked.

        Parameters
        ----------
        step : Step
        host : int32 [3, num_reqs_padded + 1]
            query_start_loc, whose last value repeats in the padding; seq_lens and num_computed_tokens, 0
            there. Nobody else may write to it: the metadata owns it from now on, and makes it read-only.
        is_prefilling : bool [num_reqs_padded]
            Likewise.
        max_query_len, max_seq_len : int
        causal : bool
        """
        num_reqs, num_tokens = step.num_reqs_padded, step.num_tokens_padded
        shown = step.kept.get((num_reqs, num_tokens)) or _keep_views(step)
        host.setflags(False)  # type: ignore[call-arg]  # by position: at half the cost
        is_prefilling.setflags(False)  # type: ignore[call-arg]
        known = step.num_tokens
        batch = WritableBatch(
            shown[0],
            host[0],
            shown[1],
            host[1, :num_reqs],
            host[2, :num_reqs],
            shown[2],
            shown[3],
            is_prefilling,
            num_reqs,
            num_tokens,
            step.num_reqs,
            host.item(num_reqs) if known is None else known,
            max_query_len,
            max_seq_len,
            causal,
            0,
        )
        batch.__class__ = BatchMetadata
        return _with_groups(batch, shown[4], step)

    def __getitem__(self, group: int) -> CommonAttentionMetadata:
        """Return the metadata of one group."""
        return self.groups[group]

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    def __iter__(self) -> Iterator[CommonAttentionMetadata]:
        """Go through the groups."""
        return iter(self.groups)

    def with_batch(self, **changes: Any) -> "StepMetadata":
        """Return the same with fields of the batch changed, for all groups; ``causal=False`` for instance.

        What is given for an array on the device is not kept by `unpadded` and `split`, which take the step's.

        Raises
        ------
        TypeError
            `BatchMetadata` has no field of this name.
        """
        batch = replace(self.batch, **changes)
        return replace(self, batch=batch, groups=tuple(replace(group, batch=batch) for group in self.groups))

    def unpadded(self) -> "StepMetadata":
        """Return the same without padding: every array, on the host and on the device, is cut.

        Where only the device knows the number of tokens, the host's count is what is cut to: then some tokens
        of padding may be left, PAD in every group.
        """
        batch = self.batch
        num_reqs, num_tokens = batch.num_reqs_unpadded, batch.num_tokens_unpadded
        if num_reqs == batch.num_reqs and num_tokens == batch.num_actual_tokens:
            return self
        host = replace(
            batch,
            query_start_loc_cpu=batch.query_start_loc_cpu[: num_reqs + 1],
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[:num_reqs],
            num_computed_tokens_cpu=batch.num_computed_tokens_cpu[:num_reqs],
            is_prefilling=batch.is_prefilling[:num_reqs],
        )
        return over(self.step.resized(num_reqs, num_tokens), host)

    def split(
        self, cuts: Sequence[int], buffers: "MicroBatches", stream: Any = None, *, enqueue: bool = True
    ) -> tuple["StepMetadata", ...]:
        """Split the step into micro-batches at token indices; see `MicroBatches.split`."""
        return buffers.split(self, cuts, stream, enqueue=enqueue)


_WritableStep = writable(StepMetadata)


def over(step: "Step | StepPart", batch: BatchMetadata) -> StepMetadata:
    """Return metadata over a step's arrays, with what `batch` says on the host."""
    shown = step.kept.get((step.num_reqs_padded, step.num_tokens_padded)) or _keep_views(step)
    starts, seq_lens, positions, token_reqs, groups = shown
    shared = replace(
        batch,
        query_start_loc=starts,
        seq_lens=seq_lens,
        positions=positions,
        token_to_req_indices=token_reqs,
        num_reqs=step.num_reqs_padded,
        num_actual_tokens=step.num_tokens_padded,
    )
    return _with_groups(shared, groups, step)


def _with_groups(batch: BatchMetadata, shown: Any, step: "Step | StepPart") -> StepMetadata:
    groups = []
    for group, spec, block_table, slots, local_seq_lens in shown:
        one = WritableGroup(batch, group, spec, block_table, slots, local_seq_lens, step)
        one.__class__ = CommonAttentionMetadata
        groups.append(one)
    made: StepMetadata = _WritableStep(batch, tuple(groups), step)
    made.__class__ = StepMetadata
    return made


def _keep_views(step: "Step | StepPart") -> tuple[Any, Any, Any, Any, tuple[Any, ...]]:
    # All that depends on the step's sizes alone; of each group what CommonAttentionMetadata takes.
    groups = tuple(
        (g, spec, step.block_table(g), step.slot_mapping(g), step.local_seq_lens(g))
        for g, spec in enumerate(step.geometry.specs)
    )
    shared = (step.query_start_loc, step.seq_lens, step.positions, step.token_to_req_indices)
    sizes = (step.num_reqs_padded, step.num_tokens_padded)
    return keep(step.kept, sizes, (*shared, groups))  # type: ignore[no-any-return]
