"""Traces: a file of requests, read whole and checked line by line."""

from dataclasses import dataclass, field

from pagedkv.replay.errors import ReplayInputError, TraceLineError
from pagedkv.replay.requests import Requests, RequestsBuilder
from pagedkv.replay.sources import numbered_lines, source_name
from pagedkv.replay.trace_formats import LineParser, find_parser

__all__ = ["Trace", "read_trace"]


@dataclass(frozen=True)
class Trace:
    """A trace and where it came from.

    Attributes
    ----------
    requests : Requests
    name : str
        File, ``<stdin>``, or what was generated.
    format : str
    num_skipped : int
        Invalid lines that were left out.
    """

    requests: Requests
    name: str
    format: str
    num_skipped: int = 0


@dataclass
class _Reading:
    """How far a trace is read."""

    builder: RequestsBuilder = field(default_factory=RequestsBuilder)
    format: str = ""
    parse: LineParser | None = None
    arrivals_ns: tuple[int, int] | None = None  # of the first request and of the last

    def read(self, line: str) -> None:
        if self.parse is None:
            self.format, self.parse, is_header = find_parser(line)
            if is_header:
                return
        request = self.parse(line)
        first, last = self.arrivals_ns or (request.arrival_ns, request.arrival_ns)
        if request.arrival_ns < last:
            back = (last - request.arrival_ns) / 1e9
            raise TraceLineError("a time not before the previous request's", f"one {back:.9g} s earlier")
        self.arrivals_ns = first, request.arrival_ns
        arrival = (request.arrival_ns - first) / 1e9
        self.builder.add(arrival, request.prompt_len, request.output_len, request.hash_ids)


def read_trace(trace: str, *, limit: int | None = None, skip_invalid: bool = False) -> Trace:
    """Read a Mooncake or Azure trace; the format is found by content.

    Parameters
    ----------
    trace : str
        Path of the file, plain or gzip; ``-`` reads standard input.
    limit : int, optional
        Stop after this many requests.
    skip_invalid : bool
        Count lines that are no request and go on, instead of raising.

    Raises
    ------
    ReplayInputError
        The source is missing, empty or damaged, or (unless `skip_invalid`) a line is no request. The
        message begins with file and line number.
    """
    reading, num_skipped = _Reading(), 0
    for number, line in numbered_lines(trace):
        try:
            reading.read(_text(line))
        except TraceLineError as error:
            if not skip_invalid:
                raise ReplayInputError(f"{source_name(trace)}:{number}: {error}") from error
            num_skipped += 1
        if limit is not None and len(reading.builder) >= limit:
            break
    if not len(reading.builder):
        got = f"{num_skipped} invalid lines" if num_skipped else "an empty trace"
        raise ReplayInputError(f"{source_name(trace)}:1: expected at least one request, got {got}")
    return Trace(reading.builder.build(), source_name(trace), reading.format, num_skipped)


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise TraceLineError("UTF-8 text", line[:40]) from None
