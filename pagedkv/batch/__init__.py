"""What runs this step: which request sits where, and what the attention layers of each group read."""

from pagedkv.batch.builders import MetadataBuilder as MetadataBuilder
from pagedkv.batch.builders import MetadataBuilders as MetadataBuilders
from pagedkv.batch.graph_sizes import GraphMode as GraphMode
from pagedkv.batch.graph_sizes import GraphShape as GraphShape
from pagedkv.batch.graph_sizes import GraphSizes as GraphSizes
from pagedkv.batch.input_batch import InputBatch as InputBatch
from pagedkv.batch.metadata import BatchMetadata as BatchMetadata
from pagedkv.batch.metadata import CommonAttentionMetadata as CommonAttentionMetadata
from pagedkv.batch.metadata import StepMetadata as StepMetadata
from pagedkv.batch.micro_batches import MicroBatches as MicroBatches
from pagedkv.batch.scheduler_output import AdmittedRequests as AdmittedRequests
from pagedkv.batch.scheduler_output import RunningRequests as RunningRequests
from pagedkv.batch.scheduler_output import SchedulerOutput as SchedulerOutput
from pagedkv.batch.step_metadata import step_metadata as step_metadata

__all__ = [
    "AdmittedRequests",
    "BatchMetadata",
    "CommonAttentionMetadata",
    "GraphMode",
    "GraphShape",
    "GraphSizes",
    "InputBatch",
    "MetadataBuilder",
    "MetadataBuilders",
    "MicroBatches",
    "RunningRequests",
    "SchedulerOutput",
    "StepMetadata",
    "step_metadata",
]
