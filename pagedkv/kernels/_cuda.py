"""CUDA C kernels by CuPy: compiled once per device, when first bound."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import cupy  # noqa: TID251 - this module launches for the cupy backend
import numpy as np
import numpy.typing as npt

from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels import operations, source
from pagedkv.kernels._grid import BLOCK_THREADS

__all__ = ["CudaKernels"]

_BLOCK = (BLOCK_THREADS,)


class CudaKernels:
    """The `.cu` kernels of one device.

    Parameters
    ----------
    device_id : int
        CUDA device number.
    slot_dtype : dtype
        int64 or int32: the element type of slot arrays.
    """

    def __init__(self, device_id: int = 0, slot_dtype: npt.DTypeLike = np.int64) -> None:
        self._device_id = device_id
        self._options = ("--std=c++17", *(["-DSLOT_T=int"] if np.dtype(slot_dtype) == np.int32 else []))
        self._functions: dict[str, Any] = {}

    def prepare(self, array: Any) -> Any:
        """Return what a launch takes for a CuPy array: the array itself."""
        return array

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
        function = self._function(op)
        fixed = tuple(np.int32(arg) if isinstance(arg, int | np.integer) else arg for arg in args)

        def launch(grid: tuple[int, int], stream: Any) -> None:
            with self._activate():
                function(grid, _BLOCK, fixed, stream=stream)

        return launch

    def compile(self) -> None:
        """Compile and load every kernel, so that no later call does (a capture must not)."""
        for op in operations():
            self._function(op)

    def _activate(self) -> Any:
        here = cupy.cuda.runtime.getDevice() == self._device_id
        return nullcontext() if here else cupy.cuda.Device(self._device_id)

    def _function(self, op: str) -> Any:
        """Compiled kernel of `op`; a compile error names the line of the `.cu` file."""
        if op not in self._functions:
            with self._activate():
                try:
                    self._functions[op] = cupy.RawKernel(source(op), op, options=self._options).kernel
                except (ImportError, RuntimeError) as error:
                    if "nvrtc" not in str(error).lower():
                        raise
                    raise BackendUnavailableError(
                        f"backend 'cupy' cannot compile {op}.cu: {error} "
                        "(pip install the nvidia-cuda-nvrtc of CuPy's CUDA version)"
                    ) from error
        return self._functions[op]
