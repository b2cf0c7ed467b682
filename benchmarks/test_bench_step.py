"""One decode step on a GPU, beside the hand-written form and the floors, chunk by chunk in the same run.

The contenders take turns of a few dozen steps, because the clock of a shared machine wanders: compare the
figures of one test with each other, not with those of another.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.backends import why_unavailable

from .gpu_contenders import ByHand, Floor, Pagedkv, Traffic
from .turns import CHUNK, Clock, Steps, take_turns

pytestmark = pytest.mark.gpu

STEPS = [
    (32, 4096, 1),
    (256, 4096, 1),
    (256, 8192, 1),
    (256, 8192, 4),
    (1024, 8192, 1),
    (1024, 32768, 1),
    (1024, 131072, 1),
    (256, 131072, 1),
    (256, 131072, 4),
    (256, 131072, 8),
]


@pytest.fixture
def cupy():
    if reason := why_unavailable("cupy"):
        pytest.skip(f"backend cupy: {reason}")
    return pytest.importorskip("cupy")


def clock_of(contender, traffic, stream):
    return Clock(contender, Steps(contender, traffic).next, stream)


@pytest.mark.parametrize(("num_reqs", "context", "num_groups"), STEPS)
def test_decode_step(benchmark, cupy, num_reqs, context, num_groups):
    benchmark.group = f"decode/{num_reqs} requests, {context} tokens, {num_groups} groups"
    traffic = Traffic(num_reqs, context, num_groups)
    stream = cupy.cuda.Stream(non_blocking=True)
    contenders = {"cupy": Pagedkv(traffic, stream, "cupy")}
    if why_unavailable("numba") is None:
        contenders["numba"] = Pagedkv(traffic, stream, "numba")
    contenders["cupy, stable rows"] = Pagedkv(traffic, stream, "cupy", stable_rows=True)
    contenders["by hand"] = ByHand(traffic, stream, cupy)
    table = contenders["cupy"].table
    copies, num_bytes = table.num_h2d_copies, table.num_h2d_bytes
    contenders["cupy"].step(traffic.taking(0), traffic.new_ids())
    step_bytes = table.num_h2d_bytes - num_bytes
    contenders["floor: one copy"] = Floor(stream, cupy, step_bytes)
    contenders["floor: empty graph"] = Floor(stream, cupy, 0)
    stream.synchronize()
    clocks = {name: clock_of(contender, traffic, stream) for name, contender in contenders.items()}

    take_turns(clocks, benchmark, "cupy", slow="by hand")

    extra = benchmark.extra_info
    for name in ("cupy", "numba"):  # once more without the others, whose whole rows empty the caches
        if name in contenders:
            alone = clock_of(contenders[name], traffic, stream)
            alone.run(2 if benchmark.disabled else 20 * CHUNK)
            extra[f"{name} alone"] = alone.figures()
    extra["h2d_bytes"], extra["h2d_copies"] = step_bytes, table.num_h2d_copies - copies
    extra["device"] = device_time(cupy, stream, contenders["cupy"], contenders["floor: one copy"])
    assert all(len(clock.host) > 0 for clock in clocks.values())


def test_context_does_not_matter(benchmark, cupy):
    """The same decode step at 4k and at 128k tokens of context, in turns."""
    benchmark.group = "decode/256 requests, 4k against 128k tokens"
    stream = cupy.cuda.Stream(non_blocking=True)
    clocks = {}
    for context in (4096, 131072):
        traffic = Traffic(256, context, 1)
        clocks[f"{context} tokens"] = clock_of(Pagedkv(traffic, stream, "cupy"), traffic, stream)
    stream.synchronize()

    take_turns(clocks, benchmark, "131072 tokens")

    medians = [float(np.median(clock.host)) for clock in clocks.values()]
    benchmark.extra_info["long_over_short"] = round(medians[1] / medians[0], 3)


def device_time(cupy, stream, contender, floor):
    """Microseconds from graph launch to the end on the device, of the step's own graph and of one copy."""
    traffic, backend = contender.traffic, contender.table._committer.backend
    launched = []
    backend.launch = lambda graph, _stream: launched.append(graph)  # the step's own graph, kept to replay
    contender.step(traffic.taking(0), traffic.new_ids())
    del backend.launch
    step_graph = SimpleNamespace(graphExec=launched[0])
    taken = {}
    for name, graph in (("step", step_graph), ("one copy", floor.graph)):
        times = []
        for _ in range(200):
            stream.synchronize()
            began, ended = cupy.cuda.Event(), cupy.cuda.Event()
            began.record(stream)
            cupy.cuda.runtime.graphLaunch(graph.graphExec, stream.ptr)
            ended.record(stream)
            stream.synchronize()
            times.append(1000 * cupy.cuda.get_elapsed_time(began, ended))
        taken[f"{name}_by_events_us"] = round(float(np.median(times)), 2)
        taken[f"{name}_by_host_us"] = round(launch_to_idle(cupy, stream, graph), 2)
    return taken


def launch_to_idle(cupy, stream, graph, rounds=300):
    times = []
    for _ in range(rounds):
        stream.synchronize()
        began = time.perf_counter()
        cupy.cuda.runtime.graphLaunch(graph.graphExec, stream.ptr)
        stream.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    return float(np.median(times))
