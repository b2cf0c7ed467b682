"""Sources: the numbered lines of a trace, from a file or standard input, plain or gzip, by content."""

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from pagedkv.replay.errors import ReplayInputError

__all__ = ["STANDARD_INPUT", "numbered_lines", "source_name"]

STANDARD_INPUT = "-"
_GZIP_MAGIC = b"\x1f\x8b"


def source_name(trace: str) -> str:
    """Name of a trace in messages."""
    return "<stdin>" if trace == STANDARD_INPUT else trace


def numbered_lines(trace: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its end) of every line that is not blank.

    Raises
    ------
    ReplayInputError
        The source is missing, unreadable, or damaged gzip data.
    """
    number = 0
    try:
        with _opened(trace) as stream:
            for number, line in enumerate(_decompressed(stream), 1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReplayInputError(
            f"{source_name(trace)}:{number + 1}: expected intact gzip data, got {error}"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise ReplayInputError(f"{source_name(trace)}: expected a readable trace, got {reason}") from error


@contextmanager
def _opened(trace: str) -> Iterator[io.BufferedReader]:
    if trace == STANDARD_INPUT:  # left open: it is not ours
        reader: io.BufferedReader = io.BufferedReader(cast("io.RawIOBase", sys.stdin.buffer))
        try:
            yield reader
        finally:
            reader.detach()
        return
    with Path(trace).open("rb") as stream:
        yield stream


def _decompressed(stream: io.BufferedReader) -> BinaryIO:
    if stream.peek(2)[:2] == _GZIP_MAGIC:
        return cast("BinaryIO", gzip.GzipFile(fileobj=stream))
    return stream
