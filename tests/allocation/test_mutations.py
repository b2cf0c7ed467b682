"""The tests bite: seeded faults in a copy of the package make the manager's long lives fail.

The copy runs without the compiler, so that each fault costs a second and not a compilation.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import test_manager_machine as machine

ROOT = Path(__file__).resolve().parents[2]
ALLOCATION = Path("pagedkv", "allocation")
LIVES = """
import warnings
warnings.simplefilter("ignore")  # the compiler's wrap-around is a warning here
from tests.allocation import test_manager, test_manager_machine as machine
machine.ALGORITHMS = ("siphash",)
test_manager.test_a_hit_that_went_between_lookup_and_allocation_is_not_taken()
for seed in range({seeds}):
    for choice in machine.CHOICES{chosen}:
        print(machine.digest(machine.soak(choice, seed, num_actions=40)))
"""

PUBLISH_EARLY = """
        lines = self._state.arrays.sequences
        at, settled = handles[:done] & 0xFFFFFFFF, computed[:done].copy()
        early = (settled + counts[:done]).clip(max=lines[at, s.NUM_TOKENS]).astype("int32")
        settling.commit(self._state.compiled_state(), handles[:done], early, self._defers)
        lines[at, s.NUM_COMPUTED] = settled
        self._fetch_events()
        return Allocation("""

SOAKS = {
    "a state is published that no step ended with": (100, "[10:12]"),
    "a state that goes on in place keeps a second block": (100, "[10:12]"),
}
"""How many seeds of which groups it takes, where that is not the usual 12 of all."""

MUTATIONS = {
    "publish at schedule time": [
        ("manager_blocks.py", "        self._fetch_events()\n        return Allocation(", PUBLISH_EARLY[1:]),
    ],
    "copies are not pinned": [
        ("admission.py", "    pool.records[block, PINS] += 1\n", "    pool.records[block, REFS] -= 1\n"),
        (
            "admission.py",
            "pool.records[m.copies[k, 0], PINS] -= 1",
            "pool.records[m.copies[k, 0], REFS] += 1",
        ),
        ("row_writing.py", "    pool.records[target, PINS] += 1\n    pool.records[target, REFS] += 1\n", ""),
        (
            "manager_steps.py",
            "        if (times > pinned).any():\n",
            "        if True:\n            return\n        if False:\n",
        ),
    ],
    "the tail is freed last": [
        ("giving_back.py", "range(held - 1, keep - 1, -1)", "range(keep, held)"),
    ],
    "a hit does not count against the free blocks": [
        ("admission.py", "num_free += pool.records[block, REFS] == 0", "num_free += 0"),
    ],
    "shared blocks are written": [
        ("admission.py", "if block == 0 or (owners == 1", "if block == 0 or (owners >= 1"),
    ],
    "a window frees a block too many": [
        ("settling.py", "end = min(first_needed_block(", "end = min(1 + first_needed_block("),
    ],
    "a deleted key leaves a gap in the index": [
        ("prefix_index.py", "        _close_gap(keys, index, at)\n", "        index[at] = 0\n"),
    ],
    "a lookup is not repeated at allocation": [
        ("admission.py", "start = longest_hit(", "start = line[s.MATCHED] if True else longest_hit("),
    ],
    "rejected drafts stay hashed": [
        ("giving_back.py", "line[s.NUM_HASHED] = min(", "line[s.NUM_HASHED] = max("),
    ],
    "a state is published that no step ended with": [
        ("settling.py", "line[s.NUM_COMPUTED] != end * size or running != end", "running < 0"),
    ],
    "lookahead moves a state": [
        ("group_rules.py", "(num_tokens + size - 1) // size + rows", "(num_slots + size - 1) // size + rows"),
        (
            "placement.py",
            "place_states(mirror, m, line, g, num_tokens,",
            "place_states(mirror, m, line, g, num_slots,",
        ),
    ],
    "a state is not moved back": [
        ("state_columns.py", "    if required == held:\n", "    if required <= held:\n"),
    ],
    "a state is not looked for where fewer tokens are allocated for": [
        ("placement.py", "states != 0 and num_tokens < before[i]", "False"),
    ],
    "a state that goes on in place keeps a second block": [
        ("state_columns.py", "if num > required - target:", "if False:"),
    ],
}


def live(folder, *, seeds, chosen=""):
    environment = os.environ | {
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", LIVES.format(seeds=seeds, chosen=chosen)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def copy(tmp_path):
    for name in ("pagedkv", "kernels", "tests"):
        if not (ROOT / name).is_dir():
            pytest.skip(f"needs the source tree: {name}/ is not beside the tests")
        skipped = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc", ".hypothesis")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    return tmp_path


def test_compiled_and_plain_python_lead_the_same_lives(copy, monkeypatch):
    """Without a fault the lives go well, and what the compiler makes of the loops ends where they do."""
    monkeypatch.setattr(machine, "ALGORITHMS", ("siphash",))
    compiled = [machine.digest(machine.soak(choice, 0, num_actions=40)) for choice in machine.CHOICES]

    result = live(copy, seeds=1)

    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == compiled


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_seeded_fault_is_found(copy, fault):
    for name, before, after in MUTATIONS[fault]:
        path = copy / ALLOCATION / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} has no single {before!r} any more: mend this mutation"
        path.write_text(text.replace(before, after), encoding="utf-8")

    seeds, chosen = SOAKS.get(fault, (12, ""))
    result = live(copy, seeds=seeds, chosen=chosen)

    assert result.returncode != 0
    assert "AssertionError" in result.stderr or "Error" in result.stderr
    assert "SyntaxError" not in result.stderr
    assert "ImportError" not in result.stderr
