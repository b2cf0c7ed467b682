"""Numba CUDA kernels on the same CuPy arrays: each array wrapped once, each stream once."""

import warnings
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels import definition, numba_kernel, operations
from pagedkv.kernels._grid import BLOCK_THREADS
from pagedkv.kernels._spec import Arg, spec_of

__all__ = ["NumbaKernels", "load_numba_cuda", "why_no_numba"]


def load_numba_cuda() -> Any:
    """Import and return `numba.cuda`, able to compile.

    numba-cuda 0.30.4, the last release, names ``np.row_stack`` once, when its array functions are first
    imported; NumPy 2.5 has taken that name away. It is put back for just that import.

    Raises
    ------
    BackendUnavailableError
        numba.cuda cannot be imported.
    """
    try:
        cuda = _import_quietly("numba.cuda")
        is_external = getattr(cuda, "implementation", "Built-in") != "Built-in"
        if is_external and not is_simulator(cuda) and not hasattr(np, "row_stack"):
            np.row_stack = np.vstack  # noqa: NPY201
            try:
                _import_quietly("numba.cuda.np.arrayobj")
            finally:
                del np.row_stack  # noqa: NPY201
    except Exception as error:
        raise BackendUnavailableError(_remedy(error)) from error
    return cuda


def _import_quietly(name: str) -> Any:
    """Import a module of Numba, whose deprecation warnings of NumPy are not the user's to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return import_module(name)


def is_simulator(cuda: Any) -> bool:
    """Whether `numba.cuda` is the simulator, which knows no device memory."""
    return not hasattr(cuda, "as_cuda_array")


def why_no_numba() -> str | None:
    """Say why Numba CUDA kernels cannot run here, or None."""
    try:
        cuda = load_numba_cuda()
    except BackendUnavailableError as error:
        return str(error)
    if is_simulator(cuda):
        return "NUMBA_ENABLE_CUDASIM is set, and the simulator sees no device memory (unset it)"
    return None


class NumbaKernels:
    """The Numba kernels of one device.

    Parameters
    ----------
    device_id : int
        CUDA device number; it must be current whenever a method is called.
    slot_dtype : dtype
        int64 or int32: the element type of slot arrays.
    """

    def __init__(self, device_id: int = 0, slot_dtype: npt.DTypeLike = np.int64) -> None:
        self._cuda = load_numba_cuda()
        self._device_id = device_id
        self._slot_dtype = np.dtype(slot_dtype)
        self._wrapped: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._streams: dict[int, Any] = {}
        self._compiled: set[tuple[str, tuple[Any, ...]]] = set()

    def prepare(self, array: Any) -> Any:
        """Return a CuPy array as Numba sees it, wrapped once for as long as the array lives.

        The wrapper doesn't keep the array alive: whoever launches does. Without sync=False every launch
        would wait for the array's stream.
        """
        key = id(array)
        kept = self._wrapped.get(key)
        if kept is None or kept[0]() is not array:
            with self.activate():
                interface = array.__cuda_array_interface__
                wrapper = self._cuda.from_cuda_array_interface(interface, sync=False)
            kept = weakref.ref(array, lambda _: self._wrapped.pop(key, None)), wrapper
            self._wrapped[key] = kept
        return kept[1]

    def bind(self, op: str, args: tuple[Any, ...]) -> Callable[[tuple[int, int], Any], None]:
        """Return ``launch(grid, stream)`` of `op` over fixed arguments.

        Parameters
        ----------
        op : str
            Operation name.
        args : tuple of cupy.ndarray and int
            Arguments in the order of the definition; ints become int32.

        Raises
        ------
        BackendUnavailableError
            The kernel cannot be compiled here.
        """
        kernel = numba_kernel(op)
        fixed = tuple(np.int32(a) if isinstance(a, int | np.integer) else self.prepare(a) for a in args)
        self._compile(op, tuple(kernel.typeof_pyval(arg) for arg in fixed))
        return _Launch(self, kernel, fixed, args)

    def compile(self) -> None:
        """Compile and load every kernel, so that no later call does (a capture must not)."""
        for op in operations():
            self._compile(op, tuple(self._type_of(arg) for arg in spec_of(definition(op)).values()))

    def activate(self) -> Any:
        """Return a context in which Numba works on this device."""
        return self._cuda.gpus[self._device_id]

    def stream(self, pointer: int) -> Any:
        """Return a stream as Numba sees it, made once."""
        if pointer not in self._streams:
            self._streams[pointer] = self._cuda.external_stream(pointer)
        return self._streams[pointer]

    def _type_of(self, arg: Arg) -> Any:
        types = self._cuda.types
        dtype = self._slot_dtype.name if arg.dtype == "slot" else arg.dtype
        element = getattr(types, dtype)
        return types.Array(element, len(arg.shape), "C") if arg.shape else element

    def _compile(self, op: str, types: tuple[Any, ...]) -> None:
        if (op, types) in self._compiled:
            return
        try:
            with self.activate():
                numba_kernel(op).compile(types).bind()  # binding loads it on this device
        except Exception as error:
            raise BackendUnavailableError(f"backend 'numba' cannot compile {op}: {_remedy(error)}") from error
        self._compiled.add((op, types))


class _Launch:
    """``launch(grid, stream)`` of one kernel over fixed arguments, whose arrays it keeps alive."""

    def __init__(
        self, kernels: NumbaKernels, kernel: Any, fixed: tuple[Any, ...], arrays: tuple[Any, ...]
    ) -> None:
        self._kernels, self._kernel, self._fixed, self._arrays = kernels, kernel, fixed, arrays
        self._configured: dict[tuple[tuple[int, int], int], Any] = {}

    def __call__(self, grid: tuple[int, int], stream: Any) -> None:
        with self._kernels.activate():
            configured = self._configured.get((grid, stream.ptr))
            if configured is None:
                configured = self._configured[grid, stream.ptr] = self._configure(grid, stream.ptr)
            configured(*self._fixed)

    def _configure(self, grid: tuple[int, int], pointer: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a decode step is small, and Numba warns of every small grid
            return self._kernel[grid, BLOCK_THREADS, self._kernels.stream(pointer)]


def _remedy(error: Exception) -> str:
    """Name the versions and the way out; the pair that fails most is named by its cause."""
    versions = f"numba {_version('numba')}, numba-cuda {_version('numba-cuda')}, NumPy {np.__version__}"
    return (
        f"{type(error).__name__}: {error} with {versions} (numba-cuda 0.30.4 needs 'numpy<2.5' where even "
        "the guard for np.row_stack does not help: pip install 'pagedkv[cuda13]', or use backend='cupy')"
    )


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
