"""What a step must hand out, worked out one entry at a time from what the scheduler decided."""

import numpy as np

from pagedkv import PAD_SLOT_ID
from tests.tables.models import (
    below_window,
    expand,
    local_length,
    positions_of,
    requests_of,
    slot_of,
    states_of,
    table_of,
    to_numpy,
)

HOST_ARRAYS = ("query_start_loc_cpu", "seq_lens_cpu_upper_bound", "num_computed_tokens_cpu", "is_prefilling")
DEVICE_ARRAYS = ("query_start_loc", "seq_lens", "positions", "token_to_req_indices")


class Expected:
    """A step of these plans in batch order, without any padding."""

    def __init__(self, world, plans, rows):
        self.world, self.plans, self.rows = world, plans, rows
        self.computed = [plan.request.computed for plan in plans]
        self.lengths = [plan.scheduled for plan in plans]
        self.starts = np.cumsum([0, *self.lengths]).tolist()
        self.ends = [c + n for c, n in zip(self.computed, self.lengths, strict=True)]
        self.positions = positions_of(self.starts, self.computed)
        self.requests = requests_of(self.starts)
        self.num_reqs, self.num_tokens = len(plans), self.starts[-1]

    def tables(self, group):
        """Ids that each request shows, a list each."""
        world, spec = self.world, self.world.specs[group]
        shown = []
        for row, computed in zip(self.rows, self.computed, strict=True):
            ids = row[group]
            dead = below_window(computed, len(ids), spec, world.context_parallel)
            dead *= world.table.stable_rows
            shown.append([0] * dead + ids[dead:])
        return shown

    def slots(self, group):
        world = self.world
        where = (world.specs[group], world.context_parallel, world.max_model_len)
        return [
            slot_of(p, self.rows[i][group], *where)
            for i, p in zip(self.requests, self.positions, strict=True)
        ]

    def local_seq_lens(self, group):
        place = self.world.specs[group], self.world.context_parallel
        return [local_length(end, *place) for end in self.ends]

    def states(self, group):
        spec = self.world.specs[group]
        ids = [row[group] for row in self.rows]
        return [states_of(spec, *request) for request in zip(ids, self.computed, self.ends, strict=True)]

    def host(self):
        believed = [plan.believed for plan in self.plans]
        return {
            "query_start_loc_cpu": self.starts,
            "seq_lens_cpu_upper_bound": [plan.believed + plan.scheduled for plan in self.plans],
            "num_computed_tokens_cpu": believed,
            "is_prefilling": [plan.believed < plan.request.num_prefill for plan in self.plans],
        }


def equal(expected, actual, name):
    np.testing.assert_array_equal(to_numpy(expected), to_numpy(actual), name)


def check_host(batch, expected, num_reqs, max_seq_len):
    """Fresh, true, padded and not to be written to."""
    for name, values in expected.host().items():
        array = getattr(batch, name)
        padding = num_reqs - expected.num_reqs
        filled = expected.num_tokens if name == "query_start_loc_cpu" else 0
        equal(values + [filled] * padding, array, name)
        assert not array.flags.writeable, name
        assert array.dtype == (np.bool_ if name == "is_prefilling" else np.int32), name
    seq_lens = expected.host()["seq_lens_cpu_upper_bound"]
    assert batch.max_query_len == max(expected.lengths, default=0)
    assert batch.max_seq_len == max([*seq_lens, max_seq_len or 0])
    assert (batch.num_reqs_unpadded, batch.num_tokens_unpadded) == (expected.num_reqs, expected.num_tokens)
    assert (batch.causal, batch.ubatch) == (True, 0)


def check_shared(batch, expected, num_reqs, num_tokens):
    """What all groups share, on the device."""
    more_reqs, more_tokens = num_reqs - expected.num_reqs, num_tokens - expected.num_tokens
    assert (batch.num_reqs, batch.num_actual_tokens) == (num_reqs, num_tokens)
    equal(expected.starts + [expected.num_tokens] * more_reqs, batch.query_start_loc, "query_start_loc")
    equal(expected.ends + [0] * more_reqs, batch.seq_lens, "seq_lens")
    equal(expected.positions + [0] * more_tokens, batch.positions, "positions")
    equal(expected.requests + [0] * more_tokens, batch.token_to_req_indices, "token_to_req_indices")


def check_group(common, expected, num_reqs, num_tokens):
    """One group's table, slots, lengths and states."""
    g, spec = common.group, expected.world.specs[common.group]
    more_reqs = num_reqs - expected.num_reqs
    width = expected.world.table.mirror.widths[g]
    table = table_of(expected.tables(g) + [[]] * more_reqs, width)
    equal(table, common.block_table_tensor, f"block table {g}")
    for view, (ratio, stride) in enumerate(spec.views()):
        equal(expand(table, ratio, stride), common.kernel_block_table(view), f"kernel table {g}, {view}")
    slots = expected.slots(g) + [PAD_SLOT_ID] * (num_tokens - expected.num_tokens)
    equal(slots, common.slot_mapping, f"slots {g}")
    equal(expected.local_seq_lens(g) + [0] * more_reqs, common.dcp_local_seq_lens, f"local lengths {g}")
    if spec.state_mode is not None:
        states = expected.states(g) + [states_of(spec, [], 0, 0)] * more_reqs
        drafts = 1 + spec.num_speculative_blocks
        written = np.array([line for line, _, _ in states]).reshape(num_reqs, drafts)
        equal(written, common.state_indices(), f"states {g}")
        equal([block for _, block, _ in states], common.initial_state_indices(), f"initial states {g}")
        columns = np.array([line for _, _, line in states]).reshape(num_reqs, 3).T
        equal(columns, common.state_columns(), f"state columns {g}")


def check_step(metadata, expected, num_reqs, num_tokens, max_seq_len):
    """All that a step hands out, with its padding; and the same without it."""
    assert len(metadata) == len(expected.world.specs)
    check_host(metadata.batch, expected, num_reqs, max_seq_len)
    check_shared(metadata.batch, expected, num_reqs, num_tokens)
    for common in metadata:
        check_group(common, expected, num_reqs, num_tokens)
    cut = metadata.unpadded()
    check_host(cut.batch, expected, expected.num_reqs, max_seq_len)
    check_shared(cut.batch, expected, expected.num_reqs, expected.num_tokens)
    for common in cut:
        check_group(common, expected, expected.num_reqs, expected.num_tokens)


def check_no_trace(metadata, num_reqs, num_tokens, world):
    """Nothing lies past the step, to the end of every array that a graph may read."""
    whole = metadata.step.resized(world.num_rows, world.max_tokens)
    for g, spec in enumerate(world.specs):
        assert not to_numpy(whole.block_table(g))[num_reqs:].any(), f"block table {g} past the batch"
        for view in range(len(spec.kernel_views)):
            assert not to_numpy(whole.kernel_block_table(g, view))[num_reqs:].any(), "kernel table"
        assert (to_numpy(whole.slot_mapping(g))[num_tokens:] == PAD_SLOT_ID).all(), f"slots {g} past the step"
    for array in (whole.positions, whole.token_to_req_indices):
        assert not to_numpy(array)[num_tokens:].any(), "positions past the step"


def snapshot(metadata):
    """Copies of all that must stay as it is: of the host forever, of the device until the set's next step."""
    host = {name: getattr(metadata.batch, name).copy() for name in HOST_ARRAYS}
    device = {name: to_numpy(getattr(metadata.batch, name)).copy() for name in DEVICE_ARRAYS}
    slots = [to_numpy(common.slot_mapping).copy() for common in metadata]
    return host, device, slots
