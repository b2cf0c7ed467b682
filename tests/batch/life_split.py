"""Micro-batches of a step: what each of them must hold, cut by hand."""

from pagedkv.batch.micro_batches import MicroBatches
from tests.tables.models import local_length

from .life_expect import equal


def draw_cuts(expected, num_tokens_padded, most, random):
    """Token indices; between requests where there are states."""
    world = expected.world
    places = range(1, num_tokens_padded)
    if any(spec.state_mode is not None for spec in world.specs):
        places = sorted(set(expected.starts) - {0, num_tokens_padded})
    return sorted(random.sample(list(places), min(len(places), random.randint(1, most))))


def rows_of(parts, expected, cuts):
    """(first, last) request of each micro-batch, its padding left out."""
    found, first = [], 0
    for part, cut in zip(parts, [*cuts, None], strict=True):
        last = min(first + part.batch.num_reqs, expected.num_reqs)
        found.append((first, last))
        inside = cut is not None and any(
            a < cut < b for a, b in zip(expected.starts[:-1], expected.starts[1:], strict=True)
        )
        first = last - inside
    return found


def check_parts(parts, whole, expected, cuts):
    """Each micro-batch against the step, and all of them together against every token."""
    edges = [0, *cuts, whole.batch.num_actual_tokens]
    for k, (part, (first, last)) in enumerate(zip(parts, rows_of(parts, expected, cuts), strict=True)):
        check_part(part, whole, expected, (first, last), (edges[k], edges[k + 1]), k)


def check_part(part, whole, expected, rows, tokens, k):
    batch, (first, last), (a, b) = part.batch, rows, tokens
    more = [0] * (batch.num_reqs - (last - first))
    done = [min(max(b - start, 0), n) for start, n in zip(expected.starts, expected.lengths, strict=False)]
    before = [min(max(a - start, 0), n) for start, n in zip(expected.starts, expected.lengths, strict=False)]
    starts = [min(max(start, a), b) - a for start in expected.starts[first : last + 1]]
    ends = [c + n for c, n in zip(expected.computed, done, strict=True)][first:last]
    believed = [plan.believed for plan in expected.plans]
    assert (batch.ubatch, batch.num_actual_tokens) == (k, b - a)
    for array in (batch.query_start_loc, batch.query_start_loc_cpu):
        equal(starts + starts[-1:] * len(more), array, "part query_start_loc")
    equal(ends + more, batch.seq_lens, "part seq_lens")
    bounds = [c + n for c, n in zip(believed, done, strict=True)][first:last]
    equal(bounds + more, batch.seq_lens_cpu_upper_bound, "part seq_lens_cpu_upper_bound")
    known = [c + n for c, n in zip(believed, before, strict=True)][first:last]
    equal(known + more, batch.num_computed_tokens_cpu, "part num_computed_tokens_cpu")
    reqs = [i - first for i in expected.requests[a:b]]
    equal(reqs + [0] * (b - a - len(reqs)), batch.token_to_req_indices, "part token_to_req_indices")
    equal(whole.batch.positions[a:b], batch.positions, "part positions")
    for common in part:
        g, of_step = common.group, whole[common.group]
        equal(of_step.slot_mapping[a:b], common.slot_mapping, "part slots")
        rows = slice(first, first + batch.num_reqs)
        equal(of_step.block_table_tensor[rows], common.block_table_tensor, "part block table")
        place = expected.world.specs[g], expected.world.context_parallel
        equal([local_length(n, *place) for n in ends] + more, common.dcp_local_seq_lens, "part local lengths")


class Splitter:
    """Splits some steps of a life."""

    def __init__(self, world):
        self.buffers, self.manager = MicroBatches(world.table, 3), world.blocks.manager

    def split(self, metadata, expected, random):
        """Return (micro-batch, its requests) in order, checked."""
        cuts = draw_cuts(expected, metadata.batch.num_actual_tokens, 2, random)
        if self.manager is not None:  # a prefix is hit once it is computed, so nobody reads it too early
            rows = self.manager.rows([plan.request.handle for plan in expected.plans])
            assert self.buffers.may_split(metadata, cuts, rows)
        parts = metadata.split(cuts, self.buffers)
        check_parts(parts, metadata, expected, cuts)
        requests = [plan.request for plan in expected.plans]
        rows = rows_of(parts, expected, cuts)
        return [(part, requests[first:last]) for part, (first, last) in zip(parts, rows, strict=True)]
