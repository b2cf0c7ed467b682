"""Who owns which block: the pool, its free queue and counts, and the tables of sequences."""

from pagedkv.allocation.block_pool import BlockPool as BlockPool
from pagedkv.allocation.sequence_table import SequenceBlockTable as SequenceBlockTable

__all__ = ["BlockPool", "SequenceBlockTable"]
