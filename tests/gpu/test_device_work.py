"""What one step asks of the device, counted outside the library: graph nodes, and a profiler's trace."""

import json
import warnings

import pytest

from pagedkv.kernels import operations

from .graph_nodes import nodes_of
from .steady import KINDS, Steady

pytestmark = pytest.mark.gpu

GROUPS = pytest.mark.parametrize("num_groups", [1, 2, 8])
KIND = pytest.mark.parametrize("kind", KINDS)
NUM_STEPS = 6


def launches_of(steady, monkeypatch):
    """Record everything that a table set asks of the runtime."""
    backend, asked = steady.table._committer.backend, []
    for name in ("launch", "copy"):
        original = getattr(backend, name)

        def record(*arguments, _name=name, _original=original):
            asked.append((_name, *arguments))
            return _original(*arguments)

        monkeypatch.setattr(backend, name, record)
    return asked


@GROUPS
@KIND
def test_a_step_is_one_graph_of_one_copy_and_the_counted_kernels(
    gpu_backend, kind, num_groups, stream, monkeypatch
):
    steady = Steady(gpu_backend, kind, num_groups, stream)
    committer = steady.table._committer
    asked = launches_of(steady, monkeypatch)
    for _ in range(NUM_STEPS):
        asked.clear()
        buffer, bytes_before = committer.ring.buffer, steady.table.num_h2d_bytes
        steady.step()
        assert [name for name, *_ in asked] == ["launch"]
        launched = [graph for graph in buffer.graphs.values() if graph.graphExec == asked[0][1]]
        nodes = nodes_of(launched[0])
        copies = [node for node in nodes if node.kind == "copy"]
        kernels = [node.name for node in nodes if node.kind == "kernel"]
        assert len(copies) == 1, nodes
        assert (buffer.address, committer.staging.words.data.ptr) == (copies[0].source, copies[0].target)
        assert copies[0].num_bytes == steady.table.num_h2d_bytes - bytes_before, "our own count is true"
        assert sorted(names(kernels)) == KINDS[kind]
        assert len(nodes) == 1 + len(kernels), nodes


def test_nothing_dirty_asks_nothing_of_the_device(gpu_backend, stream, monkeypatch):
    steady = Steady(gpu_backend, "nothing new", 2, stream)
    asked = launches_of(steady, monkeypatch)
    monkeypatch.setattr(steady.table._committer.kernels, "apply_writes", asked.append)
    steady.table.commit_block_table(stream=stream)
    steady.table[1].commit_block_table(4, stream=stream)
    assert asked == []


@GROUPS
@KIND
def test_a_profiler_sees_one_copy_and_the_counted_kernels(
    gpu_backend, kind, num_groups, stream, torch, tmp_path
):
    steady = Steady(gpu_backend, kind, num_groups, stream)

    def work():
        for _ in range(NUM_STEPS):
            steady.step()
            steady.table.commit_block_table(stream=stream)  # nothing is dirty: it adds nothing

    copies, kernels = trace(torch, tmp_path / "trace.json", stream, work)
    assert [name.split(" (")[0] for name in copies] == ["Memcpy HtoD"] * NUM_STEPS
    assert sorted(names(kernels)) == sorted(KINDS[kind] * NUM_STEPS)


def trace(torch, path, stream, work):
    """Names of the (copies and memsets, kernels) that torch's profiler saw of `work`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            marker = torch.ones(3, device="cuda") + 1
            torch.cuda.synchronize()
            work()
            stream.synchronize()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
    del marker
    events = json.loads(path.read_text())["traceEvents"]
    found = {category: [] for category in ("kernel", "gpu_memcpy", "gpu_memset")}
    for event in sorted((e for e in events if e.get("cat") in found), key=lambda e: float(e["ts"])):
        found[event["cat"]].append(event["name"])
    kernels = [name for name in found["kernel"] if "at::native" not in name]
    if len(kernels) == len(found["kernel"]):
        pytest.skip("torch's profiler records no kernels on this machine (CUPTI is not available)")
    return found["gpu_memcpy"] + found["gpu_memset"], kernels


def names(kernels):
    """Operations of (mangled) kernel names, in order; the name itself where there is none."""
    return [next((op for op in operations() if op in name), name) for name in kernels]
