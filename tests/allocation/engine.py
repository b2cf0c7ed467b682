"""A serving engine around a manager that keeps the content of every slot, and reads it back.

The content of a slot is the tag of (group, prefix that ends there); that of a state block the tag of the
prefix after which it is the state. A step is as a real one: allocate, (drop some), copy in any order,
write, commit, read back.
"""

import numpy as np

from pagedkv.allocation.extra_keys import ExtraKeys
from pagedkv.allocation.group_specs import CrossAttentionSpec, EncoderOnlyAttentionSpec, MambaSpec
from pagedkv.allocation.manager_state import block_sizes

STALE = -1


def cdiv(a, b):
    return -(-a // b)


def is_aligned(group):
    return isinstance(group, MambaSpec) and group.cache_mode == "align"


class Sequence:
    def __init__(self, handle, tokens, extra_keys, num_encoder_tokens):
        self.handle = handle
        self.tokens = list(tokens)
        self.extra_keys = extra_keys
        self.num_encoder_tokens = num_encoder_tokens
        self.computed = 0
        self.running = False
        self.matched = 0  # what the last lookup found


class Engine:
    def __init__(self, manager, num_blocks):
        self.manager = manager
        self.groups = manager.groups
        self.sizes = [group.block_size for group in self.groups]
        self.alignment = block_sizes(self.groups, 1)[1]
        self.content = np.full((num_blocks, max(self.sizes)), STALE)
        self.tags = {}
        self.live = []
        self.num_copies = 0

    def tag(self, group, sequence, end):
        extra_keys = (sequence.extra_keys or ExtraKeys()).clipped(end)
        key = group, extra_keys, tuple(sequence.tokens[:end])
        return self.tags.setdefault(key, len(self.tags))

    def add(self, tokens, extra_keys=None, num_encoder_tokens=0):
        if not any(isinstance(group, CrossAttentionSpec) for group in self.groups):
            num_encoder_tokens = 0
        handle = self.manager.add(tokens, extra_keys=extra_keys, num_encoder_tokens=num_encoder_tokens)
        self.live.append(Sequence(handle, tokens, extra_keys, num_encoder_tokens))
        return self.live[-1]

    def table(self, g, sequence):
        row = int(self.manager.rows([sequence.handle])[0])
        return self.manager.block_table(g)[row, : self.manager.num_blocks_held(g)[row]].tolist()

    # what must come out, by the definitions

    def longest_hit(self, sequence, limit=None):
        """The longest candidate for which every group has cached what it would still read."""
        hasher = self.manager._state.hasher
        if hasher is None:
            return 0
        keys = hasher.hash_blocks(sequence.tokens, extra_keys=sequence.extra_keys)
        limit = len(sequence.tokens) - 1 if limit is None else limit
        for hit in range(limit // self.alignment * self.alignment, 0, -self.alignment):
            if all(self.cached_blocks(g, keys, hit) is not None for g in range(len(self.groups))):
                return hit
        return 0

    def cached_blocks(self, g, keys, hit):
        """Blocks of group g from the first that it would still read, None if one is missing."""
        if isinstance(self.groups[g], EncoderOnlyAttentionSpec):
            return []
        size, page = self.sizes[g], self.manager._state.hasher.block_size
        first = self.groups[g].num_skipped_tokens(hit) // size
        found = []
        for j in range(first, hit // size):
            last_page = (j + 1) * size // page - 1
            found += self.manager.pool.longest_prefix(keys[last_page : last_page + 1], g).tolist()
        return found if len(found) == hit // size - first else None

    def needed(self, sequence, hit, num_new, lookahead):
        """Blocks that one allocation takes out of the free ones, alone."""
        manager, total = self.manager, 0
        start = sequence.computed if sequence.running else hit
        num_tokens = min(start + num_new, manager.max_model_len)
        num_slots = min(num_tokens + lookahead, manager.max_model_len)
        for g, group in enumerate(self.groups):
            size, held = (
                self.sizes[g],
                len(self.table(g, sequence)) if sequence.running else hit // self.sizes[g],
            )
            match group:
                case EncoderOnlyAttentionSpec():
                    continue
                case CrossAttentionSpec():
                    total += max(cdiv(sequence.num_encoder_tokens, size) - held, 0)
                    continue
                case MambaSpec(cache_mode="none"):
                    total += 0 if sequence.running else 1 + group.num_speculative_blocks
                    continue
                case MambaSpec():
                    total += max(self.num_states_missing(g, sequence, start, num_tokens), 0)
                    continue
            total += max(cdiv(num_slots, size) - held, 0)
            if sequence.running and start // size < held:
                total += not self.manager.pool.is_writable([self.table(g, sequence)[start // size]])[0]
        if hit and not sequence.running:
            keys = manager._state.hasher.hash_blocks(sequence.tokens, extra_keys=sequence.extra_keys)
            hits = [block for g in range(len(self.groups)) for block in self.cached_blocks(g, keys, hit)]
            total += sum(manager.pool.ref_counts[block] == 0 for block in hits)
        return total

    def num_states_missing(self, g, sequence, start, end):
        """Blocks without a state that a step up to `end` takes; fewer than none where it has too many.

        One for each draft, and one for the state that the step leaves, if not in the last one's place.
        """
        columns = cdiv(start, self.sizes[g])
        there = self.table(g, sequence)[columns:] if sequence.running else []
        wanted = self.groups[g].num_speculative_blocks + (end > columns * self.sizes[g])
        return wanted - sum(block != 0 for block in there)

    def num_given_back(self, sequence, num_new):
        """Blocks that an allocation frees, as it is for fewer tokens than the one before."""
        end = min(sequence.computed + num_new, self.manager.max_model_len)
        aligned = [g for g, group in enumerate(self.groups) if is_aligned(group)] if sequence.running else []
        return sum(max(-self.num_states_missing(g, sequence, sequence.computed, end), 0) for g in aligned)

    # a step

    def admit(self, sequence, hit):
        sequence.running, sequence.computed, sequence.matched = True, hit, 0

    def copy(self, random):
        copies = self.manager.take_block_copies().tolist()
        assert not {target for _, target in copies} & {source for source, _ in copies}
        random.shuffle(copies)
        self.num_copies += len(copies)
        for source, target in copies:
            self.content[target] = self.content[source]
        self.manager.copies_done(np.array(copies, np.int32).reshape(-1, 2))

    def write(self, sequence, num_new, num_kept=None):
        """Write `num_new` tokens after the computed ones into blocks that are nobody else's.

        A recurrent state goes on over the first `num_kept` of them alone; the others are rejected drafts.
        """
        start, end = sequence.computed, sequence.computed + num_new
        for g, group in enumerate(self.groups):
            table = self.table(g, sequence)
            match group:
                case EncoderOnlyAttentionSpec():
                    assert table == []
                case CrossAttentionSpec():
                    for block in table if start == 0 else ():
                        self.content[block] = self.tag(g, sequence, 0)
                case MambaSpec():
                    last = (end - 1) // self.sizes[g] if is_aligned(group) else 0
                    kept = end if num_kept is None else start + num_kept
                    self.advance_state(g, sequence, table[last:], kept)
                case _:
                    for position in range(start, end):
                        block = table[position // self.sizes[g]]
                        assert self.manager.pool.is_writable([block])[0]
                        self.content[block, position % self.sizes[g]] = self.tag(g, sequence, position + 1)

    def advance_state(self, g, sequence, written, end):
        """Write the states of a step into the columns from its last token's on: the last of the row."""
        self.check_state(g, sequence, self.table(g, sequence))
        assert len(written) == 1 + self.groups[g].num_speculative_blocks
        assert 0 not in written
        assert self.manager.pool.is_writable(written).all()
        self.content[written[1:]] = STALE  # of drafts
        self.content[written[0]] = self.tag(g, sequence, end)

    def check_state(self, g, sequence, table):
        if sequence.computed > 0:
            column = (sequence.computed - 1) // self.sizes[g] if is_aligned(self.groups[g]) else 0
            assert self.content[table[column], 0] == self.tag(g, sequence, sequence.computed)

    def read_back(self):
        for sequence in self.live:
            if not sequence.running:
                continue
            for g, group in enumerate(self.groups):
                table = self.table(g, sequence)
                match group:
                    case EncoderOnlyAttentionSpec():
                        assert table == []
                    case CrossAttentionSpec():
                        expected = [self.tag(g, sequence, 0)] * (len(table) if sequence.computed else 0)
                        assert self.content[table, 0].tolist()[: len(expected)] == expected
                    case MambaSpec():
                        self.check_state(g, sequence, table)
                    case _:
                        self.read_tokens(g, group, sequence, table)

    def read_tokens(self, g, group, sequence, table):
        size = self.sizes[g]
        first = group.num_skipped_tokens(sequence.computed) // size
        assert table[: min(first, len(table))] == [0] * min(first, len(table))
        assert 0 not in table[first:]
        positions = np.arange(first * size, sequence.computed)
        slots = self.manager.translate([sequence.handle] * len(positions), positions, g)
        found = self.content[slots // size, slots % size].tolist()
        assert found == [self.tag(g, sequence, position + 1) for position in positions.tolist()]
