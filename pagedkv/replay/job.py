"""The main job: read or generate requests, replay them, write the report."""

import json
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from pagedkv.errors import PagedKVError
from pagedkv.replay.engine import Engine
from pagedkv.replay.errors import ReplayInputError
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.plot import check_plot_available, write_plot
from pagedkv.replay.progress import watched
from pagedkv.replay.report import build_report
from pagedkv.replay.traces import Trace, read_trace
from pagedkv.replay.traffic import DEFAULT_NUM_REQUESTS, generate_trace

__all__ = ["replay"]


def replay(options: ReplayOptions, messages: Console) -> dict[str, Any]:
    """Replay a trace, write the files that the options name, and return the report.

    Parameters
    ----------
    options : ReplayOptions
    messages : rich.console.Console
        Where progress goes.

    Raises
    ------
    ReplayInputError
        The trace, an option or an output file cannot be used.
    """
    _check_outputs(options)
    trace = load_trace(options)
    began = perf_counter()
    engine = _engine(trace, options)
    with watched(messages, len(trace.requests), quiet=options.quiet) as watch:
        engine.run(watch)
    report = build_report(trace, engine, perf_counter() - began)
    _write_outputs(options, report, engine)
    return report


def load_trace(options: ReplayOptions) -> Trace:
    """Read the trace that the options name, or generate traffic where they name none."""
    if options.trace is None:
        return generate_trace(options.limit or DEFAULT_NUM_REQUESTS, options.seed)
    return read_trace(options.trace, limit=options.limit, skip_invalid=options.skip_invalid)


def _engine(trace: Trace, options: ReplayOptions) -> Engine:
    try:
        return Engine(trace.requests, options)
    except MemoryError as error:
        raise ReplayInputError(f"the tables and the simulated cache do not fit memory: {error}") from error
    except (PagedKVError, ValueError) as error:  # a size or backend that the library refuses
        raise ReplayInputError(str(error)) from error


def _check_outputs(options: ReplayOptions) -> None:
    """Raise before the run, not after it, where a result could not be written or would replace another."""
    if options.plot is not None:
        check_plot_available()
    taken = [Path(options.trace)] if options.trace not in (None, "-") else []
    for name in (options.json, options.plot):
        if name is None:
            continue
        path = Path(name)
        if any(path.resolve() == other.resolve() for other in taken):
            raise ReplayInputError(
                f"{name}: expected a file of its own, got one that is read or written already"
            )
        taken.append(path)
        existed = path.exists()
        try:
            with path.open("ab"):
                pass
            if not existed:
                path.unlink()
        except OSError as error:
            raise _unwritable(name, error) from error


def _write_outputs(options: ReplayOptions, report: dict[str, Any], engine: Engine) -> None:
    name = ""
    try:
        if name := options.json or "":
            Path(name).write_text(json.dumps(report, indent=2) + "\n")
        if name := options.plot or "":
            write_plot(name, engine.log, str(report["trace"]))
    except OSError as error:
        raise _unwritable(name, error) from error


def _unwritable(name: str, error: OSError) -> ReplayInputError:
    return ReplayInputError(f"{name}: expected a writable file, got {error.strerror or error}")
