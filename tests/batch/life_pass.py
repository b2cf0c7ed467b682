"""The model's forward pass: KV is written through the device's slots and read through the device's tables.

After a step, or a micro-batch of it, every token that attention can see must lie where the table says.
"""

from pagedkv import PAD_SLOT_ID
from tests.tables.models import to_numpy

from .life_blocks import place_of
from .life_model import NULL, STALE


class Pass:
    """One step's pass over its requests, in batch order.

    Attributes
    ----------
    states : dict
        (request, group) -> blocks that the device gave for the states, the drafts' behind the running one.
    """

    def __init__(self, world):
        self.world, self.memory = world, world.memory
        self.holders = world.blocks.holders()
        self.states = {}

    def run(self, metadata, requests):
        """Write the tokens of a step or micro-batch, and read all that they see."""
        starts = to_numpy(metadata.batch.query_start_loc).tolist()
        ends = to_numpy(metadata.batch.seq_lens).tolist()
        spans = [(end - (b - a), end) for a, b, end in zip(starts[:-1], starts[1:], ends, strict=True)]
        for common in metadata:
            if self.world.specs[common.group].state_mode is not None:
                self.go_on_with_states(common, requests, spans)
            else:
                self.write(common, requests, starts[-1])
                self.read(common, requests, spans)

    def write(self, common, requests, num_tokens):
        world, g = self.world, common.group
        size = world.specs[g].block_size
        slots, positions = to_numpy(common.slot_mapping).tolist(), to_numpy(common.positions).tolist()
        token_reqs = to_numpy(common.token_to_req_indices).tolist()
        for slot, position, i in zip(
            slots[:num_tokens], positions[:num_tokens], token_reqs[:num_tokens], strict=True
        ):
            request = requests[i]
            if slot == PAD_SLOT_ID:
                elsewhere = place_of(position, [], world.specs[g], world.context_parallel) is None
                assert elsewhere or position >= world.max_model_len, "a token has no slot"
                continue
            assert request.slots.setdefault((g, position), slot) == slot, "a token has moved"
            self.check_owner(request, g, slot // size)
            self.memory.write(g, slot // size, slot % size, request.tag(position))
        assert all(slot == PAD_SLOT_ID for slot in slots[num_tokens:]), "padding is written"

    def check_owner(self, request, g, block):
        assert block != NULL, "the null block is written"
        assert block in self.world.blocks.live(request)[g], "a block of somebody else is written"
        assert self.holders[block] == 1, "a shared block is written"

    def read(self, common, requests, spans):
        table = to_numpy(common.block_table_tensor).tolist()
        for i, request in enumerate(requests):
            self.read_row(common.group, request, table[i], *spans[i])

    def read_row(self, g, request, ids, start, end):
        """All that tokens from `start` up to `end` see."""
        world = self.world
        spec = world.specs[g]
        first = 0 if spec.sliding_window is None else max(start - spec.sliding_window + 1, 0)
        for position in range(first, min(end, world.max_model_len)):
            place = place_of(position, ids, spec, world.context_parallel)
            if place is not None:
                found = self.memory.read(g, *place)
                assert found == request.tag(position), f"token {position} of {request.name} is lost"

    def go_on_with_states(self, common, requests, spans):
        """Read the state before the step, and write those after its token and after each draft."""
        g, before = common.group, to_numpy(common.initial_state_indices()).tolist()
        written = to_numpy(common.state_indices()).tolist()
        for i, request in enumerate(requests):
            (start, end), num_drafts = spans[i], len(request.drafts)
            if start > 0:
                found = self.memory.read(g, before[i], 0)
                assert found == request.tag(start - 1), f"the state of {request.name} is lost"
            if end == start:
                continue
            for j in range(num_drafts + 1):
                self.check_owner(request, g, written[i][j])
                self.memory.write(g, written[i][j], 0, request.tag(end - num_drafts + j - 1))
            self.states[request, g] = written[i]
        for block in before[len(requests) :] + [block for line in written[len(requests) :] for block in line]:
            assert block == NULL, "a padded row has a state"

    def accept(self, request, num_accepted, rows):
        """Bring the state after the last accepted token where the next step looks for it."""
        for g, spec in enumerate(self.world.specs):
            if (request, g) not in self.states:
                continue
            written = self.states[request, g]
            kept = written[0]
            if spec.state_mode != "none" and self.world.blocks.manager is None:
                kept = rows[g][(request.computed - 1) // spec.block_size]
            self.memory.copy(written[num_accepted], kept)

    def run_dummy(self, metadata):
        """A pass over nobody's tokens writes rubbish wherever the device lets it."""
        for common in metadata:
            g, size = common.group, self.world.specs[common.group].block_size
            for slot in to_numpy(common.slot_mapping).tolist():
                if slot != PAD_SLOT_ID:
                    self.memory.write(g, slot // size, slot % size, STALE)
            if self.world.specs[g].state_mode is not None:
                for block in to_numpy(common.state_indices()).ravel().tolist():
                    if block != NULL:
                        self.memory.write(g, block, 0, STALE)

    def check_resting(self, request):
        """Nobody has written over what a request keeps that is not in the step."""
        for g, (spec, ids) in enumerate(zip(self.world.specs, self.world.blocks.live(request), strict=True)):
            if spec.state_mode is None:
                self.read_row(g, request, ids, request.computed, request.computed)
            elif request.computed > 0:
                column = 0 if spec.state_mode == "none" else (request.computed - 1) // spec.block_size
                found = self.memory.read(g, ids[column], 0)
                assert found == request.tag(request.computed - 1), f"the state of {request.name} is lost"
