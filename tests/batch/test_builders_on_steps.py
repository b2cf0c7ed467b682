"""MetadataBuilders on real tables: two groups of one spec, micro-batches, and buffers that graphs read."""

import numpy as np
import pytest

from pagedkv import ContextParallel, KVCacheGroupSpec, MultiGroupBlockTable
from pagedkv.backends import get_backend
from pagedkv.batch.builders import MetadataBuilders
from pagedkv.batch.micro_batches import MicroBatches
from pagedkv.batch.step_metadata import step_metadata
from tests.tables.models import expand, slot_of, table_of, to_numpy

from .fake_builders import Builder, Recorder, Updating, padded

SPEC = KVCacheGroupSpec(12, ((4, 5),))
"""Blocks of 12 tokens; kernel blocks of 4, of which a packed cache has 5 from one block to the next."""

REGISTERED = [
    (group, kind, setup, view)
    for view in (None, 0)
    for kind, setup in ((Updating, 32), (Updating, 8), (Builder, 32))
    for group in (0, 1)
]
"""Per view a target's and a draft's heads with updates, and builders without."""


class Requests:
    """Requests with blocks of their own in two groups, and what their steps look like by brute force."""

    def __init__(self, backend, num_reqs, max_num_reqs):
        self.table = MultiGroupBlockTable([SPEC, SPEC], max_num_reqs, 240, 64, backend=backend)
        self.parts = MicroBatches(self.table, 2)
        self.lengths = [3 * i for i in range(num_reqs)]
        self.blocks = [[[] for _ in range(num_reqs)] for _ in range(2)]
        self.next_id = 1

    def step(self, query_lens, num_reqs_padded, num_tokens_padded):
        """Commit a step; return its metadata."""
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        computed = np.array(self.lengths, np.int32)
        for row, num in enumerate(query_lens):
            self.lengths[row] += num
            new = []
            for ids in self.blocks:
                count = -(-self.lengths[row] // SPEC.block_size) - len(ids[row])
                new.append(list(range(self.next_id, self.next_id + count)))
                ids[row] += new[-1]
                self.next_id += count
            self.table.append_row(new, row)
        committed = self.table.commit(
            len(query_lens),
            starts,
            computed,
            num_reqs_padded=num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
        )
        self.tokens = [(row, start + t) for row, start in enumerate(computed) for t in range(query_lens[row])]
        return step_metadata(committed, starts, computed)

    def expected(self, group, view, tokens, num_reqs_padded, num_tokens_padded):
        """(lengths, table, slots) of a batch of tokens (row, position)."""
        rows = sorted({row for row, _ in tokens})
        lengths = [1 + max(position for of, position in tokens if of == row) for row in rows]
        blocks = [self.blocks[group][row] for row in rows]
        width = self.table.mirror.block_table(group).shape[1]
        table = table_of(blocks + [[]] * (num_reqs_padded - len(rows)), width)
        if view is not None:
            table = expand(table, *SPEC.views()[view])
        slots = [slot_of(at, self.blocks[group][row], SPEC, ContextParallel(), 240) for row, at in tokens]
        return lengths, table, slots + [-1] * (num_tokens_padded - len(tokens))

    def assert_is_of(self, built, graph, registered, *batch):
        """What was built, and what a graph reads of the buffers that it was captured with."""
        group, _, setup, view = registered
        lengths, table, slots = self.expected(group, view, *batch)
        np.testing.assert_array_equal(to_numpy(built.table), table)
        assert to_numpy(built.slots).tolist() == slots
        expected = ((setup, view), padded(lengths), padded(table[:, 0]))
        assert built.reads() == expected
        assert graph.reads() == expected


def registered_on(backend, num_ubatches):
    builders = MetadataBuilders([SPEC, SPEC], num_ubatches)
    full = get_backend(backend).full
    for group, kind, setup, view in REGISTERED:
        builders.register(group, Recorder(kind, setup, full), key=(kind, setup), view=view)
    return builders


def test_groups_of_one_spec_share_nothing_wrong_over_steps(backend):
    requests, builders = Requests(backend, 3, 6), registered_on(backend, 1)
    [graphs] = builders.build(requests.step([1, 1, 1], 6, 16), for_capture=True)

    for query_lens, sizes in (([1, 1, 1], (4, 4)), ([9, 1, 2], (3, 12)), ([1, 14, 1], (6, 32))):
        [built] = builders.build(requests.step(query_lens, *sizes))

        for registered, one, graph in zip(REGISTERED, built, graphs, strict=True):
            requests.assert_is_of(one, graph, registered, requests.tokens, *sizes)


@pytest.mark.parametrize("cut_within", [False, True], ids=["between requests", "within a request"])
def test_micro_batches_share_nothing_wrong_over_steps(backend, cut_within):
    """A request that is cut has a row in both; neither sees the other's lengths, tables or slots."""
    requests, builders = Requests(backend, 4, 6), registered_on(backend, 2)
    step = requests.step([2, 2, 2, 2], 6, 16)
    graphs = builders.build(step.split([4 - cut_within], requests.parts), for_capture=True)

    for query_lens, sizes in (([2, 2, 2, 2], (4, 8)), ([3, 9, 1, 2], (6, 16)), ([1, 2, 17, 2], (5, 22))):
        cut = sum(query_lens[:2]) - cut_within
        parts = requests.step(query_lens, *sizes).split([cut], requests.parts)

        built = builders.build(list(parts))

        taken = requests.tokens[:cut], requests.tokens[cut:]
        for part, tokens, of_ubatch, of_graphs in zip(parts, taken, built, graphs, strict=True):
            for registered, one, graph in zip(REGISTERED, of_ubatch, of_graphs, strict=True):
                sizes_of_part = part.batch.num_reqs, part.batch.num_actual_tokens
                requests.assert_is_of(one, graph, registered, tokens, *sizes_of_part)


def test_a_whole_step_takes_the_builders_of_the_first_micro_batch(backend):
    requests, builders = Requests(backend, 2, 2), registered_on(backend, 2)
    step = requests.step([2, 2], 2, 4)
    graphs = builders.build(step.split([2], requests.parts), for_capture=True)
    second = [graph.reads() for graph in graphs[1]]

    [built] = builders.build(requests.step([1, 1], 2, 2))

    for registered, one, graph in zip(REGISTERED, built, graphs[0], strict=True):
        requests.assert_is_of(one, graph, registered, requests.tokens, 2, 2)
    assert [graph.reads() for graph in graphs[1]] == second
