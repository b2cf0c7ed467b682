"""A state machine over row operations and commits, against a dict of lists.

Two tables commit one mirror, each in its own mode (batch-order or stable rows), as its own
context-parallel rank, with its own output sets. The model holds what the mirror should hold
(`rows[group][row]`), what each table has committed, and what each output set last handed out.
"""

import copy

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
    positions_of,
    requests_of,
    slot_of,
    table_of,
    to_numpy,
)
from .strategies import group_specs, worlds

HUGE = 2**40 + 7


class Committing:
    """One table, and what it should hand out."""

    def __init__(self, table, context_parallel, num_reqs):
        self.table = table
        self.context_parallel = context_parallel
        self.committed = [[[] for _ in range(num_reqs)] for _ in range(table.num_groups)]
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
        self.num_rows = data.draw(st.integers(1, 6), "rows")
        self.max_len = data.draw(st.integers(1, 60), "max_model_len")
        self.max_tokens = data.draw(st.integers(1, 80), "max_num_batched_tokens")
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

    # --- drawing ----------------------------------------------------------------------------------

    def row(self, data):
        return data.draw(st.integers(0, self.num_rows - 1), "row")

    def some_rows(self, data):
        return data.draw(st.lists(st.integers(0, self.num_rows - 1), max_size=4), "rows")

    def group(self, data):
        return data.draw(st.integers(0, len(self.specs) - 1), "group")

    def ids(self, data, group, num):
        limit = int(self.mirror.layout[group, 2])
        some = data.draw(st.integers(0, 30), "first id")
        ids = [(some + 7 * k) % 31 for k in range(num)]  # NULL among them now and then
        if ids and data.draw(st.integers(0, 5), "with the largest id") == 0:
            ids[-1] = limit
        return ids

    def room(self, group, row):
        return self.mirror.widths[group] - len(self.rows[group][row])

    def table_used(self, data):
        return self.tables[data.draw(st.integers(0, 1), "table")]

    # --- row operations ---------------------------------------------------------------------------

    @rule(data=st.data(), replace=st.booleans(), one_group=st.booleans())
    def write_row(self, data, replace, one_group):
        row, table = self.row(data), self.table_used(data).table
        chosen = [self.group(data)] if one_group else range(len(self.specs))
        lists = []
        for group in range(len(self.specs)):
            most = self.mirror.widths[group] if replace else self.room(group, row)
            num = data.draw(st.integers(0, min(most, 12)) | st.just(most), "blocks")
            skipped = group not in chosen or data.draw(st.integers(0, 4), "skipped") == 0
            lists.append(None if skipped else self.ids(data, group, num))
        if one_group:
            group, ids = chosen[0], lists[chosen[0]] or []
            lists[group] = ids
            (table[group].add_row if replace else table[group].append_row)(ids, row)
        else:
            (table.add_row if replace else table.append_row)(lists, row)
        for group, ids in enumerate(lists):
            if ids is not None:
                self.rows[group][row] = ids if replace else self.rows[group][row] + ids

    @rule(data=st.data(), replace=st.booleans())
    def write_rows(self, data, replace):
        rows = self.some_rows(data)
        counts, flat = np.full((len(self.specs), len(rows)), -1, np.int32), []
        for group in range(len(self.specs)):
            for i, row in enumerate(rows):
                most = self.mirror.widths[group] if replace else self.room(group, row)
                num = data.draw(st.integers(-1, min(most, 5)), "blocks")
                counts[group, i] = num
                if num >= 0:
                    ids = self.ids(data, group, num)
                    flat += ids
                    self.rows[group][row] = ids if replace else self.rows[group][row] + ids
        call = self.tables[0].table.add_rows if replace else self.tables[1].table.append_rows
        ready = data.draw(st.booleans(), "ready arrays")
        call(*(map(np.int32, (rows, counts, flat)) if ready else (rows, counts.tolist(), flat)))

    @rule(data=st.data(), one_group=st.booleans())
    def clear(self, data, one_group):
        rows, group = self.some_rows(data), self.group(data)
        table = self.table_used(data).table
        (table[group] if one_group else table).clear_rows(rows)
        for g in [group] if one_group else range(len(self.specs)):
            for row in rows:
                self.rows[g][row] = []

    @rule(data=st.data())
    def clear_everything(self, data):
        table, group = self.table_used(data).table, self.group(data)
        only = data.draw(st.booleans(), "one group")
        (table[group] if only else table).clear()
        for g in [group] if only else range(len(self.specs)):
            self.rows[g] = [[] for _ in range(self.num_rows)]

    @rule(data=st.data(), one_group=st.booleans())
    def move(self, data, one_group):
        pairs = data.draw(st.lists(st.tuples(*[st.integers(0, self.num_rows - 1)] * 2), max_size=3), "pairs")
        table, group = self.table_used(data).table, self.group(data)
        (table[group] if one_group else table).move_rows([s for s, _ in pairs], [t for _, t in pairs])
        for g in [group] if one_group else range(len(self.specs)):
            for source, target in pairs:
                if source != target:
                    self.rows[g][target], self.rows[g][source] = self.rows[g][source], []

    @rule(data=st.data(), one_group=st.booleans())
    def swap(self, data, one_group):
        a, b, group = self.row(data), self.row(data), self.group(data)
        table = self.table_used(data).table
        (table[group] if one_group else table).swap_row(a, b)
        for g in [group] if one_group else range(len(self.specs)):
            self.rows[g][a], self.rows[g][b] = self.rows[g][b], self.rows[g][a]

    @rule(data=st.data())
    def null_columns(self, data):
        group, rows = self.group(data), self.some_rows(data)
        starts, ends = [], []
        for row in rows:
            count = len(self.rows[group][row])
            start, end = sorted(data.draw(st.tuples(*[st.integers(0, count)] * 2), "columns"))
            start *= data.draw(st.integers(0, 1), "from the middle")
            starts.append(start)
            ends.append(end)
            self.rows[group][row] = (
                self.rows[group][row][:start] + [0] * (end - start) + self.rows[group][row][end:]
            )
        self.tables[0].table.null_columns(rows, starts, ends, group)

    @rule(data=st.data())
    def truncate(self, data):
        group, rows = self.group(data), self.some_rows(data)
        counts = [data.draw(st.integers(0, self.mirror.widths[group]), "count") for _ in rows]
        self.mirror.truncate_rows(rows, counts, group)
        for row, count in zip(rows, counts, strict=True):
            self.rows[group][row] = self.rows[group][row][:count]

    @rule(data=st.data())
    def set_blocks(self, data):
        group = self.group(data)
        rows = [row for row in self.some_rows(data) if self.rows[group][row]]
        columns = [data.draw(st.integers(0, len(self.rows[group][row]) - 1), "column") for row in rows]
        ids = self.ids(data, group, len(rows))
        self.mirror.set_blocks(rows, columns, ids, group)
        for row, column, block in zip(rows, columns, ids, strict=True):
            self.rows[group][row] = [*self.rows[group][row]]
            self.rows[group][row][column] = block

    @rule(data=st.data())
    def write_past_the_width(self, data):
        """One id too many in the last group: no group changes."""
        row, last = self.row(data), len(self.specs) - 1
        lists = [[1] if self.room(group, row) else [] for group in range(last)]
        lists.append([1] * (self.room(last, row) + 1))
        before = everything(self.tables[0].table)
        with pytest.raises(ValueError, match="must hold at most"):
            self.tables[0].table.append_row(lists, row)
        assert_unchanged(before, self.tables[0].table)

    # --- commits ----------------------------------------------------------------------------------

    @rule(data=st.data())
    def commit(self, data):
        used = self.table_used(data)
        table, out = used.table, data.draw(st.integers(0, len(used.table._committer.outputs) - 1), "out")
        num_reqs = data.draw(st.integers(0, self.num_rows), "num_reqs")
        padded = data.draw(st.none() | st.integers(num_reqs, self.num_rows), "num_reqs_padded")
        lengths = data.draw(st.lists(st.integers(0, 9), min_size=num_reqs, max_size=num_reqs), "lengths")
        starts = np.minimum(np.cumsum([0, *lengths]), self.max_tokens).astype(np.int32)
        num_tokens = int(starts[-1])
        tokens_padded = data.draw(st.none() | st.integers(num_tokens, self.max_tokens), "num_tokens_padded")
        computed = [data.draw(st.integers(-1, self.max_len), "computed") for _ in range(num_reqs)]
        rows = None
        if table.stable_rows:
            rows = [data.draw(st.integers(-1, self.num_rows - 1), "row") for _ in range(num_reqs)]
            rows = np.array(rows, np.int32) if data.draw(st.booleans(), "ready rows") else rows
        positions = None
        if data.draw(st.integers(0, 3), "positions given") == 0:
            where = st.integers(-2, self.max_len + 2) | st.sampled_from([HUGE, -HUGE])
            positions = [data.draw(where, "position") for _ in range(num_tokens)]
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
        return {
            "tables": tables,
            "slots": self.slots(used, tables, starts, positions),
            "positions": positions,
            "query_start_loc": starts.tolist(),
            "seq_lens": [c + int(n) for c, n in zip(computed, np.diff(starts), strict=True)],
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
            actual = to_numpy(used.table[g].get_device_tensor(self.num_rows))
            np.testing.assert_array_equal(expected, actual)
            for view, (ratio, stride) in enumerate(self.specs[g].views()):
                if not used.table.stable_rows:
                    actual = to_numpy(used.table[g].get_kernel_tensor(self.num_rows, view))
                    np.testing.assert_array_equal(expand(expected, ratio, stride), actual)

    def check_step(self, step, expected, padded, tokens_padded):
        num_tokens = len(expected["positions"])
        tokens_padded = num_tokens if tokens_padded is None else tokens_padded
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
        positions = expected["positions"] + [0] * (tokens_padded - num_tokens)
        starts, lengths = expected["query_start_loc"], expected["seq_lens"]
        np.testing.assert_array_equal(positions, to_numpy(step.positions))
        num_padding = padded - len(lengths)
        np.testing.assert_array_equal(starts + starts[-1:] * num_padding, to_numpy(step.query_start_loc))
        np.testing.assert_array_equal(lengths + [0] * num_padding, to_numpy(step.seq_lens))

    def keep(self, used, out, expected):
        kept = dict(expected)
        if not used.table.stable_rows:
            del kept["tables"]  # shared with the other output sets and with the table itself
        used.handed_out[out] = kept

    @rule(data=st.data())
    def commit_rows_alone(self, data):
        used = self.table_used(data)
        copies = used.table.num_h2d_copies
        used.table.commit_block_table(data.draw(st.none() | st.integers(0, self.num_rows), "num_reqs"))
        assert used.table.num_h2d_copies <= copies + 1
        copies = used.table.num_h2d_copies
        used.table.commit_block_table()
        assert copies == used.table.num_h2d_copies, "nothing is dirty: no copy"
        used.committed = copy.deepcopy(self.rows)
        self.check_committed(used)

    @rule(data=st.data())
    def map_slots_alone(self, data):
        """From the committed tables, whatever has happened to the mirror since."""
        used = self.table_used(data)
        num_reqs = data.draw(st.integers(0, self.num_rows), "num_reqs")
        lengths = data.draw(st.lists(st.integers(0, 9), min_size=num_reqs, max_size=num_reqs), "lengths")
        starts = np.minimum(np.cumsum([0, *lengths]), self.max_tokens).astype(np.int32)
        where = st.integers(-2, self.max_len + 2) | st.sampled_from([HUGE, -HUGE])
        positions = [data.draw(where, "position") for _ in range(int(starts[-1]))]
        rows = None
        if data.draw(st.booleans(), "rows given"):
            rows = [data.draw(st.integers(-1, self.num_rows - 1), "row") for _ in range(num_reqs)]
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
                for name in ("positions", "query_start_loc", "seq_lens"):
                    if name in kept:
                        actual = to_numpy(outputs.view(name, len(kept[name])))
                        np.testing.assert_array_equal(kept[name], actual)
