"""A state machine over row operations and commits, against a dict of lists.

Two tables commit one mirror, each in its own mode (batch-order or stable rows), as its own
context-parallel rank, with its own output sets. The model holds what the mirror should hold
(`rows[group][row]`), what each table has committed, and what each output set last handed out.
"""

import copy
from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv import PAD_SLOT_ID, MultiGroupBlockTable

from .models import (
    assert_unchanged,
    below_window,
    everything,
    expand,
    local_length,
    positions_of,
    requests_of,
    slot_of,
    states_of,
    table_of,
    to_numpy,
)
from .strategies import group_specs, worlds

HUGE = 2**40 + 7

# Hypothesis draws (and shrinks) the steps and a seed each; the details come from the seed, or drawing
# would take most of the time and most rows would be empty.
randoms = st.integers(0, 2**32 - 1).map(Random)


class Committing:
    """One table, and what it should hand out."""

    def __init__(self, table, context_parallel, num_reqs):
        self.table = table
        self.context_parallel = context_parallel
        self.committed = [[[] for _ in range(num_reqs)] for _ in range(table.num_groups)]
        self.order = list(range(num_reqs))  # of the rows in the last steps
        self.handed_out = {}  # output set -> {name: values that must stay until its next step}


class TableMachine(RuleBasedStateMachine):
    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    # --- building ---------------------------------------------------------------------------------

    @initialize(data=st.data())
    def build(self, data):
        interleave = data.draw(st.sampled_from([1, 1, 2, 3]), "interleave")
        self.specs = data.draw(st.lists(group_specs(interleave), min_size=1, max_size=3), "groups")
        self.num_rows = data.draw(st.sampled_from([5, 6, 3, 2, 1]), "rows")
        self.max_len = data.draw(st.sampled_from([60, 37, 24, 8, 1]), "max_model_len")
        self.max_tokens = data.draw(st.sampled_from([80, 33, 8, 1]), "max_num_batched_tokens")
        alignment = data.draw(st.sampled_from([None, 4, 128]), "token_alignment")
        self.rows = [[[] for _ in range(self.num_rows)] for _ in self.specs]
        self.tables = []
        mirror = None
        for context_parallel in data.draw(worlds(interleave), "ranks"):
            table = MultiGroupBlockTable(
                self.specs,
                self.num_rows,
                self.max_len,
                self.max_tokens,
                context_parallel=context_parallel,
                token_alignment=alignment,
                stable_rows=data.draw(st.booleans(), "stable_rows"),
                backend=self.backend,
                mirror=mirror,
                staging_depth=data.draw(st.integers(1, 3), "staging_depth"),
            )
            table.outputs(data.draw(st.integers(1, 3), "output sets"))
            self.tables.append(Committing(table, context_parallel, self.num_rows))
            mirror = table.mirror
        self.mirror = mirror
        for row in range(self.num_rows):
            for group, width in enumerate(mirror.widths):
                self.rows[group][row] = [10 * row + k + 1 for k in range(min(width, 5 + row))]
            self.tables[0].table.add_row([group[row] for group in self.rows], row)

    # --- drawing ----------------------------------------------------------------------------------

    def row(self, random):
        return random.randint(0, self.num_rows - 1)

    def some_rows(self, random):
        return [self.row(random) for _ in range(random.randint(0, 4))]

    def group(self, random):
        return random.randint(0, len(self.specs) - 1)

    def ids(self, random, group, num):
        limit = int(self.mirror.layout[group, 2])
        some = random.randint(0, 30)
        ids = [(some + 7 * k) % 31 for k in range(num)]  # NULL is among them
        if ids and random.randint(0, 5) == 0:
            ids[-1] = limit
        return ids

    def position(self, random):
        some = random.randint(0, self.max_len)
        return random.choice([some, some, some, -1, -2, self.max_len - 1, self.max_len, HUGE, -HUGE])

    def room(self, group, row):
        return self.mirror.widths[group] - len(self.rows[group][row])

    def table_used(self, random):
        return self.tables[random.randint(0, 1)]

    # --- row operations ---------------------------------------------------------------------------

    @rule(random=randoms)
    def change_rows(self, random):
        kinds = [self.write_row, self.write_rows, self.clear, self.move, self.swap, self.null_columns]
        kinds += [self.write_row, self.write_rows, self.truncate, self.set_blocks, self.set_blocks]
        kinds += [self.write_past_the_width]
        if random.randint(0, 15) == 0:
            self.clear_everything(random)
        for _ in range(random.randint(1, 3)):
            random.choice(kinds)(random)

    def write_row(self, random):
        replace, one_group = random.choice([False, True]), random.choice([False, True])
        row, table = self.row(random), self.table_used(random).table
        chosen = [self.group(random)] if one_group else range(len(self.specs))
        lists = []
        for group in range(len(self.specs)):
            most = self.mirror.widths[group] if replace else self.room(group, row)
            num = random.choice([0, 1, random.randint(0, min(most, 12)), most])
            num = min(num, most)
            skipped = group not in chosen or random.randint(0, 4) == 0
            lists.append(None if skipped else self.ids(random, group, num))
        if one_group:
            group, ids = chosen[0], lists[chosen[0]] or []
            lists[group] = ids
            (table[group].add_row if replace else table[group].append_row)(ids, row)
        else:
            (table.add_row if replace else table.append_row)(lists, row)
        for group, ids in enumerate(lists):
            if ids is not None:
                self.rows[group][row] = ids if replace else self.rows[group][row] + ids

    def write_rows(self, random):
        replace = random.choice([False, True])
        rows = self.some_rows(random)
        counts, flat = np.full((len(self.specs), len(rows)), -1, np.int32), []
        for group in range(len(self.specs)):
            for i, row in enumerate(rows):
                most = self.mirror.widths[group] if replace else self.room(group, row)
                num = random.randint(-1, min(most, 5))
                counts[group, i] = num
                if num >= 0:
                    ids = self.ids(random, group, num)
                    flat += ids
                    self.rows[group][row] = ids if replace else self.rows[group][row] + ids
        call = self.tables[0].table.add_rows if replace else self.tables[1].table.append_rows
        ready = random.choice([False, True])
        call(*(map(np.int32, (rows, counts, flat)) if ready else (rows, counts.tolist(), flat)))

    def clear(self, random):
        one_group = random.choice([False, True])
        rows, group = self.some_rows(random), self.group(random)
        table = self.table_used(random).table
        (table[group] if one_group else table).clear_rows(rows)
        for g in [group] if one_group else range(len(self.specs)):
            for row in rows:
                self.rows[g][row] = []

    def clear_everything(self, random):
        table, group = self.table_used(random).table, self.group(random)
        only = random.choice([False, True])
        (table[group] if only else table).clear()
        for g in [group] if only else range(len(self.specs)):
            self.rows[g] = [[] for _ in range(self.num_rows)]

    def move(self, random):
        one_group = random.choice([False, True])
        pairs = [(self.row(random), self.row(random)) for _ in range(random.randint(0, 3))]
        table, group = self.table_used(random).table, self.group(random)
        (table[group] if one_group else table).move_rows([s for s, _ in pairs], [t for _, t in pairs])
        for g in [group] if one_group else range(len(self.specs)):
            for source, target in pairs:
                if source != target:
                    self.rows[g][target], self.rows[g][source] = self.rows[g][source], []

    def swap(self, random):
        one_group = random.choice([False, True])
        a, b, group = self.row(random), self.row(random), self.group(random)
        table = self.table_used(random).table
        (table[group] if one_group else table).swap_row(a, b)
        for g in [group] if one_group else range(len(self.specs)):
            self.rows[g][a], self.rows[g][b] = self.rows[g][b], self.rows[g][a]

    def null_columns(self, random):
        group, rows = self.group(random), self.some_rows(random)
        starts, ends = [], []
        for row in rows:
            count = len(self.rows[group][row])
            start, end = sorted((random.randint(0, count), random.randint(0, count)))
            start *= random.randint(0, 1)
            starts.append(start)
            ends.append(end)
            self.rows[group][row] = (
                self.rows[group][row][:start] + [0] * (end - start) + self.rows[group][row][end:]
            )
        self.tables[0].table.null_columns(rows, starts, ends, group)

    def truncate(self, random):
        group, rows = self.group(random), self.some_rows(random)
        counts = [random.randint(0, self.mirror.widths[group]) for _ in rows]
        self.mirror.truncate_rows(rows, counts, group)
        for row, count in zip(rows, counts, strict=True):
            self.rows[group][row] = self.rows[group][row][:count]

    def set_blocks(self, random):
        group = self.group(random)
        rows = [row for row in self.some_rows(random) if self.rows[group][row]]
        columns = [random.randint(0, len(self.rows[group][row]) - 1) for row in rows]
        ids = self.ids(random, group, len(rows))
        self.mirror.set_blocks(rows, columns, ids, group)
        for row, column, block in zip(rows, columns, ids, strict=True):
            self.rows[group][row] = [*self.rows[group][row]]
            self.rows[group][row][column] = block

    def write_past_the_width(self, random):
        """One id too many in the last group: no group changes."""
        row, last = self.row(random), len(self.specs) - 1
        lists = [[1] if self.room(group, row) else [] for group in range(last)]
        lists.append([1] * (self.room(last, row) + 1))
        before = everything(self.tables[0].table)
        with pytest.raises(ValueError, match="must hold at most"):
            self.tables[0].table.append_row(lists, row)
        assert_unchanged(before, self.tables[0].table)

    # --- commits ----------------------------------------------------------------------------------

    @rule(random=randoms)
    def commit(self, random):
        self.commit_table(self.table_used(random), random)

    @rule(random=randoms)
    def commit_the_first_table(self, random):
        self.commit_table(self.tables[0], random)

    def commit_table(self, used, random):
        table, out = used.table, random.randint(0, len(used.table._committer.outputs) - 1)
        num_reqs = random.choice([0, self.num_rows, random.randint(1, self.num_rows)])
        padded = random.choice([None, random.randint(num_reqs, self.num_rows)])
        lengths = [random.randint(0, 9) for _ in range(num_reqs)]
        starts = np.minimum(np.cumsum([0, *lengths]), self.max_tokens).astype(np.int32)
        num_tokens = int(starts[-1])
        tokens_padded = random.choice([None, random.randint(num_tokens, self.max_tokens)])
        computed = [random.randint(-1, random.choice([0, self.max_len])) for _ in range(num_reqs)]
        rows = None
        if table.stable_rows:
            if random.randint(0, 2) == 0:
                used.order = [random.randint(-1, self.num_rows - 1) for _ in range(self.num_rows)]
            elif random.randint(0, 2) == 0:
                used.order[random.randint(0, self.num_rows - 1)] = random.randint(-1, self.num_rows - 1)
            rows = used.order[:num_reqs]
            rows = np.array(rows, np.int32) if random.choice([False, True]) else rows
        positions = None
        if random.randint(0, 3) == 0:
            positions = [self.position(random) for _ in range(num_tokens)]
        copies = table.num_h2d_copies
        arguments = {
            "rows": rows,
            "num_reqs_padded": padded,
            "num_tokens_padded": tokens_padded,
            "positions": None if positions is None else np.array(positions, np.int64),
            "out": out,
        }
        padded = num_reqs if padded is None else padded
        if not table.stable_rows and any(any(group[num_reqs:padded]) for group in self.rows):
            before = everything(table)
            with pytest.raises(ValueError, match="must be empty, got live row"):
                table.commit(num_reqs, starts, np.array(computed, np.int32), **arguments)
            assert_unchanged(before, table)
            return
        step = table.commit(num_reqs, starts, np.array(computed, np.int32), **arguments)
        assert table.num_h2d_copies == copies + 1
        used.committed = copy.deepcopy(self.rows)
        self.check_committed(used)
        lines = range(num_reqs) if rows is None else rows
        expected = self.expect(used, lines, computed, starts, positions)
        self.check_step(step, expected, padded, tokens_padded)
        self.keep(used, out, expected)

    def expect(self, used, lines, computed, starts, positions):
        """What a step should hand out, without any padding."""
        if positions is None:
            positions = positions_of(starts, computed)
        tables = []
        for group, spec in zip(used.committed, self.specs, strict=True):
            shown = []
            for i, line in enumerate(lines):
                ids = group[line] if line >= 0 else []
                dead = 0
                if used.table.stable_rows:
                    dead = below_window(computed[i], len(ids), spec, used.context_parallel)
                shown.append([0] * dead + ids[dead:])
            tables.append(shown)
        seq_lens = [c + int(n) for c, n in zip(computed, np.diff(starts), strict=True)]
        return {
            "tables": tables,
            "slots": self.slots(used, tables, starts, positions),
            "positions": positions,
            "token_reqs": requests_of(starts),
            "query_start_loc": starts.tolist(),
            "seq_lens": seq_lens,
            "local_seq_lens": [
                [local_length(length, spec, used.context_parallel) for length in seq_lens]
                for spec in self.specs
            ],
            "states": [
                [states_of(spec, *request) for request in zip(shown, computed, seq_lens, strict=True)]
                for spec, shown in zip(self.specs, tables, strict=True)
            ],
        }

    def slots(self, used, tables, starts, positions):
        return [
            [
                slot_of(p, shown[i], spec, used.context_parallel, self.max_len)
                for i, p in zip(requests_of(starts), positions, strict=False)
            ]
            for spec, shown in zip(self.specs, tables, strict=True)
        ]

    def check_committed(self, used):
        """The committed tables equal the mirror over their whole width, and the mirror the model."""
        for g in range(len(self.specs)):
            expected = table_of(used.committed[g], self.mirror.widths[g])
            np.testing.assert_array_equal(expected, used.table[g].get_numpy_array())
            counts = to_numpy(used.table._committer.stored.num_blocks)[g]
            np.testing.assert_array_equal([len(ids) for ids in used.committed[g]], counts)
            actual = to_numpy(used.table[g].get_device_tensor(self.num_rows))
            np.testing.assert_array_equal(expected, actual)
            for view, (ratio, stride) in enumerate(self.specs[g].views()):
                if not used.table.stable_rows:
                    actual = to_numpy(used.table[g].get_kernel_tensor(self.num_rows, view))
                    np.testing.assert_array_equal(expand(expected, ratio, stride), actual)

    def check_step(self, step, expected, padded, tokens_padded):
        num_tokens = len(expected["positions"])
        tokens_padded = num_tokens if tokens_padded is None else tokens_padded
        num_padding = padded - len(expected["seq_lens"])
        assert (padded, tokens_padded) == (step.num_reqs_padded, step.num_tokens_padded)
        for g, spec in enumerate(self.specs):
            shown = expected["tables"][g]
            table = table_of(shown + [[]] * (padded - len(shown)), self.mirror.widths[g])
            np.testing.assert_array_equal(table, to_numpy(step.block_table(g)))
            for view, (ratio, stride) in enumerate(spec.views()):
                kernel_table = to_numpy(step.kernel_block_table(g, view))
                np.testing.assert_array_equal(expand(table, ratio, stride), kernel_table)
            slots = expected["slots"][g] + [PAD_SLOT_ID] * (tokens_padded - num_tokens)
            np.testing.assert_array_equal(slots, to_numpy(step.slot_mapping(g)))
            local = expected["local_seq_lens"][g] + [0] * num_padding
            np.testing.assert_array_equal(local, to_numpy(step.local_seq_lens(g)))
            if spec.state_mode is not None:
                empty = states_of(spec, [], 0, 0)
                states = (step.state_indices(g), step.initial_state_indices(g), step.state_columns(g))
                self.check_states(expected["states"][g] + [empty] * num_padding, states)
        for name, array in (("positions", step.positions), ("token_reqs", step.token_to_req_indices)):
            values = expected[name] + [0] * (tokens_padded - num_tokens)
            np.testing.assert_array_equal(values, to_numpy(array), name)
        starts, lengths = expected["query_start_loc"], expected["seq_lens"]
        np.testing.assert_array_equal(starts + starts[-1:] * num_padding, to_numpy(step.query_start_loc))
        np.testing.assert_array_equal(lengths + [0] * num_padding, to_numpy(step.seq_lens))

    def check_states(self, expected, states):
        written, before, columns = map(to_numpy, states)
        assert [line for line, _, _ in expected] == written.tolist()
        assert [block for _, block, _ in expected] == before.tolist()
        assert [list(line) for _, _, line in expected] == columns.T.tolist()

    def keep(self, used, out, expected):
        kept = dict(expected)
        if not used.table.stable_rows:
            del kept["tables"]  # shared with the other output sets and with the table itself
        used.handed_out[out] = kept

    @rule(random=randoms)
    def commit_rows_alone(self, random):
        used = self.table_used(random)
        copies = used.table.num_h2d_copies
        used.table.commit_block_table(random.choice([None, random.randint(0, self.num_rows)]))
        assert used.table.num_h2d_copies <= copies + 1
        copies = used.table.num_h2d_copies
        used.table.commit_block_table()
        assert copies == used.table.num_h2d_copies, "nothing is dirty: no copy"
        used.committed = copy.deepcopy(self.rows)
        self.check_committed(used)

    @rule(random=randoms)
    def map_slots_alone(self, random):
        """From the committed tables, whatever has happened to the mirror since."""
        used = self.table_used(random)
        num_reqs = random.choice([0, self.num_rows, random.randint(1, self.num_rows)])
        lengths = [random.randint(0, 9) for _ in range(num_reqs)]
        starts = np.minimum(np.cumsum([0, *lengths]), self.max_tokens).astype(np.int32)
        positions = [self.position(random) for _ in range(int(starts[-1]))]
        rows = None
        if random.choice([False, True]):
            rows = [random.randint(-1, self.num_rows - 1) for _ in range(num_reqs)]
        used.table.compute_slot_mapping(num_reqs, starts, np.array(positions, np.int64), rows=rows)
        lines = range(num_reqs) if rows is None else rows
        tables = [[group[line] if line >= 0 else [] for line in lines] for group in used.committed]
        kept = used.handed_out.setdefault(0, {})
        kept["slots"] = self.slots(used, tables, starts, positions)

    # --- always -----------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "mirror"))
    @invariant()
    def mirror_equals_the_model(self):
        for g in range(len(self.specs)):
            expected = table_of(self.rows[g], self.mirror.widths[g])
            np.testing.assert_array_equal(expected, self.mirror.block_table(g))
            np.testing.assert_array_equal([len(ids) for ids in self.rows[g]], self.mirror.num_blocks(g))

    @precondition(lambda self: hasattr(self, "mirror"))
    @invariant()
    def output_sets_hold_what_they_held(self):
        for used in self.tables:
            for out, kept in used.handed_out.items():
                outputs = used.table._committer.outputs[out]
                for g in range(len(self.specs)):
                    slots = kept["slots"][g]
                    whole = slots + [PAD_SLOT_ID] * (self.max_tokens - len(slots))
                    actual = to_numpy(outputs.slot_mapping(g, self.max_tokens))
                    np.testing.assert_array_equal(whole, actual, "PAD past the last token")
                    if "tables" in kept:
                        shown = kept["tables"][g]
                        shown = shown + [[]] * (self.num_rows - len(shown))
                        expected = table_of(shown, self.mirror.widths[g])
                        actual = to_numpy(outputs.shown.block_table(g, self.num_rows))
                        np.testing.assert_array_equal(expected, actual)
                    if "local_seq_lens" in kept:
                        lengths = kept["local_seq_lens"][g]
                        actual = to_numpy(outputs.line("local_seq_lens", g, len(lengths)))
                        np.testing.assert_array_equal(lengths, actual)
                    if "states" in kept and self.specs[g].state_mode is not None:
                        held, num = outputs.states, len(kept["states"][g])
                        states = held.indices(g, num), held.initial_indices(g, num), held.columns(g, num)
                        self.check_states(kept["states"][g], states)
                for name in ("positions", "token_reqs"):
                    if name in kept:
                        whole = kept[name] + [0] * (self.max_tokens - len(kept[name]))
                        actual = to_numpy(outputs.view(name, self.max_tokens))
                        np.testing.assert_array_equal(whole, actual, "0 past the last token")
                for name in ("query_start_loc", "seq_lens"):
                    if name in kept:
                        actual = to_numpy(outputs.view(name, len(kept[name])))
                        np.testing.assert_array_equal(kept[name], actual)
