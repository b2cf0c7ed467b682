"""Argument checks, one phrase each: `<name> must ...: <limit>, got <value> (<remedy>)`."""

from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.constants import MAX_INT32

__all__ = ["IntArray", "as_int32", "as_ready", "check_int", "check_shape", "check_view"]

IntArray: TypeAlias = npt.NDArray[np.int32]
DType = TypeVar("DType", bound=np.generic)


def check_int(name: str, value: Any, low: int = 0, high: int = MAX_INT32) -> int:
    """Return `value` as an int within [low, high], or raise.

    Raises
    ------
    TypeError
        `value` is no integer (a bool is none).
    ValueError
        `value` lies outside [low, high].
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")
    return int(value)


def as_int32(name: str, values: Any, low: int = 0, high: int = MAX_INT32) -> IntArray:
    """Return `values` as a C-contiguous int32 array, shape [n], every value within [low, high].

    An int32 array is returned as it is (no copy).

    Raises
    ------
    TypeError
        The values are no integers.
    ValueError
        The values are not one-dimensional, or one lies outside [low, high].
    """
    array = np.asarray(values)
    if array.size == 0 and not isinstance(values, np.ndarray):
        return np.empty(0, np.int32)  # an empty list has no integer dtype of its own
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(array.shape)}")
    if array.size:
        smallest, largest = array.min(), array.max()
        if smallest < low or largest > high:
            value = smallest if smallest < low else largest
            raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")
    return np.ascontiguousarray(array, dtype=np.int32)


def as_ready(array: npt.NDArray[DType]) -> npt.NDArray[DType]:
    """Return an array as compiled code takes it, contiguous and writeable: itself, or a copy.

    For any other kind of array the compiler would make another version, in seconds.
    """
    return array if array.flags.carray else np.array(array, order="C")


def check_view(group: int, view: Any, num_views: int) -> None:
    """Raise ValueError unless a group has a kernel view of this number."""
    if num_views == 0:
        raise ValueError(f"group {group} has no kernel views, got view {view} (give it kernel_views)")
    check_int("view", view, 0, num_views - 1)


def check_shape(name: str, array: Any, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless `array` has `shape`; `meaning` names the dimensions in the message."""
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} must have shape {meaning} = {list(shape)}, got {list(array.shape)}")
