"""The forms in which a kernel can be run, all on NumPy arrays in place, so that one test serves them all.

PAGEDKV_KERNEL_FORMS names the forms of a test run (default: all but the simulator and the sanitized host
code, which need a process of their own and are started by test_simulator.py and test_sanitizers.py).
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from pagedkv.kernels import definition, numba_kernel

from .host.compiled import COMPILER, compile_library, launch

FORMS = os.environ.get("PAGEDKV_KERNEL_FORMS", "numpy host cupy numba").split()
EXAMPLES = int(os.environ.get("PAGEDKV_KERNEL_EXAMPLES", "60"))
"""Draws of a property test: few where a form is slow."""


class NumpyForm:
    def __init__(self, _folder):
        pass

    def run(self, op, args, _shape):
        definition(op)(*args)


class HostForm:
    """The `.cu` files, compiled by g++."""

    sanitize = False

    def __init__(self, folder):
        if COMPILER is None:
            pytest.skip("no g++ (apt-get install g++)")
        self._libraries = {
            dtype: compile_library(Path(folder), dtype, sanitize=self.sanitize)
            for dtype in (np.int64, np.int32)
        }

    def run(self, op, args, shape):
        library = self._libraries[np.int32 if _has_int32_slots(op, args) else np.int64]
        launch(library, op, shape.grid, shape.num_threads, args, shape.downwards)


class SanitizedForm(HostForm):
    sanitize = True


class SimulatorForm:
    """The Numba kernels in Numba's simulator: NUMBA_ENABLE_CUDASIM must be set."""

    def __init__(self, _folder):
        from pagedkv.kernels._numba import is_simulator, load_numba_cuda

        assert is_simulator(load_numba_cuda()), "NUMBA_ENABLE_CUDASIM must be set"

    def run(self, op, args, shape):
        numba_kernel(op)[shape.grid, 32](*args)


class DeviceForm:
    """Kernels on a CUDA device: arrays go there and come back."""

    def __init__(self, _folder):
        if importlib.util.find_spec("cupy") is None:
            pytest.skip("no CUDA device: CuPy is not installed")
        import cupy

        if not cupy.cuda.is_available():
            pytest.skip("no CUDA device")
        self._cupy = cupy
        self._kernels = {dtype: self.kernels()(0, dtype) for dtype in (np.int64, np.int32)}

    def run(self, op, args, shape):
        cupy = self._cupy
        stream = cupy.cuda.Stream(non_blocking=True)
        arrays = {id(a): (a, cupy.asarray(a)) for a in args if isinstance(a, np.ndarray)}
        cupy.cuda.runtime.deviceSynchronize()
        kernels = self._kernels[np.int32 if _has_int32_slots(op, args) else np.int64]
        prepared = tuple(arrays[id(a)][1] if isinstance(a, np.ndarray) else a for a in args)
        kernels.bind(op, prepared)(shape.grid, stream)
        stream.synchronize()
        for host, device in arrays.values():
            host[...] = cupy.asnumpy(device)


class CupyForm(DeviceForm):
    def kernels(self):
        from pagedkv.kernels._cuda import CudaKernels

        return CudaKernels


class NumbaForm(DeviceForm):
    def kernels(self):
        from pagedkv.kernels._numba import NumbaKernels

        return NumbaKernels


BY_NAME = {
    "numpy": NumpyForm,
    "host": HostForm,
    "sanitized": SanitizedForm,
    "simulator": SimulatorForm,
    "cupy": CupyForm,
    "numba": NumbaForm,
}


def _has_int32_slots(op, args):
    return op == "slot_mapping" and args[8].dtype == np.int32
