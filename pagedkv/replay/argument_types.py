"""Argument types: from the text of an option to its value; argparse reports what they refuse."""

import argparse
from collections.abc import Callable
from math import isfinite

from pagedkv.constants import MAX_INT32
from pagedkv.specs import KVCacheGroupSpec

__all__ = ["count", "kernel_views", "memory_size", "parse_group", "real", "share"]

_UNITS = {"": 0, "b": 0, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30, "t": 40, "tib": 40}


def parse_group(text: str, block_size: int, views: tuple[tuple[int, int] | int, ...]) -> KVCacheGroupSpec:
    """Parse ``full`` or ``window:TOKENS``, then optional ``/BLOCK_SIZE`` and ``+replicated``."""
    rest, plus, sharding = text.strip().partition("+")
    rest, slash, size = rest.partition("/")
    kind, colon, window = rest.partition(":")
    is_known = (kind == "full" and not colon) or (kind == "window" and _is_number(window))
    if not is_known or (slash and not _is_number(size)) or (plus and sharding != "replicated"):
        raise ValueError(f"--groups must list full or window:TOKENS[/BLOCK_SIZE][+replicated], got {text!r}")
    return KVCacheGroupSpec(
        int(size) if slash else block_size,
        kernel_views=views,
        cp_sharded=not plus,
        sliding_window=int(window) if colon else None,
    )


def kernel_views(text: str) -> tuple[tuple[int, int] | int, ...]:
    """Parse ``SIZE[:STRIDE],...``, kernel block sizes in tokens and strides in kernel blocks."""
    views: list[tuple[int, int] | int] = []
    for item in text.split(","):
        size, colon, stride = item.partition(":")
        if not _is_number(size) or (colon and not _is_number(stride)):
            raise argparse.ArgumentTypeError(f"must list SIZE or SIZE:STRIDE, got {item!r}")
        views.append((int(size), int(stride)) if colon else int(size))
    return tuple(views)


def count(low: int) -> Callable[[str], int]:
    """Return the parser of an integer in [low, int32's largest]."""

    def parse(text: str) -> int:
        value = int(text) if _is_number(text) else -1
        if not low <= value <= MAX_INT32:
            raise argparse.ArgumentTypeError(f"must be an integer in [{low}, {MAX_INT32}], got {text!r}")
        return value

    return parse


def real(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value >= 0 and isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def share(text: str) -> float:
    """Parse a share in [0, 1)."""
    value = real(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be below 1, got {text!r}")
    return value


def memory_size(text: str) -> int:
    """Parse bytes, or a size in KiB, MiB, GiB or TiB (K, M, G, T for short)."""
    digits = text.rstrip("bBiIkKmMgGtT")
    unit = text[len(digits) :].lower()
    if unit not in _UNITS or not _is_number(digits):
        raise argparse.ArgumentTypeError(f"must be bytes or a size such as 64GiB, got {text!r}")
    return int(digits) << _UNITS[unit]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15
