"""Trace formats: one line of each into a request, and which format a line begins.

Mooncake JSON lines: ``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}``, one
hash id per 512 prompt tokens. Azure CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens`` under a header line,
the time as a date with up to nine fractional digits.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from pagedkv.constants import MAX_INT32
from pagedkv.replay.errors import TraceLineError
from pagedkv.replay.requests import HASH_BLOCK_SIZE
from pagedkv.specs import cdiv

__all__ = ["MOONCAKE", "LineParser", "TraceRequest", "azure_parser", "find_parser", "parse_mooncake"]

MOONCAKE = "Mooncake JSON lines"
AZURE = "Azure CSV"
_MAX_MILLISECONDS = 1e15
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace: arrival in nanoseconds on the trace's clock, lengths in tokens."""

    arrival_ns: int
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


LineParser: TypeAlias = Callable[[str], TraceRequest]


def find_parser(line: str) -> tuple[str, LineParser, bool]:
    """Return (format, parser, whether this line is only a header) for the first line of a trace.

    Raises
    ------
    TraceLineError
        The line begins neither format.
    """
    text = line.lstrip("\ufeff")
    if text.lstrip().startswith("{"):
        return MOONCAKE, parse_mooncake, False
    header = [name.strip() for name in text.split(",")]
    if set(_AZURE_COLUMNS) <= set(header):
        return AZURE, azure_parser(header), True
    raise TraceLineError(f"a JSON object or the header {','.join(_AZURE_COLUMNS)}", line)


def parse_mooncake(line: str) -> TraceRequest:
    """Parse one JSON object; TraceLineError names the field that is wrong."""
    fields = _json_object(line.lstrip("\ufeff"))
    prompt_len = _integer("input_length", fields.get("input_length"), 1)
    output_len = _integer("output_length", fields.get("output_length"), 0)
    hash_ids = _hash_ids(fields.get("hash_ids"), prompt_len)
    return TraceRequest(_milliseconds(fields.get("timestamp")), prompt_len, output_len, hash_ids)


def azure_parser(header: list[str]) -> LineParser:
    """Return the parser for the rows below a header."""
    time, prompt, output = (header.index(name) for name in _AZURE_COLUMNS)

    def parse_azure(line: str) -> TraceRequest:
        cells = line.split(",")
        if len(cells) != len(header):
            raise TraceLineError(f"{len(header)} comma-separated values", line)
        prompt_len = _integer("ContextTokens", _number(cells[prompt]), 1)
        output_len = _integer("GeneratedTokens", _number(cells[output]), 0)
        return TraceRequest(_date(cells[time].strip()), prompt_len, output_len)

    return parse_azure


def _json_object(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceLineError("one JSON object", line) from None
    if not isinstance(fields, dict):
        raise TraceLineError("one JSON object", line)
    return fields


def _integer(name: str, value: object, low: int) -> int:
    if value is None:
        raise TraceLineError(f"{name} in [{low}, {MAX_INT32}]", "none")
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MAX_INT32:
        raise TraceLineError(f"{name} to be an integer in [{low}, {MAX_INT32}]", _as_written(value))
    return value


def _number(cell: str) -> int | str | None:
    text = cell.strip()
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) < 20
    return int(text) if is_number else text or None


def _hash_ids(value: object, prompt_len: int) -> tuple[int, ...]:
    count = cdiv(prompt_len, HASH_BLOCK_SIZE)
    expected = f"{count} hash_ids (one per {HASH_BLOCK_SIZE} of {prompt_len} tokens)"
    if not isinstance(value, list):
        raise TraceLineError(expected, "none" if value is None else _as_written(value))
    if len(value) != count:
        raise TraceLineError(expected, f"{len(value)}")
    wrong = [item for item in value if not isinstance(item, int) or isinstance(item, bool)]
    if wrong:
        raise TraceLineError("hash_ids to be integers", _as_written(wrong[0]))
    return tuple(value)


def _as_written(value: object) -> str:
    return json.dumps(value)  # "1024" is no 1024, and true is no True


def _milliseconds(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_MILLISECONDS:
        raise TraceLineError("timestamp to be a number of milliseconds", "none" if value is None else value)
    return round(value * 1_000_000)


def _date(text: str) -> int:
    """Nanoseconds since 1970; the fraction is read by itself, since datetime stops at microseconds."""
    whole, dot, rest = text.partition(".")
    fraction = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + rest[len(fraction) :])
    except ValueError:
        raise TraceLineError("TIMESTAMP like 2023-11-16 18:15:46.6805900", text) from None
    if dot and not 1 <= len(fraction) <= 9:
        raise TraceLineError("TIMESTAMP with 1 to 9 fractional digits", text)
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return round(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0"))
