"""What besides the tokens tells two blocks apart: adapter, multimodal items, salt.

Everything is brought into one canonical byte string, in which each value stands with its tag, its type
and its length: an adapter "x" is not a salt "x", "1" is not 1, and no two lists run together.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.checks import check_int

__all__ = ["ExtraKeys", "Value"]

Value: TypeAlias = str | bytes | int
KeyArray: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What besides the tokens the KV of a sequence depends on.

    Parameters
    ----------
    adapter : str, bytes, int or tuple of them, optional
        Identifies the adapter (LoRA) and its weights; it tells every block apart.
    multimodal : tuple of (identifier, start, length)
        Items that stand for placeholder tokens: which item, at which token position, over how many
        tokens of the prompt. Each tells the blocks apart that it overlaps.
    cache_salt : str, bytes or int, optional
        Tells the first block apart, and through the chain all others.
    """

    adapter: Value | tuple[Value, ...] | None = None
    multimodal: tuple[tuple[Value, int, int], ...] = ()
    cache_salt: Value | None = None

    def __post_init__(self) -> None:
        adapters = self.adapter if isinstance(self.adapter, tuple) else _given(self.adapter)
        identifiers = (identifier for identifier, _, _ in self.multimodal)
        for value in (*adapters, *_given(self.cache_salt), *identifiers):
            _value(value)  # refused here, and not when a sequence is half added
        for _, start, length in self.multimodal:
            check_int("multimodal item start", start)
            check_int("multimodal item length", length, low=1)

    def clipped(self, num_tokens: int) -> "ExtraKeys":
        """Return what is left of them where a sequence is cut to so many tokens."""
        items = tuple(
            (identifier, start, min(length, num_tokens - start))
            for identifier, start, length in self.multimodal
            if start < num_tokens
        )
        return replace(self, multimodal=items)

    def digests(self, first_block: int, num_blocks: int, block_size: int) -> KeyArray:
        """Return one digest per block, uint64 [num_blocks, 2]; zeros where nothing tells it apart."""
        out = np.zeros((num_blocks, 2), np.uint64)
        digests: dict[bytes, KeyArray] = {}  # most blocks have the same extras, or none
        for i in range(num_blocks):
            fields = b"".join(self._fields(first_block + i, block_size))
            if fields:
                out[i] = digests.setdefault(fields, _digest(fields))
        return out

    def _fields(self, block: int, block_size: int) -> list[bytes]:
        fields = []
        if self.adapter is not None:
            values = self.adapter if isinstance(self.adapter, tuple) else (self.adapter,)
            fields.append(_field(b"a", *values))
        for identifier, start, length in self.multimodal:
            first, end = block * block_size, (block + 1) * block_size
            covered = min(start + length, end) - max(start, first)
            if covered > 0:
                fields.append(_field(b"m", identifier, start - first, covered))
        if block == 0 and self.cache_salt is not None:
            fields.append(_field(b"s", self.cache_salt))
        return fields


def _given(value: Value | None) -> tuple[Value, ...]:
    return () if value is None else (value,)


def _field(tag: bytes, *values: Value) -> bytes:
    return tag + len(values).to_bytes(4, "little") + b"".join(map(_value, values))


def _value(value: Value) -> bytes:
    match value:
        case bytes():
            kind, data = b"b", value
        case str():
            kind, data = b"s", value.encode()
        case int() | np.integer():
            kind, data = b"i", b"%d" % int(value)
        case _:
            raise TypeError(f"extra keys must be str, bytes or int, got {type(value).__name__}")
    return kind + len(data).to_bytes(8, "little") + data


def _digest(fields: bytes) -> KeyArray:
    return np.frombuffer(hashlib.sha256(fields).digest()[:16], "<u8").astype(np.uint64)
