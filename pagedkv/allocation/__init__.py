"""Who owns which block: the pool, its free queue, counts and prefix cache, and the tables of sequences."""

from pagedkv.allocation.block_pool import BlockPool as BlockPool
from pagedkv.allocation.events import AllBlocksCleared as AllBlocksCleared
from pagedkv.allocation.events import BlockRemoved as BlockRemoved
from pagedkv.allocation.events import BlockStored as BlockStored
from pagedkv.allocation.extra_keys import ExtraKeys as ExtraKeys
from pagedkv.allocation.hashing import BlockHasher as BlockHasher
from pagedkv.allocation.hashing import HashChain as HashChain
from pagedkv.allocation.sequence_table import SequenceBlockTable as SequenceBlockTable
from pagedkv.allocation.stats import PoolStats as PoolStats

__all__ = [
    "AllBlocksCleared",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ExtraKeys",
    "HashChain",
    "PoolStats",
    "SequenceBlockTable",
]
