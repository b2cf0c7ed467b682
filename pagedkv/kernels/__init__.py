"""The one door between host code and kernels.

Each operation has three forms of one name and one signature: `<op>_numpy.py` (the definition),
`<op>.cu` (CUDA C) and `<op>_numba.py` (Numba CUDA). They lie beside this file once installed, and in
the repository's `kernels/` in a checkout.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["HOME", "definition", "operations"]

_here = Path(__file__).resolve().parent
HOME = _here if any(_here.glob("*.cu")) else _here.parents[1] / "kernels"
"""Folder of the kernel files."""

if _here != HOME:
    __path__.append(str(HOME))


def operations() -> list[str]:
    """Names of all operations: the folder is the list."""
    return sorted(path.stem for path in HOME.glob("*.cu"))


def definition(op: str) -> Callable[..., None]:
    """Return the NumPy form of `op`, which is its definition.

    Raises
    ------
    LookupError
        There is no operation of that name.
    """
    if not (HOME / f"{op}_numpy.py").is_file():
        raise LookupError(f"kernel operation must be one of {', '.join(operations())}, got {op!r}")
    function: Callable[..., None] = getattr(import_module(f"{__name__}.{op}_numpy"), op)
    return function


def source(op: str) -> str:
    """Return the CUDA C text of `op` with the common header put in front of it as text.

    CuPy's cache key does not hold the text of included files, so nothing is ever #included. A #line
    directive keeps compile errors at the right line of the right file.
    """
    common = (HOME / "common.cuh").read_text(encoding="utf-8")
    body = (HOME / f"{op}.cu").read_text(encoding="utf-8")
    return f'#line 1 "common.cuh"\n{common}\n#line 1 "{op}.cu"\n{body}'


def numba_kernel(op: str) -> Any:
    """Return the Numba CUDA kernel of `op`; imports numba.cuda, with what that needs beside NumPy 2.5."""
    import_module(f"{__name__}._numba").load_numba_cuda()
    return getattr(import_module(f"{__name__}.{op}_numba"), op)
