"""The launchers, with the device played by a stand-in: what they pass on, and what they say on failure."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels import _numba, operations, source
from pagedkv.kernels._grid import BLOCK_THREADS


class FakeCupy(ModuleType):
    """As much of CuPy as CudaKernels touches, and a record of what it was asked."""

    def __init__(self, device=0, failure=None):
        super().__init__("cupy")
        self.compiled, self.launched, self.entered = [], [], []
        runtime = SimpleNamespace(getDevice=lambda: device)
        self.cuda = SimpleNamespace(runtime=runtime, Device=self.enter)
        self.failure = failure

    def enter(self, device_id):
        self.entered.append(device_id)
        return FakeDevice()

    def RawKernel(self, text, name, options):
        if self.failure:
            raise self.failure
        self.compiled.append((text, name, options))
        return SimpleNamespace(kernel=lambda *args, stream: self.launched.append((name, *args, stream)))


class FakeDevice:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


@pytest.fixture
def cuda_kernels(monkeypatch):
    """Return a function that makes CudaKernels over a stand-in for CuPy."""

    def make(cupy, *args):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.delitem(sys.modules, "pagedkv.kernels._cuda", raising=False)
        module = importlib.import_module("pagedkv.kernels._cuda")
        del sys.modules["pagedkv.kernels._cuda"]  # the next importer gets the real one
        return module.CudaKernels(*args)

    return make


class TestCudaKernels:
    def test_a_launch_passes_its_fixed_arguments_on_the_stream(self, cuda_kernels):
        cupy = FakeCupy()
        array = np.zeros(1, np.int32)
        launch = cuda_kernels(cupy).bind("expand_blocks", (array, array, 1, 2, np.int64(3)))

        launch((4, 2), "stream")

        name, grid, block, args, stream = cupy.launched[0]
        assert (name, grid, block, stream) == ("expand_blocks", (4, 2), (BLOCK_THREADS,), "stream")
        assert args[0] is array
        assert [(type(arg), int(arg)) for arg in args[2:]] == [(np.int32, 1), (np.int32, 2), (np.int32, 3)]

    def test_each_kernel_is_compiled_once_from_its_source(self, cuda_kernels):
        cupy = FakeCupy()
        kernels = cuda_kernels(cupy)

        kernels.bind("slot_mapping", ())
        kernels.compile()

        assert sorted(name for _, name, _ in cupy.compiled) == operations()
        assert all(text == source(name) for text, name, _ in cupy.compiled)

    @pytest.mark.parametrize(("dtype", "extra"), [(np.int64, ()), (np.int32, ("-DSLOT_T=int",))])
    def test_the_slot_type_is_a_compile_option(self, cuda_kernels, dtype, extra):
        cupy = FakeCupy()

        cuda_kernels(cupy, 0, dtype).compile()

        assert {options for _, _, options in cupy.compiled} == {("--std=c++17", *extra)}

    @pytest.mark.parametrize(("current", "entered"), [(0, [1, 1]), (1, [])])
    def test_another_device_is_made_current_for_compiling_and_launching(self, cuda_kernels, current, entered):
        cupy = FakeCupy(device=current)

        cuda_kernels(cupy, 1).bind("slot_mapping", ())((1, 1), None)

        assert cupy.entered == entered

    def test_a_missing_compiler_says_what_to_install(self, cuda_kernels):
        cupy = FakeCupy(failure=RuntimeError("CuPy failed to load libnvrtc.so.13"))

        with pytest.raises(BackendUnavailableError, match=r"pip install .*nvidia-cuda-nvrtc"):
            cuda_kernels(cupy).compile()

    def test_a_compile_error_passes_through(self, cuda_kernels):
        cupy = FakeCupy(failure=ValueError("slot_mapping.cu(3): error"))

        with pytest.raises(ValueError, match=r"slot_mapping\.cu\(3\)"):
            cuda_kernels(cupy).compile()


class TestNumba:
    def test_an_import_that_fails_names_versions_and_remedy(self, monkeypatch):
        def fail(name):
            raise AttributeError("module 'numpy' has no attribute 'row_stack'")

        monkeypatch.setattr(_numba, "import_module", fail)

        reason = _numba.why_no_numba()

        assert "row_stack" in reason
        assert f"NumPy {np.__version__}" in reason
        assert "pip install 'pagedkv[cuda13]'" in reason

    def test_the_simulator_is_no_device(self, monkeypatch):
        monkeypatch.setattr(_numba, "import_module", lambda _: SimpleNamespace(implementation="Built-in"))

        assert "NUMBA_ENABLE_CUDASIM" in _numba.why_no_numba()

    def test_a_package_that_is_absent_is_named_so(self):
        assert _numba._version("no-such-package-here") == "not installed"
