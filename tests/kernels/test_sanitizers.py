"""The `.cu` files on the host under the address and undefined-behaviour sanitizers."""

import subprocess

import pytest

from .host.compiled import COMPILER
from .subruns import run_alone, run_tests

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ (apt-get install g++)")

ONE_TOKEN = """
import sys
from pathlib import Path
import numpy as np
from tests.kernels.host.compiled import compile_library, launch, plant
from tests.kernels.world import Group, World

home, old, new, start, position = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
library = compile_library(Path(home).parent, sanitize=True, home=plant(Path(home), "slot_mapping", old, new))
world, none = World([Group(4, width=2)], 1), np.zeros(0, np.int32)
header = np.zeros(16, np.int32)
header[[0, 1, 2, 3, 10]] = 1, 1, 1, 1, position >= 0
header[[5, 6, 7, 8, 9, 11, 13]] = -1
inputs = np.array([start, 1], np.int32), np.zeros(1, np.int32), np.full(1, position), none
outputs = np.zeros((1, 1), np.int64), np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(2, np.int32)
args = header, world.geometry, *inputs, np.ones(2, np.int32), world.counts(2), *outputs, -1, 0, 0, 0
launch(library, "slot_mapping", (1, 1), 32, args)
"""


@pytest.fixture(scope="module")
def preload():
    """Environment of a process that loads sanitized code: the sanitizer must come first in it."""
    library = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if "/" not in library:
        pytest.skip("no libasan beside g++ (apt-get install g++)")
    return {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}


def test_cuda_kernels_pass_the_same_tests_under_the_sanitizers(preload):
    """Arrays are allocated at their exact size, so that one element too far is seen."""
    passed, others = run_tests("sanitized", 25, **preload)

    assert passed >= 40
    assert others == ""


@pytest.mark.parametrize(
    ("old", "new", "start", "position", "message"),
    [
        ("p >= 0 && p < limit", "p >= 0 && p < 2 * limit", 0, 8, "heap-buffer-overflow"),
        (
            "((long long)token - start)",
            "(token - start)",
            -(2**31),
            -1,
            "signed integer overflow",
        ),
    ],
    ids=["a read past the row", "a difference in 32 bits"],
)
def test_the_sanitizers_see_a_planted_fault(preload, tmp_path, old, new, start, position, message):
    planted = ["-c", ONE_TOKEN, str(tmp_path / "planted"), old, new, str(start), str(position)]
    sound = ["-c", ONE_TOKEN, str(tmp_path / "sound"), old, old, str(start), str(position)]

    failed, passed = run_alone(planted, **preload), run_alone(sound, **preload)

    assert passed.returncode == 0, passed.stderr
    assert failed.returncode != 0
    assert message in failed.stderr
    assert "slot_mapping.cu:" in failed.stderr
