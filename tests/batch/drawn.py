"""Steps drawn at random, and what they hold, token by token and request by request."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.batch.step_metadata import step_metadata
from tests.tables.models import positions_of, requests_of, shard, slot_of

MAX_NUM_REQS, MAX_TOKENS, MAX_MODEL_LEN = 6, 40, 64
GROUPS = [
    KVCacheGroupSpec(4, (2,)),
    KVCacheGroupSpec(6, ((3, 5), 6), cp_sharded=False),
    KVCacheGroupSpec(2, slot_mapping=False),
    KVCacheGroupSpec(4, state_mode="align", num_speculative_blocks=2),
    KVCacheGroupSpec(8, state_mode="none"),
]


@dataclass
class Drawn:
    """A step and the blocks of its requests."""

    specs: list
    world: ContextParallel
    stable: bool
    lens: list
    computed: list
    prompts: list
    ids: list  # [group][request]
    rows: list  # of the requests, with stable rows; -1 for a dummy
    padding: tuple  # further requests and tokens
    table: object = field(init=False, default=None)

    @property
    def num_reqs(self):
        return len(self.lens)

    @property
    def num_tokens(self):
        return sum(self.lens)

    @property
    def starts(self):
        return np.cumsum([0, *self.lens]).astype(np.int32)

    @property
    def seq_lens(self):
        return [c + n for c, n in zip(self.computed, self.lens, strict=True)]

    @property
    def tokens(self):
        """Per token (request, position, slot in each group)."""
        places = zip(requests_of(self.starts), positions_of(self.starts, self.computed), strict=True)
        return [
            (
                i,
                p,
                *(
                    slot_of(p, self.ids[g][i], spec, self.world, MAX_MODEL_LEN)
                    for g, spec in enumerate(self.specs)
                ),
            )
            for i, p in places
        ]

    def local_length(self, g, length):
        world, rank, interleave = shard(self.specs[g], self.world)
        return sum((p // interleave) % world == rank for p in range(length))

    def commit(self, backend, out=0):
        """Build a table and commit the step."""
        self.table = table = MultiGroupBlockTable(
            self.specs, MAX_NUM_REQS, MAX_MODEL_LEN, MAX_TOKENS, context_parallel=self.world,
            token_alignment=None, stable_rows=self.stable, backend=backend,
        )  # fmt: skip
        table.outputs(out + 1)
        lines = self.rows if self.stable else range(self.num_reqs)
        for i, row in enumerate(lines):
            if row >= 0 and self.specs:
                table.add_row([ids[i] for ids in self.ids], row)
        more_reqs, more_tokens = self.padding
        given = {"rows": np.array(self.rows, np.int32)} if self.stable else {}
        return table.commit(
            self.num_reqs, self.starts, np.array(self.computed, np.int32), out=out, **given,
            num_reqs_padded=self.num_reqs + more_reqs, num_tokens_padded=self.num_tokens + more_tokens,
        )  # fmt: skip

    def metadata(self, backend, **given):
        step = self.commit(backend)
        return step_metadata(step, self.starts, self.computed, num_prefill_tokens=self.prompts, **given)


@st.composite
def steps(draw, specs=None, worlds=(1, 1, 2, 3), padded=True):
    """Requests without tokens, without blocks and dummies among them; no groups at times."""
    specs = draw(st.lists(st.sampled_from(GROUPS if specs is None else specs), max_size=3))
    size = draw(st.sampled_from(worlds))
    world = ContextParallel(size, draw(st.integers(0, size - 1)), draw(st.sampled_from([1, 2])))
    num_reqs = draw(st.integers(0, MAX_NUM_REQS))
    stable = draw(st.booleans())
    rows = draw(st.permutations(range(MAX_NUM_REQS)))[:num_reqs]
    rows = [-1 if draw(st.integers(0, 5)) == 0 else row for row in rows]
    lens = [draw(st.sampled_from([0, 1, 1, 2, 5])) for _ in range(num_reqs)]
    computed = [draw(st.integers(0, MAX_MODEL_LEN - 5)) for _ in range(num_reqs)]
    ids = []
    for g, spec in enumerate(specs):
        size = 10**6 if spec.state_mode == "none" else spec.block_size * shard(spec, world)[0]
        most = 1 if spec.state_mode == "none" else -(-MAX_MODEL_LEN // size)
        counts = [
            0 if stable and row < 0 else draw(st.sampled_from([0, min(-(-(c + n) // size), most), most]))
            for row, c, n in zip(rows, computed, lens, strict=True)
        ]
        ids.append([[1000 * g + 100 * i + c + 1 for c in range(count)] for i, count in enumerate(counts)])
    more = (0, 0)
    if padded:
        more = (draw(st.integers(0, MAX_NUM_REQS - num_reqs)), draw(st.integers(0, MAX_TOKENS - sum(lens))))
        more = (more[0], min(more[1], draw(st.sampled_from([0, 1, 9]))))
    prompts = [draw(st.integers(0, MAX_MODEL_LEN)) for _ in range(num_reqs)]
    return Drawn(specs, world, stable, lens, computed, prompts, ids, rows, more)


def one_step(**given):
    """Three requests in two groups, of which one is sharded over two ranks; padded by one and three."""
    step = {
        "specs": [KVCacheGroupSpec(4, (2,)), KVCacheGroupSpec(6, cp_sharded=False)],
        "world": ContextParallel(2, 1, 2),
        "stable": False,
        "lens": [1, 4, 2],
        "computed": [9, 0, 5],
        "prompts": [3, 8, 6],
        "ids": [[[1, 2], [3], [4, 5]], [[11, 12], [13], [14, 15]]],
        "rows": [0, 1, 2],
        "padding": (1, 3),
    }
    return Drawn(**step | given)
