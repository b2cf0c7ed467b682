"""`compiled`: numba.njit with an on-disk cache that fails soft.

Numba raises at decoration when neither the package folder nor a user cache folder is writable; the
library must import there all the same, so the cache is then given up and each process compiles anew.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a host loop at its first call; cached on disk where a cache folder is writable."""
    try:
        return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]
