"""Every Numba kernel compiles to PTX for every architecture, without a GPU or a driver.

In a process of its own: Numba decides once per process between the compiler and the simulator.
"""

import importlib.util
import json

import pytest

from pagedkv.kernels import operations
from tests.processes import run_python

from .subruns import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="no numba-cuda (pip install 'numba-cuda[cu13]')"
)

COMPILE = """
import json
from pagedkv.kernels._numba import load_numba_cuda
cuda = load_numba_cuda()
from pagedkv.kernels import definition, numba_kernel, operations
from pagedkv.kernels._spec import spec_of

def type_of(arg, slot):
    element = getattr(cuda.types, slot if arg.dtype == "slot" else arg.dtype)
    return cuda.types.Array(element, len(arg.shape), "C") if arg.shape else element

def ptx(op, capability, slot):
    types = tuple(type_of(arg, slot) for arg in spec_of(definition(op)).values())
    text, _ = cuda.compile_ptx(numba_kernel(op).py_func, types, cc=capability)
    return text
"""


@pytest.fixture(scope="module")
def compiled():
    """What one process compiles: the .target line by operation and architecture, and the 32-bit stores."""
    code = (
        COMPILE
        + """
capabilities = ((8, 0), (9, 0), (10, 0), (12, 0))
texts = {f"{op} 9.0": ptx(op, (9, 0), "int64") for op in operations()}
texts |= {f"gather_rows {a}.{b}": ptx("gather_rows", (a, b), "int64") for a, b in capabilities}
targets = {name: text.split(".target ")[1].split()[0] for name, text in texts.items()}
stores = {s: ptx("slot_mapping", (9, 0), s).count("st.global.u64") for s in ("int64", "int32")}
print(json.dumps([targets, stores]))
"""
    )
    return json.loads(run_python(code, ROOT).splitlines()[-1])


def test_every_kernel_compiles(compiled):
    targets, _ = compiled

    assert {targets[f"{op} 9.0"] for op in operations()} == {"sm_90"}


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_barriers_and_shared_memory_compile_for_every_architecture(compiled, architecture):
    targets, _ = compiled

    assert targets[f"gather_rows {architecture // 10}.0"] == f"sm_{architecture}"


def test_int32_slots_store_32_bits(compiled):
    _, stores = compiled

    assert stores["int32"] == stores["int64"] - 1


def test_kernels_compile_where_numpy_has_no_row_stack():
    """As NumPy 2.5 is: the name comes back for one import only."""
    code = (
        """
import numpy
vars(numpy).pop("row_stack", None)
assert not hasattr(numpy, "row_stack")
"""
        + COMPILE
        + """
assert not hasattr(numpy, "row_stack")
print(ptx("expand_blocks", (9, 0), "int64").count(".target sm_90"))
"""
    )

    assert run_python(code, ROOT).split()[-1] == "1"
