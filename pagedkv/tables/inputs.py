"""Step inputs: told apart into host arrays, which travel with the step, and device arrays, read in place."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.checks import as_int32, check_int, check_shape
from pagedkv.constants import MAX_INT32

__all__ = [
    "HOST_INPUTS",
    "HOST_ONLY",
    "NO_INT32",
    "NO_INT64",
    "Inputs",
    "check_rows_given",
    "device_or_host",
    "step_inputs",
]

NO_INT32 = np.empty(0, np.int32)
NO_INT64 = np.empty(0, np.int64)
HOST_ONLY = (None, None, None)
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class Inputs(NamedTuple):
    """A step's inputs: host arrays travel with it; for device arrays the host form is empty."""

    # query_start_loc, num_computed_tokens, positions, rows; how many positions are given, -1 = formed
    arrays: tuple[Any, Any, Any, Any, int]
    device: tuple[Any, Any, Any]  # the device forms of the first three, None each where on the host
    device_key: tuple[int, ...]  # their addresses, which a captured graph holds; () = none


HOST_INPUTS = Inputs((np.zeros(1, np.int32), NO_INT32, NO_INT64, NO_INT32, -1), HOST_ONLY, ())
"""Of a step without requests; and its device part is that of every step whose arrays are on the host."""


def step_inputs(
    backend: Any,
    num_reqs: int,
    query_start_loc: Any,
    num_computed_tokens: Any,
    positions: Any = None,
    rows: Any = None,
) -> Inputs:
    """Check types and shapes, and split host from device.

    Raises
    ------
    TypeError
        A wrong dtype, or an array of another device.
    ValueError
        A wrong shape.
    """
    check_int("num_reqs", num_reqs)
    starts = device_or_host(backend, "query_start_loc", query_start_loc, num_reqs + 1, _INT32)
    computed = device_or_host(backend, "num_computed_tokens", num_computed_tokens, num_reqs, _INT32)
    where: tuple[Any, Any] = (NO_INT64, None)
    if positions is not None:
        where = device_or_host(backend, "positions", positions, None, _INT64)
    num_positions = -1 if positions is None else int(where[0].size if where[1] is None else where[1].size)
    lines = NO_INT32 if rows is None else _host_rows(rows, num_reqs)
    device = (starts[1], computed[1], where[1])
    key = () if all(a is None for a in device) else tuple(0 if a is None else a.data.ptr for a in device)
    return Inputs((starts[0], computed[0], where[0], lines, num_positions), device, key)


def check_rows_given(rows: Any, *, stable: bool) -> None:
    """Raise ValueError unless rows are given exactly where the table has stable rows."""
    if (rows is None) == stable:
        rule = "be given when" if stable else "be None unless"
        raise ValueError(f"rows must {rule} the table has stable_rows, got {type(rows).__name__}")


def device_or_host(
    backend: Any, name: str, array: Any, size: int | None, dtype: npt.DTypeLike
) -> tuple[Any, Any]:
    """Return (host array, None) or (empty, device array), checked.

    A device array may be longer than the step (a persistent buffer); a host array may not.
    """
    if backend.is_device_array(array):
        if array.dtype != dtype:
            raise TypeError(f"{name} must be {np.dtype(dtype)} on the device, got {array.dtype}")
        if array.ndim != 1 or not array.flags.c_contiguous or (size is not None and array.size < size):
            raise ValueError(
                f"{name} must be contiguous with at least {size or 0} elements in one dimension, "
                f"got shape {list(array.shape)}"
            )
        return np.empty(0, dtype), array
    if hasattr(array, "__cuda_array_interface__") and not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} must be a NumPy array or a CuPy array of the table's device on backend "
            f"{backend.name!r}, got {type(array).__name__} (convert it with cupy.from_dlpack)"
        )
    if dtype == _INT32:
        host = as_int32(name, array, -MAX_INT32 - 1)
    else:
        host = np.ascontiguousarray(array)
        if host.dtype != dtype or host.ndim != 1:
            raise TypeError(f"{name} must be int64 in one dimension, got {host.dtype} {list(host.shape)}")
    if size is not None:
        check_shape(name, host, (size,), "[num_reqs + 1]" if name == "query_start_loc" else "[num_reqs]")
    return host if host.flags.writeable else host.copy(), None


def _host_rows(rows: Any, num_reqs: int) -> npt.NDArray[np.int32]:
    lines = as_int32("rows", rows, -MAX_INT32 - 1)
    check_shape("rows", lines, (num_reqs,), "[num_reqs]")
    return lines if lines.flags.writeable else lines.copy()
