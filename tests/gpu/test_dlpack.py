"""Other libraries read the step's arrays where they are: DLPack and `__cuda_array_interface__`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .pairs import Decoding, arrays_of, assert_same

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def test_the_cuda_array_interface_names_the_arrays(gpu_backend, cupy, stream):
    pair = Decoding(gpu_backend)
    expected, step = pair.step(stream)
    stream.synchronize()
    for name, array in arrays_of(step, pair.device).items():
        interface = array.__cuda_array_interface__
        assert interface["data"] == (array.data.ptr, False), name
        assert interface["typestr"] == expected[name].dtype.str, name
        assert interface["shape"] == expected[name].shape, name
        assert interface["strides"] is None, f"{name} is contiguous"
        assert array.data.ptr % 256 == 0, f"{name} starts on 256 bytes, as consumers of DLPack expect"


def test_torch_reads_the_tables_without_a_copy(gpu_backend, cupy, stream, torch):
    pair = Decoding(gpu_backend)
    _, step = pair.step(stream)
    stream.synchronize()
    tensors = {name: torch.from_dlpack(array) for name, array in arrays_of(step, pair.device).items()}
    for name, array in arrays_of(step, pair.device).items():
        assert tensors[name].data_ptr() == array.data.ptr, name
        assert str(tensors[name].dtype) == f"torch.{array.dtype}", name
    for _ in range(3):  # the addresses stay, so the tensors follow every later step
        expected, _ = pair.step(stream)
        stream.synchronize()
        assert_same(expected, {name: tensor.cpu().numpy() for name, tensor in tensors.items()})


READ_BY_JAX = """
import json, os, sys
os.environ["JAX_ENABLE_X64"] = "1"  # without it JAX turns int64 slots into int32, and says nothing
import jax
import numpy as np
from pagedkv import KVCacheGroupSpec, MultiGroupBlockTable
groups = [4, 8, KVCacheGroupSpec(4, state_mode="all"), KVCacheGroupSpec(4, state_mode="all")]
table = MultiGroupBlockTable(groups, 4, 512, 64, backend=sys.argv[1])
for row in range(4):
    table.add_row(([1 + row, 11 + row], [21 + row], [31 + row], [41 + row, 51 + row]), row)
step = table.commit(4, np.arange(5, dtype=np.int32), np.full(4, 5, np.int32))
step.ready.synchronize()
arrays = {
    "table": step.block_table(0),
    "slots": step.slot_mapping(0),
    "lengths": step.seq_lens,
    "requests": step.token_to_req_indices,
    "local lengths": step.local_seq_lens(1),
    "states": step.state_indices(3),
    "initial states": step.initial_state_indices(3),
    "last columns": step.state_columns(3)[2],
}
read = {name: jax.dlpack.from_dlpack(array) for name, array in arrays.items()}
json.dump({
    name: {
        "same address": read[name].unsafe_buffer_pointer() == array.data.ptr,
        "dtype": str(read[name].dtype),
        "values": np.asarray(read[name])[..., :2].tolist(),
    }
    for name, array in arrays.items()
}, sys.stdout)
"""


def run_alone(code, *arguments):
    """Run code in a process of its own: JAX takes memory and flags when it starts."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def jax_on_the_device(cupy):
    """Skips where JAX is not installed or does not see the device."""
    done = run_alone("import jax, sys; sys.exit(jax.default_backend() != 'gpu')")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["its default backend is no GPU"])[-1]
        pytest.skip(f"JAX cannot use the device here: {reason}")


@pytest.mark.usefixtures("jax_on_the_device")
def test_jax_reads_the_tables_without_a_copy(gpu_backend):
    done = run_alone(READ_BY_JAX, gpu_backend)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert read["table"] == {
        "same address": True,
        "dtype": "int32",
        "values": [[r + 1, r + 11] for r in range(4)],
    }
    assert read["slots"]["same address"]
    assert read["slots"]["dtype"] == "int64"
    assert read["slots"]["values"] == [11 * 4 + 1, 12 * 4 + 1]
    of_requests = {
        "lengths": [6, 6],
        "requests": [0, 1],
        "local lengths": [6, 6],
        "states": [[51], [52], [53], [54]],
        "initial states": [51, 52],
        "last columns": [1, 1],
    }
    for name, values in of_requests.items():
        assert read[name] == {"same address": True, "dtype": "int32", "values": values}, name
