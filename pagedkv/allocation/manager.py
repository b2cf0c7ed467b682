"""KVCacheManager: the blocks of all sequences and groups, a whole batch per call."""

from collections.abc import Iterable, Sequence
from typing import Any

from pagedkv.allocation import manager_state as ms
from pagedkv.allocation.block_pool import BlockPool
from pagedkv.allocation.group_rules import STATE_ALIGNED
from pagedkv.allocation.group_specs import GroupSpec
from pagedkv.allocation.hashing import BlockHasher
from pagedkv.allocation.manager_blocks import ManagerBlocks
from pagedkv.allocation.manager_mirror import mirror_for
from pagedkv.checks import check_int
from pagedkv.mirror import HostMirror
from pagedkv.specs import ContextParallel

__all__ = ["KVCacheManager"]


class KVCacheManager(ManagerBlocks):
    """Who holds which block, for all sequences and KV-cache groups; it writes the block tables itself.

    A sequence is a handle. It has a table row, stable until `move_rows`, from its first allocation until
    it is preempted or freed. A step is: `match_prefix` for those that start, `allocate_slots`,
    `take_block_copies`, (the model runs,) `append` the new tokens, `commit` what is computed.

    Parameters
    ----------
    groups : sequence of group specs
        One per KV-cache group.
    num_blocks : int
        Blocks of the pool, shared by all groups, the null block included.
    max_num_seqs : int
        Table rows: sequences that hold blocks at once. Waiting ones are not limited.
    max_model_len : int
        Tokens that a sequence can have.
    watermark : float
        Share of the pool that stays free when a sequence is admitted beside others, 0 <= watermark < 1.
    enable_prefix_caching : bool
        Whether full blocks are hashed and found again.
    algorithm, seed
        As `BlockHasher` has them.
    enable_events : bool
        Whether `take_events` tells what is cached.
    defer_frees : bool
        Whether blocks that are given back wait until every step begun before has ended.
    context_parallel : ContextParallel
        Ranks that share the sequences; a block of a sharded group then spans world_size blocks' tokens.
    mirror : HostMirror, optional
        A table's mirror to write into: as many rows, wide enough, empty, and without another writer. A new
        one by default, for tables to commit.

    Examples
    --------
    >>> from pagedkv.allocation import FullAttentionSpec
    >>> manager = KVCacheManager([FullAttentionSpec(16)], 100, max_num_seqs=4, max_model_len=64)
    >>> seq = manager.add([7] * 40)
    >>> manager.allocate_slots([seq], [40]).block_ids
    array([1, 2, 3], dtype=int32)
    >>> manager.commit([seq], [40])
    >>> manager.free([seq])
    >>> manager.match_prefix(manager.add([7] * 40))
    32
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        watermark: float = 0.0,
        enable_prefix_caching: bool = True,
        algorithm: str = "sha256",
        seed: bytes | None = None,
        enable_events: bool = False,
        defer_frees: bool = False,
        context_parallel: ContextParallel = ContextParallel(),  # noqa: B008 - frozen
        mirror: HostMirror | None = None,
    ) -> None:
        self.groups = _as_groups(groups)
        self.max_model_len = check_int("max_model_len", max_model_len, low=1)
        _check_groups(self.groups, enable_prefix_caching)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must lie in [0, 1), got {watermark}")
        hash_block, alignment = ms.block_sizes(self.groups, context_parallel.world_size)
        hasher = BlockHasher(hash_block, algorithm, seed) if enable_prefix_caching else None
        pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching, enable_events=enable_events)
        mirror = mirror_for(
            mirror, self.table_groups, num_blocks, max_num_seqs, max_model_len, context_parallel
        )
        page = hash_block if enable_prefix_caching else 0
        has_states = any(group.rule()[0] == STATE_ALIGNED for group in self.groups)
        limits = (max_model_len, alignment, page, int(watermark * num_blocks), has_states)
        state = ms.ManagerState(self.groups, pool, hasher, mirror, limits, context_parallel)
        super().__init__(state, defer_frees)


def _as_groups(groups: Any) -> tuple[GroupSpec, ...]:
    if not isinstance(groups, Iterable):
        raise TypeError(
            f"groups must be a list of group specs, got one {type(groups).__name__} "
            "(pass [FullAttentionSpec(16)])"
        )
    specs = tuple(groups)
    for g, spec in enumerate(specs):
        if isinstance(spec, type) or not hasattr(spec, "table_spec"):
            got = spec.__name__ if isinstance(spec, type) else type(spec).__name__
            raise TypeError(
                f"groups[{g}] must be a FullAttentionSpec or another spec of pagedkv.allocation, got {got} "
                "(what a group reads decides what is kept; table_groups makes the tables' specs of these)"
            )
    return specs


def _check_groups(groups: Sequence[GroupSpec], caching: bool) -> None:
    if not 1 <= len(groups) <= 256:
        raise ValueError(f"groups must hold 1 to 256 specs, got {len(groups)}")
    bad = [str(group) for group in groups if caching and not group.prefix_cacheable]
    if bad:
        or_align = "; MambaSpec can be cached with cache_mode='align'" if "MambaSpec" in str(bad) else ""
        raise ValueError(
            f"enable_prefix_caching must be False with groups of which nothing can be found again, "
            f"got {', '.join(bad)} (pass enable_prefix_caching=False{or_align})"
        )
