"""Who owns which block: pool, prefix cache, sequence tables, and the manager of a whole batch."""

from pagedkv.allocation.block_pool import BlockPool as BlockPool
from pagedkv.allocation.events import AllBlocksCleared as AllBlocksCleared
from pagedkv.allocation.events import BlockRemoved as BlockRemoved
from pagedkv.allocation.events import BlockStored as BlockStored
from pagedkv.allocation.extra_keys import ExtraKeys as ExtraKeys
from pagedkv.allocation.group_specs import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
from pagedkv.allocation.group_specs import CrossAttentionSpec as CrossAttentionSpec
from pagedkv.allocation.group_specs import EncoderOnlyAttentionSpec as EncoderOnlyAttentionSpec
from pagedkv.allocation.group_specs import FullAttentionSpec as FullAttentionSpec
from pagedkv.allocation.group_specs import MambaSpec as MambaSpec
from pagedkv.allocation.group_specs import SlidingWindowSpec as SlidingWindowSpec
from pagedkv.allocation.hashing import BlockHasher as BlockHasher
from pagedkv.allocation.hashing import HashChain as HashChain
from pagedkv.allocation.manager import KVCacheManager as KVCacheManager
from pagedkv.allocation.manager_blocks import Allocation as Allocation
from pagedkv.allocation.page_slots import alloc_decode as alloc_decode
from pagedkv.allocation.page_slots import alloc_extend as alloc_extend
from pagedkv.allocation.sequence_table import SequenceBlockTable as SequenceBlockTable
from pagedkv.allocation.stats import KVCacheStats as KVCacheStats
from pagedkv.allocation.stats import PoolStats as PoolStats

__all__ = [
    "AllBlocksCleared",
    "Allocation",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "ExtraKeys",
    "FullAttentionSpec",
    "HashChain",
    "KVCacheManager",
    "KVCacheStats",
    "MambaSpec",
    "PoolStats",
    "SequenceBlockTable",
    "SlidingWindowSpec",
    "alloc_decode",
    "alloc_extend",
]
