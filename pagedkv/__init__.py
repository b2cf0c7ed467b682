"""Torch-free bookkeeping of a paged KV cache for LLM inference.

Block tables (`MultiGroupBlockTable`, `BlockTable`) say where each token of each request lies, and
commit their changes to the device in one copy; `KVCacheManager`, `BlockPool` and `SequenceBlockTable` say
who owns which block; `InputBatch` says which request stands where in a step, and gives its metadata.
"""

from pagedkv.allocation import AllBlocksCleared as AllBlocksCleared
from pagedkv.allocation import Allocation as Allocation
from pagedkv.allocation import BlockHasher as BlockHasher
from pagedkv.allocation import BlockPool as BlockPool
from pagedkv.allocation import BlockRemoved as BlockRemoved
from pagedkv.allocation import BlockStored as BlockStored
from pagedkv.allocation import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
from pagedkv.allocation import CrossAttentionSpec as CrossAttentionSpec
from pagedkv.allocation import EncoderOnlyAttentionSpec as EncoderOnlyAttentionSpec
from pagedkv.allocation import ExtraKeys as ExtraKeys
from pagedkv.allocation import FullAttentionSpec as FullAttentionSpec
from pagedkv.allocation import HashChain as HashChain
from pagedkv.allocation import KVCacheManager as KVCacheManager
from pagedkv.allocation import KVCacheStats as KVCacheStats
from pagedkv.allocation import MambaSpec as MambaSpec
from pagedkv.allocation import PoolStats as PoolStats
from pagedkv.allocation import SequenceBlockTable as SequenceBlockTable
from pagedkv.allocation import SlidingWindowSpec as SlidingWindowSpec
from pagedkv.allocation import alloc_decode as alloc_decode
from pagedkv.allocation import alloc_extend as alloc_extend
from pagedkv.backends import get_backend as get_backend
from pagedkv.batch import AdmittedRequests as AdmittedRequests
from pagedkv.batch import BatchMetadata as BatchMetadata
from pagedkv.batch import CommonAttentionMetadata as CommonAttentionMetadata
from pagedkv.batch import GraphMode as GraphMode
from pagedkv.batch import GraphShape as GraphShape
from pagedkv.batch import GraphSizes as GraphSizes
from pagedkv.batch import InputBatch as InputBatch
from pagedkv.batch import MetadataBuilder as MetadataBuilder
from pagedkv.batch import MetadataBuilders as MetadataBuilders
from pagedkv.batch import MicroBatches as MicroBatches
from pagedkv.batch import RunningRequests as RunningRequests
from pagedkv.batch import SchedulerOutput as SchedulerOutput
from pagedkv.batch import StepMetadata as StepMetadata
from pagedkv.batch import step_metadata as step_metadata
from pagedkv.constants import NULL_BLOCK_ID as NULL_BLOCK_ID
from pagedkv.constants import PAD_SLOT_ID as PAD_SLOT_ID
from pagedkv.errors import BackendUnavailableError as BackendUnavailableError
from pagedkv.errors import CapacityError as CapacityError
from pagedkv.errors import DoubleFreeError as DoubleFreeError
from pagedkv.errors import InvalidBlockError as InvalidBlockError
from pagedkv.errors import OutOfBlocksError as OutOfBlocksError
from pagedkv.errors import PagedKVError as PagedKVError
from pagedkv.errors import StaleSequenceError as StaleSequenceError
from pagedkv.mirror import HostMirror as HostMirror
from pagedkv.specs import ContextParallel as ContextParallel
from pagedkv.specs import KernelView as KernelView
from pagedkv.specs import KVCacheGroupSpec as KVCacheGroupSpec
from pagedkv.tables.block_table import BlockTable as BlockTable
from pagedkv.tables.captured import CapturedStep as CapturedStep
from pagedkv.tables.encoder_slots import EncoderSlotMapping as EncoderSlotMapping
from pagedkv.tables.multi_group import MultiGroupBlockTable as MultiGroupBlockTable
from pagedkv.tables.step import Step as Step

__all__ = [
    "NULL_BLOCK_ID",
    "PAD_SLOT_ID",
    "AdmittedRequests",
    "AllBlocksCleared",
    "Allocation",
    "BackendUnavailableError",
    "BatchMetadata",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTable",
    "CapacityError",
    "CapturedStep",
    "ChunkedLocalAttentionSpec",
    "CommonAttentionMetadata",
    "ContextParallel",
    "CrossAttentionSpec",
    "DoubleFreeError",
    "EncoderOnlyAttentionSpec",
    "EncoderSlotMapping",
    "ExtraKeys",
    "FullAttentionSpec",
    "GraphMode",
    "GraphShape",
    "GraphSizes",
    "HashChain",
    "HostMirror",
    "InputBatch",
    "InvalidBlockError",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheStats",
    "KernelView",
    "MambaSpec",
    "MetadataBuilder",
    "MetadataBuilders",
    "MicroBatches",
    "MultiGroupBlockTable",
    "OutOfBlocksError",
    "PagedKVError",
    "PoolStats",
    "RunningRequests",
    "SchedulerOutput",
    "SequenceBlockTable",
    "SlidingWindowSpec",
    "StaleSequenceError",
    "Step",
    "StepMetadata",
    "alloc_decode",
    "alloc_extend",
    "get_backend",
    "step_metadata",
]

__version__ = "0.1.0"
