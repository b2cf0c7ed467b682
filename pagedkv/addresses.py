"""Arrays by address: how long-lived arrays enter compiled code as one argument.

Every array argument of a compiled call costs about a tenth of a microsecond, and a step has a dozen that
never change. They are written down once in a table of addresses and sizes, from which the compiled code
makes its own array views. Whoever makes a table keeps the arrays alive.
"""

from typing import Any

import numba
import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from pagedkv.compiled import compiled

__all__ = ["address_table", "int32_1d", "int32_2d", "int32_3d", "int64_1d", "int64_2d"]

_WORDS = 4  # address and up to three dimensions


def address_table(*arrays: Any) -> Any:
    """Write down C-contiguous int32 and int64 arrays of up to three dimensions: int64 [4 * len(arrays)]."""
    if numba.config.DISABLE_JIT:
        return arrays  # the Python forms below take the arrays themselves
    words = []
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"arrays by address must be C-contiguous, got strides {array.strides}")
        words += [array.ctypes.data, *array.shape, *[1] * (_WORDS - 1 - array.ndim)]
    return np.array(words, np.int64)


def _pointer_to(element: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - the compiler's signature
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


_int32_at, _int64_at = _pointer_to(types.int32), _pointer_to(types.int64)


@compiled
def _int32_1d(table: Any, place: int) -> Any:
    at = place * _WORDS
    return carray(_int32_at(table[at]), (table[at + 1],))


@compiled
def _int32_2d(table: Any, place: int) -> Any:
    at = place * _WORDS
    return carray(_int32_at(table[at]), (table[at + 1], table[at + 2]))


@compiled
def _int32_3d(table: Any, place: int) -> Any:
    at = place * _WORDS
    return carray(_int32_at(table[at]), (table[at + 1], table[at + 2], table[at + 3]))


@compiled
def _int64_1d(table: Any, place: int) -> Any:
    at = place * _WORDS
    return carray(_int64_at(table[at]), (table[at + 1],))


@compiled
def _int64_2d(table: Any, place: int) -> Any:
    at = place * _WORDS
    return carray(_int64_at(table[at]), (table[at + 1], table[at + 2]))


def _itself(table: Any, place: int) -> Any:
    return table[place]


if numba.config.DISABLE_JIT:
    int32_1d = int32_2d = int32_3d = int64_1d = int64_2d = _itself
else:
    int32_1d, int32_2d, int32_3d, int64_1d, int64_2d = _int32_1d, _int32_2d, _int32_3d, _int64_1d, _int64_2d
