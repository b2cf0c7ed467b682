"""The `.cu` kernels as host code: one shared library of all operations, compiled by g++."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

from pagedkv.kernels import HOME, operations

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1")
_ERRORS = {1: "invalid launch shape", 2: "some threads wait at a barrier that others never reach"}


def compile_library(folder, slot_dtype=np.int64, *, sanitize=False, home=HOME):
    """Compile all operations into a library in `folder`; the kernels' lines stay those of their files."""
    files = [home / "common.cuh", *(home / f"{op}.cu" for op in operations())]
    lines = ['#include "cuda_on_host.hpp"', *(f'#include "{path}"' for path in files)]
    for op in operations():
        has_barriers = "__syncthreads" in (home / f"{op}.cu").read_text(encoding="utf-8")
        lines.append(f"ON_HOST({op}, {str(has_barriers).lower()})")
    name = f"kernels_{np.dtype(slot_dtype)}{'_sanitized' if sanitize else ''}"
    unit, library = folder / f"{name}.cpp", folder / f"{name}.so"
    unit.write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = ["-std=c++17", "-g", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{HERE}"]
    flags += ["-Wall", "-Werror", "-Wno-unused-function", "-Wno-unknown-pragmas"]
    flags += SANITIZERS if sanitize else ["-O2"]
    if np.dtype(slot_dtype) == np.int32:
        flags.append("-DSLOT_T=int")
    done = subprocess.run(
        [COMPILER, *flags, str(unit), "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def launch(library, op, grid, num_threads, args, downwards=False):
    """Run a kernel over NumPy arrays in place; ints are passed as int32, arrays by their address."""
    pointers = [
        ctypes.c_void_p(arg.ctypes.data) if isinstance(arg, np.ndarray) else ctypes.c_int32(arg)
        for arg in args
    ]
    table = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(pointer) for pointer in pointers))
    error = getattr(library, f"{op}_on_host")(*grid, num_threads, int(downwards), table)
    if error:
        raise RuntimeError(f"{op} on the host: {_ERRORS[error]}")


def plant(folder, op, old, new):
    """Copy the kernels to `folder` with one text of `op` replaced, to see that a test notices; return it."""
    shutil.copytree(HOME, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (folder / f"{op}.cu").read_text(encoding="utf-8")
    assert old in text
    (folder / f"{op}.cu").write_text(text.replace(old, new), encoding="utf-8")
    return folder
