"""What a captured graph holds, read from the driver."""

from typing import NamedTuple

import pytest


class Node(NamedTuple):
    """One node: "copy" with its ends and bytes, "kernel" with its (mangled) name, or another type."""

    kind: str
    name: str = ""
    source: int = 0
    target: int = 0
    num_bytes: int = 0


def nodes_of(graph):
    """Nodes of a CuPy graph."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    nodes, num = _ask(driver, driver.cuGraphGetNodes, driver.CUgraph(graph.graph), 64)
    return [_node(driver, node) for node in nodes[:num]]


def _node(driver, node):
    types = driver.CUgraphNodeType
    kind = _ask(driver, driver.cuGraphNodeGetType, node)
    if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
        return Node("kernel", _kernel_name(driver, _ask(driver, driver.cuGraphKernelNodeGetParams, node)))
    if kind == types.CU_GRAPH_NODE_TYPE_MEMCPY:
        params = _ask(driver, driver.cuGraphMemcpyNodeGetParams, node)
        num_bytes = params.WidthInBytes * max(params.Height, 1) * max(params.Depth, 1)
        on_host = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        source = int(params.srcHost if params.srcMemoryType == on_host else params.srcDevice)
        target = int(params.dstHost if params.dstMemoryType == on_host else params.dstDevice)
        return Node("copy", "", source, target, num_bytes)
    return Node(types(kind).name)


def _kernel_name(driver, params):
    if int(params.func):
        name = _ask(driver, driver.cuFuncGetName, params.func)
    else:
        name = _ask(driver, driver.cuKernelGetName, params.kern)
    return name.decode() if isinstance(name, bytes) else str(name)


def _ask(driver, call, *arguments):
    error, *answers = call(*arguments)
    assert error == driver.CUresult.CUDA_SUCCESS, f"{call.__name__} failed: {error}"
    return answers[0] if len(answers) == 1 else answers
