"""The launchers, with the device played by a stand-in: what they pass on, and what they say on failure."""

import importlib
import sys
import warnings
import weakref
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


class FakeArray:
    __cuda_array_interface__ = "interface"


class FakeKernel:
    """A Numba kernel that records what it is compiled for and launched with."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def typeof_pyval(self, value):
        return type(value).__name__

    def compile(self, types):
        self.compiled.append(types)
        return SimpleNamespace(bind=lambda: None)

    def __getitem__(self, configuration):
        warnings.warn("a small grid", stacklevel=1)
        return lambda *args: self.launched.append((configuration, args))


@pytest.fixture
def numba_kernels(monkeypatch):
    """NumbaKernels over stand-ins, and the kernel and the wrappers that they make."""
    kernel, wrapped = FakeKernel(), []

    def wrap(interface, *, sync):
        assert not sync
        wrapped.append(interface)
        return f"wrapper {len(wrapped)}"

    cuda = SimpleNamespace(gpus=[FakeDevice()], from_cuda_array_interface=wrap)
    cuda.external_stream = lambda pointer: f"stream {pointer}"
    monkeypatch.setattr(_numba, "load_numba_cuda", lambda: cuda)
    monkeypatch.setattr(_numba, "numba_kernel", lambda _: kernel)
    return _numba.NumbaKernels(), kernel, wrapped


class TestNumbaKernels:
    def test_a_launch_passes_wrapped_arrays_and_int32_on_the_callers_stream(self, numba_kernels):
        kernels, kernel, _ = numba_kernels
        launch = kernels.bind("expand_blocks", (FakeArray(), 7))

        launch((4, 2), SimpleNamespace(ptr=11))  # and the warning of a small grid is not passed on

        ((grid, block, stream), args), *others = kernel.launched
        assert (grid, block, stream) == ((4, 2), BLOCK_THREADS, "stream 11")
        assert [(type(arg), arg) for arg in args] == [(str, "wrapper 1"), (np.int32, 7)]
        assert not others

    def test_an_array_is_wrapped_once_and_a_signature_compiled_once(self, numba_kernels):
        kernels, kernel, wrapped = numba_kernels
        array = FakeArray()

        for scalar in (1, 2, 3):
            kernels.bind("expand_blocks", (array, scalar))

        assert len(wrapped) == 1
        assert kernel.compiled == [("str", "int32")]

    def test_a_launch_keeps_its_arrays_and_nothing_else_does(self, numba_kernels):
        kernels, _, _ = numba_kernels
        array = FakeArray()
        alive = weakref.ref(array)
        launch = kernels.bind("expand_blocks", (array, 1))

        del array
        assert alive() is not None
        del launch
        assert alive() is None
        assert kernels._wrapped == {}

    def test_a_kernel_that_cannot_be_compiled_says_so(self, numba_kernels):
        kernels, kernel, _ = numba_kernels
        kernel.compile = lambda _: 1 / 0

        with pytest.raises(
            BackendUnavailableError, match=r"cannot compile expand_blocks: ZeroDivisionError.*pip"
        ):
            kernels.bind("expand_blocks", (1,))


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
