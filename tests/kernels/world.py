"""What kernels work on, built small: groups with their geometry, tables full of traps, staging buffers."""

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from pagedkv.kernels import _layout as layout

STALE = -777  # fills outputs; no kernel may leave it where it must write, nor touch it elsewhere
TRAP = 999_983  # a block id past every row's count: a kernel that reads it shows it


@dataclass
class Group:
    block_size: int
    width: int
    cp: tuple[int, int, int] = (1, 0, 1)  # world, rank, interleave
    has_slots: bool = True
    max_model_len: int = 10**6
    window: int | None = None
    views: tuple[tuple[int, int], ...] = ()  # (ratio, stride)


@dataclass
class World:
    """Arrays in the layout that all kernels share."""

    groups: list[Group]
    max_num_reqs: int
    slot_stride: int = 1
    req_gap: int = 0  # elements between two groups' lines of max_num_reqs
    geometry: np.ndarray = field(init=False)
    views: np.ndarray = field(init=False)
    num_elements: int = field(init=False)
    num_kernel_elements: int = field(init=False)

    def __post_init__(self):
        offset, view_offset, geometry, views = 0, 0, [], []
        for group in self.groups:
            row = dict.fromkeys(range(layout.GEOMETRY_WORDS), 0)
            row[layout.TABLE_OFFSET], row[layout.WIDTH] = offset, group.width
            row[layout.MAX_NUM_REQS], row[layout.BLOCK_SIZE] = self.max_num_reqs, group.block_size
            row[layout.CP_WORLD], row[layout.CP_RANK], row[layout.CP_INTERLEAVE] = group.cp
            row[layout.SLOTS_ENABLED], row[layout.MAX_MODEL_LEN] = group.has_slots, group.max_model_len
            row[layout.WINDOW_REACH] = -1 if group.window is None else group.window - 1
            row[layout.FIRST_VIEW], row[layout.NUM_VIEWS] = len(views), len(group.views)
            row[layout.SLOT_STRIDE], row[layout.REQ_STRIDE] = self.slot_stride, self.req_stride
            geometry.append(list(row.values()))
            offset += self.max_num_reqs * group.width
            for ratio, stride in group.views:
                views.append([view_offset, ratio, stride])
                view_offset += self.max_num_reqs * group.width * ratio
        self.geometry = np.array(geometry, np.int64)
        self.views = np.array(views, np.int64).reshape(-1, layout.VIEW_WORDS)
        self.num_elements, self.num_kernel_elements = offset, view_offset

    @property
    def req_stride(self):
        return self.max_num_reqs + self.req_gap

    def counts(self, value=0):
        return np.full((len(self.groups), self.max_num_reqs), value, np.int32)

    def arena(self, value=0):
        return np.full(self.num_elements, value, np.int32)

    def kernel_arena(self, value=STALE):
        return np.full(self.num_kernel_elements, value, np.int32)

    def table(self, arena, g):
        """Group g's table, int32 [max_num_reqs, width], a view of the arena."""
        first = int(self.geometry[g, layout.TABLE_OFFSET])
        width = self.groups[g].width
        return arena[first : first + self.max_num_reqs * width].reshape(self.max_num_reqs, width)

    def kernel_table(self, kernel_arena, g, v):
        """View v of group g, int32 [max_num_reqs, width * ratio], a view of the arena."""
        first, ratio, _ = self.views[int(self.geometry[g, layout.FIRST_VIEW]) + v].tolist()
        width = self.groups[g].width * ratio
        return kernel_arena[first : first + self.max_num_reqs * width].reshape(self.max_num_reqs, width)


@dataclass
class Launch:
    grid: tuple[int, int]
    num_threads: int
    downwards: bool

    def with_groups(self, num_groups):
        return replace(self, grid=(self.grid[0], num_groups))


launches = st.builds(
    Launch, st.tuples(st.integers(1, 3), st.just(1)), st.sampled_from([32, 64, 256]), st.booleans()
)
narrow_launches = st.builds(  # for kernels that need no whole warps: work for many rounds
    Launch, st.tuples(st.integers(1, 3), st.just(1)), st.sampled_from([1, 3, 8, 32]), st.booleans()
)
ONE_BLOCK = Launch((1, 1), 32, downwards=False)


@st.composite
def groups(draw):
    block_size = draw(st.sampled_from([1, 2, 3, 6, 16, 17]))
    world = draw(st.sampled_from([1, 1, 2, 3]))
    interleave = draw(st.sampled_from([i for i in range(1, block_size + 1) if block_size % i == 0]))
    return Group(
        block_size=block_size,
        width=draw(st.integers(1, 5)),
        cp=(world, draw(st.integers(0, world - 1)), interleave if world > 1 else 1),
        has_slots=draw(st.sampled_from([True, True, True, False])),
        max_model_len=draw(st.sampled_from([1, 7, 40, 10**6])),
        window=draw(st.sampled_from([None, None, 1, 3, 20])),
        views=tuple(
            (ratio, ratio + draw(st.integers(0, 2)))
            for ratio in draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
        ),
    )


@st.composite
def worlds(draw):
    drawn = draw(st.lists(groups(), min_size=1, max_size=3))
    return World(drawn, draw(st.sampled_from([1, 2, 5])), req_gap=draw(st.sampled_from([0, 1, 3])))


@st.composite
def filled(draw, world, past_count=TRAP):
    """Tables and counts: live ids (NULL among them) up to each row's count, `past_count` from there on."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arena, counts = world.arena(past_count), world.counts()
    for g, group in enumerate(world.groups):
        counts[g] = rng.integers(0, group.width + 1, world.max_num_reqs)
        for row, count in zip(world.table(arena, g), counts[g], strict=True):
            row[:count] = rng.integers(0, 2**20, count) * (rng.random(count) > 0.2)
    return arena, counts


def staging_buffer(header=(), **sections):
    """Pack a staging buffer of exactly the words it needs.

    `header` maps header words to values; `sections` maps the names of offset words of the layout to int32
    or int64 arrays. Sections that are not named are absent (-1).
    """
    offsets = ("WRITES", "PAYLOAD", "QUERY_START_LOC", "NUM_COMPUTED_TOKENS", "POSITIONS", "ROWS", "GATHER")
    words = [0] * layout.HEADER_WORDS
    for name in offsets:
        words[getattr(layout, name)] = -1
    for word, value in dict(header).items():
        words[word] = int(value)
    for name, values in sections.items():
        words += [0] * (-len(words) % 4)
        words[getattr(layout, name)] = len(words)
        words += np.ascontiguousarray(values).view(np.int32).ravel().tolist()
    return np.array(words, np.int32)
