"""Argument notation of the kernel definitions: ``I32[Array, "num_reqs+1"]`` is int32 of that shape.

To a type checker the notation is plain ``Annotated``; the twin test reads it, and the `.cu` text, to
hold the three forms of an operation to one signature.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import numpy.typing as npt

__all__ = ["I32", "I64", "Arg", "Array", "OutI32", "OutI64", "OutSlot", "Scalar", "spec_of", "spec_of_cu"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument: element type, dimensions (none for a scalar), and whether it is written."""

    dtype: str
    shape: tuple[str, ...] = ()
    out: bool = False


if TYPE_CHECKING:
    from typing import Annotated as I32
    from typing import Annotated as I64
    from typing import Annotated as OutI32
    from typing import Annotated as OutI64
    from typing import Annotated as OutSlot
else:

    class _Notation:
        def __init__(self, dtype: str, *, out: bool = False) -> None:
            self.dtype, self.out = dtype, out

        def __getitem__(self, item: tuple[Any, str]) -> Any:
            array, dims = item
            return Annotated[array, Arg(self.dtype, tuple(dims.split()), self.out)]

    I32, I64 = _Notation("int32"), _Notation("int64")
    OutI32, OutI64 = _Notation("int32", out=True), _Notation("int64", out=True)
    OutSlot = _Notation("slot", out=True)  # int64, or int32 where the table was built so

Scalar: TypeAlias = Annotated[int, Arg("int32")]


def spec_of(function: Callable[..., Any]) -> dict[str, Arg]:
    """Return ``{name: Arg}`` in call order, read off a definition's annotations."""
    hints = get_type_hints(function, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in inspect.signature(function).parameters}


_CTYPE = {"int": "int32", "long long": "int64", "slot_t": "slot"}
_PARAMETER = re.compile(r"^(const\s+)?(long long|int|slot_t)\s*(\*)?\s*(?:__restrict__\s+)?(\w+)$")


def spec_of_cu(text: str, op: str) -> dict[str, tuple[str, bool, bool]]:
    """Return ``{name: (dtype, is_array, is_out)}`` read off the ``extern "C"`` signature of `op`.

    Raises
    ------
    LookupError
        The text has no such kernel, or a parameter that the notation cannot express.
    """
    pattern = rf'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([\d, ]+\)\s+)?{op}\s*\(([^)]*)\)'
    found = re.search(pattern, re.sub(r"//[^\n]*", "", text))
    if found is None:
        raise LookupError(f'{op}.cu must define extern "C" __global__ void {op}(...)')
    parameters = {}
    for raw in found[1].split(","):
        match = _PARAMETER.match(" ".join(raw.split()))
        if match is None:
            raise LookupError(f"{op}.cu must use int, long long and slot_t parameters, got {raw.strip()!r}")
        const, ctype, star, name = match.groups()
        parameters[name] = (_CTYPE[ctype], bool(star), bool(star) and not const)
    return parameters
