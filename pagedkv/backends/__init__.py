"""Backends: where a table's arrays live and who runs the kernels. Asked for by name, imported on demand."""

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.backends.numpy_backend import NumpyBackend
from pagedkv.errors import BackendUnavailableError

__all__ = ["BACKENDS", "get_backend", "why_unavailable"]

BACKENDS = ("numpy", "numba", "cupy")
"""Names a backend may have; "auto" stands for cupy where a device is usable, else numpy."""


def get_backend(name: str = "auto", device: int | None = None, slot_dtype: npt.DTypeLike = np.int64) -> Any:
    """Return a backend by name; "auto" looks at the environment variable PAGEDKV_BACKEND first.

    Parameters
    ----------
    name : {"auto", "numpy", "numba", "cupy"}
    device : int, optional
        CUDA device number; CuPy's current device where None.
    slot_dtype : dtype
        int64 or int32.

    Raises
    ------
    BackendUnavailableError
        The backend cannot run here; the message says what is missing and how to get it.
    TypeError
        Slots of another dtype.
    """
    if np.dtype(slot_dtype) not in (np.dtype(np.int64), np.dtype(np.int32)):
        raise TypeError(f"slot_dtype must be int64 or int32, got {np.dtype(slot_dtype)}")
    if name == "auto":
        name = os.environ.get("PAGEDKV_BACKEND", "auto").lower() or "auto"
    if name == "auto":
        name = "numpy" if why_unavailable("cupy") else "cupy"
    if name == "numpy":
        if device is not None:
            raise BackendUnavailableError(
                f"device must be None on the numpy backend, got {device} (use backend='cupy')"
            )
        return NumpyBackend(slot_dtype)
    if reason := why_unavailable(name):
        raise BackendUnavailableError(f"backend {name!r} is not available: {reason}")
    from pagedkv.backends.cuda import CudaBackend

    return CudaBackend(name, device, slot_dtype)


def why_unavailable(name: str) -> str | None:
    """Say what a backend lacks on this machine, with the remedy; None where it can run."""
    if name == "numpy":
        return None
    if name not in BACKENDS:
        return f"it must be one of auto, {', '.join(BACKENDS)} (set backend= or PAGEDKV_BACKEND)"
    from importlib.util import find_spec

    if find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'pagedkv[cuda13]', or [cuda12] for a CUDA 12 driver)"
    from pagedkv.backends.cuda import why_no_device

    if reason := why_no_device():
        return reason
    if name == "numba":
        from pagedkv.kernels._numba import why_no_numba

        return why_no_numba()
    return None
