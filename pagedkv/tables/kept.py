"""keep: views are made once, and forgotten together before there are too many of them."""

from typing import Any, TypeAlias

__all__ = ["Kept", "keep"]

_MOST_KEPT = 16384

Kept: TypeAlias = dict[tuple[Any, ...], Any]
"""Views, and what is made of them, by name, group and size or the like; read it as the dict that it is."""


def keep(kept: Kept, key: tuple[Any, ...], value: Any) -> Any:
    """Keep a value under a key, and return it; where there are too many, all others are forgotten.

    Captured steps come in few sizes. Eager ones come in ever new ones, and each leaves some views of about
    250 bytes; what was forgotten is made anew.
    """
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = value
    return value
