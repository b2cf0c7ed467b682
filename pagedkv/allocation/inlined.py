"""`inlined`: a compiled helper that becomes part of its caller, and counts no references.

The manager's helpers take tuples of some twenty arrays. As calls, these would be copied, and the array
references counted up and down, for every sequence: ten times the cost of what the helper does.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["inlined"]

F = TypeVar("F", bound=Callable[..., Any])


def inlined(function: F) -> F:
    """Compile a helper into each of its callers.

    It must neither make nor return an array: its callers hold every array that it sees.
    """
    return numba.njit(forceinline=True, _nrt=False)(function)  # type: ignore[no-any-return]
