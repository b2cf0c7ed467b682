"""The `.cu` files on the host under the address and undefined-behaviour sanitizers."""

import subprocess

import pytest

from .host.compiled import COMPILER
from .subruns import run_alone, run_tests

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ (apt-get install g++)")

ONE_ID = """
import sys
from pathlib import Path
import numpy as np
from tests.kernels.host.compiled import compile_library, launch, plant

home, old, new, block_id = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
library = compile_library(home.parent, sanitize=True, home=plant(home, "expand_blocks", old, new))
ids, kernel_ids = np.array([block_id], np.int32), np.zeros(4, np.int32)
launch(library, "expand_blocks", (1, 1), 32, (ids, kernel_ids, 1, 4, 4))
"""
LOOP = "k < num_kernel_ids"


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
    passed, others = run_tests("sanitized", 12, **preload)

    assert passed >= 40
    assert others == ""


@pytest.mark.parametrize(
    ("condition", "block_id", "message"),
    [
        (LOOP, 2**29 - 1, None),
        ("k <= num_kernel_ids", 1, "heap-buffer-overflow"),
        (LOOP, 2**29, "signed integer overflow"),
    ],
    ids=["sound", "one element too far", "an id that does not fit"],
)
def test_the_sanitizers_see_a_planted_fault(preload, tmp_path, condition, block_id, message):
    done = run_alone(["-c", ONE_ID, str(tmp_path / "kernels"), LOOP, condition, str(block_id)], **preload)

    assert (done.returncode == 0) == (message is None), done.stderr
    if message is not None:
        assert message in done.stderr
        assert "expand_blocks.cu:" in done.stderr
