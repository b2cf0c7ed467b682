"""The host shim sees what it is there for: missing and divergent barriers, impossible launches."""

import numpy as np
import pytest

from pagedkv.kernels import _layout as layout

from .host.compiled import COMPILER, compile_library, launch, plant
from .world import Group, World, staging_buffer

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ (apt-get install g++)")


def gather_two_rows(library, *, downwards=False):
    """Two rows of 40 columns into batch order, by one block of 64 threads; return the batch table."""
    world = World([Group(16, width=40)], 2)
    arena, counts = np.arange(1, 81, dtype=np.int32), world.counts(40)
    words = {"GATHER": np.array([1, 0], np.int32), "NUM_COMPUTED_TOKENS": np.zeros(2, np.int32)}
    staging = staging_buffer({layout.NUM_REQS: 2, layout.NUM_GATHER: 2}, **words)
    batch = world.arena()
    args = (staging, world.geometry, world.views, np.zeros(0, np.int32), arena, counts)
    outputs = batch, world.counts(), world.counts(), np.zeros(0, np.int32)
    launch(library, "gather_rows", (1, 1), 64, (*args, *outputs), downwards)
    return world.table(batch, 0).tolist()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_library(tmp_path_factory.mktemp("sound"))


ROWS = [list(range(41, 81)), list(range(1, 41))]


@pytest.mark.parametrize("downwards", [False, True])
def test_threads_meet_at_barriers_in_either_order(library, downwards):
    assert gather_two_rows(library, downwards=downwards) == ROWS


def test_a_missing_barrier_is_seen(tmp_path):
    home = plant(tmp_path / "kernels", "gather_rows", "__syncthreads();\n        for", "for")
    library = compile_library(tmp_path, home=home)

    assert gather_two_rows(library) != ROWS


def test_a_barrier_that_some_threads_never_reach_is_an_error(tmp_path):
    home = plant(
        tmp_path / "kernels",
        "gather_rows",
        "const int* words",
        "if (threadIdx.x) return;\n    const int* words",
    )

    with pytest.raises(RuntimeError, match="barrier"):
        gather_two_rows(compile_library(tmp_path, home=home))


@pytest.mark.parametrize(("grid", "num_threads"), [((0, 1), 32), ((1, 0), 32), ((1, 1), 0), ((1, 1), 1056)])
def test_an_impossible_launch_is_refused(library, grid, num_threads):
    ids = np.zeros(1, np.int32)

    with pytest.raises(RuntimeError, match="launch shape"):
        launch(library, "expand_blocks", grid, num_threads, (ids, ids.copy(), 1, 1, 1))
