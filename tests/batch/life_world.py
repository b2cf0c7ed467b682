"""What an engine is made of: groups, sizes, who holds the blocks, and the batch over its tables."""

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.allocation import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from pagedkv.batch import GraphMode, GraphSizes, InputBatch

from .life_blocks import FreeListBlocks
from .life_manager import ManagedBlocks
from .life_model import Memory, Tags

SETUPS = ("batch order", "stable rows", "manager", "manager with a prefix cache")
MANAGED = (
    [FullAttentionSpec(3)],
    [FullAttentionSpec(4), SlidingWindowSpec(2, 5)],
    [SlidingWindowSpec(3, 4), FullAttentionSpec(6)],
    [FullAttentionSpec(2), MambaSpec(4, "align", num_speculative_blocks=2)],
    [FullAttentionSpec(6), SlidingWindowSpec(2, 7), MambaSpec(3, "align", num_speculative_blocks=3)],
    [FullAttentionSpec(4), MambaSpec(4, "align")],
)
UNCACHED = (*MANAGED, [FullAttentionSpec(3), MambaSpec(5, "none", num_speculative_blocks=2)])
BLOCK_SIZES = (1, 2, 3, 4, 5, 6)


class World:
    """Everything that stays the same for a life."""

    def __init__(self, setup, backend, random):
        self.setup, self.backend = setup, backend
        self.tags, self.memory = Tags(), Memory()
        self.num_rows = random.choice([5, 4, 3, 2, 1])
        self.max_model_len = random.choice([31, 23, 13])
        self.max_tokens = random.choice([40, 24, 9])
        self.context_parallel = random.choice([ContextParallel()] * 4 + [ContextParallel(2, 1)])
        self.make_table(random)
        drafts = [spec.num_speculative_blocks for spec in self.specs if spec.state_mode is not None]
        self.max_drafts = min([random.choice([3, 2, 1, 0]), *drafts])
        # A step that runs past the model length has no column for its state.
        self.may_run_over = not any(spec.state_mode in ("align", "all") for spec in self.specs)
        self.threshold = random.choice([None, None, 1, 1 + self.max_drafts])
        self.short_extend = random.choice([None, self.threshold + 3]) if self.threshold is not None else None
        self.batch = InputBatch(
            self.table,
            self.blocks.manager,
            decode_threshold=self.threshold,
            short_extend_threshold=self.short_extend,
        )
        self.sizes = GraphSizes(
            [1, 2, 3, 4, 8, 12, 20, 24],
            self.num_rows,
            self.max_tokens,
            uniform_query_len=random.choice([None, 1, 1 + self.max_drafts]),
            mixed=random.choice(list(GraphMode)),
        )

    def make_table(self, random):
        """Blocks for the longest request, and mostly for a few."""
        managed = self.setup.startswith("manager")
        own = {} if managed else {"specs": [self.draw_spec(random) for _ in range(random.choice([2, 3, 1]))]}
        caching = self.setup == SETUPS[3]
        groups = random.choice(MANAGED if caching else UNCACHED)
        per_request = sum(
            -(-self.max_model_len // group.block_size) + (group.num_speculative_blocks if has_states else 0)
            for group in own.get("specs", groups)
            for has_states in [isinstance(group, MambaSpec | KVCacheGroupSpec)]
        )
        num_blocks = 2 + int(per_request * random.uniform(1.0, self.num_rows))
        place = (self.max_model_len, self.context_parallel, self.memory)
        if managed:
            self.blocks = ManagedBlocks(groups, num_blocks, self.num_rows, *place, caching=caching)
            self.specs = self.blocks.specs(lambda size: draw_views(size, random))
        else:
            self.specs = own["specs"]
            self.blocks = FreeListBlocks(self.specs, num_blocks, *place)
        self.table = MultiGroupBlockTable(
            self.specs,
            self.num_rows,
            self.max_model_len,
            self.max_tokens,
            context_parallel=self.context_parallel,
            token_alignment=128 if managed else random.choice([None, 4, 128]),
            stable_rows=self.setup != "batch order",
            backend=self.backend,
            mirror=self.blocks.manager.mirror if managed else None,
            staging_depth=random.choice([1, 2, 3]),
        )
        self.table.outputs(3)  # 0 and 2 for steps, 1 for drafts

    def draw_spec(self, random):
        size = random.choice(BLOCK_SIZES)
        mode = random.choice([None, None, None, "align", "align", "none", "all"])
        if mode is not None:
            return KVCacheGroupSpec(size, state_mode=mode, num_speculative_blocks=random.choice([2, 3, 1, 0]))
        window = random.choice([None, None, 1, 4, 7])
        sharded = random.choice([True, False])
        return KVCacheGroupSpec(size, draw_views(size, random), cp_sharded=sharded, sliding_window=window)

    def device_array(self, array):
        """A host array as the device's own."""
        return self.table._committer.backend.asarray(array)


def draw_views(size, random):
    """Kernel blocks that divide a block, densely packed or not."""
    kernel = random.choice([k for k in range(1, size + 1) if size % k == 0])
    ratio = size // kernel
    return random.choice([(), (kernel,), ((kernel, ratio + 2), size)])
