"""The tests of the kernels once more in a process of its own, in which one form alone is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FILES = (
    "test_apply_writes.py",
    "test_expand_blocks.py",
    "test_gather_rows.py",
    "test_grid.py",
    "test_slot_mapping.py",
    "test_split_batch.py",
    "test_state_indices.py",
    "test_step_arrays.py",
)
_SETTINGS = ("PAGEDKV_", "NUMBA_", "PYTEST_", "COVERAGE_")


def run_alone(command, **env):
    """Run a Python command from the repository's root, free of our settings and those of Numba and pytest."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=kept | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_tests(form, examples, **env):
    """Run the kernels' tests in one form; return (number of passed tests, the rest of the summary)."""
    files = [str(FOLDER / name) for name in FILES]
    settings = {"PAGEDKV_KERNEL_FORMS": form, "PAGEDKV_KERNEL_EXAMPLES": str(examples)}
    done = run_alone(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files], **settings, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, rest = re.search(r"(\d+) passed(.*) in ", done.stdout).groups()
    return int(passed), rest
