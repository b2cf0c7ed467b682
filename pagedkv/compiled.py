"""`compiled`: numba.njit with an on-disk cache that fails soft and is never stale; `seal`.

Numba raises at decoration when neither the package folder nor a user cache folder is writable; the
library must import there all the same, so the cache is then given up and each process compiles anew.
And numba's cache looks only at the file of the function itself: after an upgrade it would run old code of
a helper from another file. The index here also holds a digest of all files of the package.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

__all__ = ["compiled", "seal"]

F = TypeVar("F", bound=Callable[..., Any])


class _PackageCache(FunctionCache):  # type: ignore[misc]
    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _sources_digest())


@cache
def _sources_digest() -> str:
    digest = blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):  # constants of any file are compiled in
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compiled(function: F) -> F:
    """Compile a host loop at its first call; cached on disk where a cache folder is writable.

    The GIL is kept: these calls take microseconds, and giving it up and asking for it back is dear.
    """
    dispatcher = numba.njit(function)
    if hasattr(dispatcher, "enable_caching"):  # not where NUMBA_DISABLE_JIT left it a plain function
        with suppress(RuntimeError):
            dispatcher._cache = _PackageCache(function)  # noqa: SLF001
    return dispatcher  # type: ignore[no-any-return]


def seal(function: Callable[..., Any], *args: Any) -> None:
    """Compile a compiled function for the types of `args`, and for no others ever after.

    A call with other types then raises TypeError at once: numba's dispatcher becomes the check of dtype,
    dimensions, layout and writeability, at no cost where all is well. Without the compiler
    (NUMBA_DISABLE_JIT) nothing is sealed, and the Python form takes what comes.
    """
    if hasattr(function, "disable_compile") and not function.signatures:  # type: ignore[attr-defined]
        function.compile(tuple(numba.typeof(arg) for arg in args))  # type: ignore[attr-defined]
        function.disable_compile()
