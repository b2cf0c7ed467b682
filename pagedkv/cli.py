"""The command line: `pagedkv replay [TRACE]`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console

from pagedkv import __version__
from pagedkv.replay.arguments import add_replay_arguments, options_from
from pagedkv.replay.errors import ReplayInputError
from pagedkv.replay.job import replay
from pagedkv.replay.table import report_table

__all__ = ["main"]

EXIT_MISMATCH, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error; the usage is in --help."""

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (--help tells the options)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done; 1: the replay found mismatches; 2: bad input (argparse exits with 2 by itself); 130: interrupted.
    """
    parser, replay_parser = _parsers()
    options = options_from(replay_parser, parser.parse_args(argv))
    messages = Console(stderr=True, highlight=False)
    try:
        report = replay(options, messages)
        _print_table(report)
    except ReplayInputError as error:
        messages.print(f"pagedkv replay: {error}", markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        messages.print("pagedkv replay: interrupted")
        return EXIT_INTERRUPTED
    return _judge(report, messages)


def _print_table(report: dict[str, Any]) -> None:
    try:
        Console(highlight=False).print(report_table(report))
    except OSError as error:
        # what is still buffered would fail again when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ReplayInputError(
            f"<stdout>: expected a writable file, got {error.strerror or error}"
        ) from error


def _judge(report: dict[str, Any], messages: Console) -> int:
    if not report["mismatches"]:
        return 0
    for example in report["mismatch_examples"]:
        messages.print(f"mismatch: {example}", style="red", markup=False, soft_wrap=True)
    messages.print(f"pagedkv replay: {report['mismatches']:,} mismatches", style="bold red")
    return EXIT_MISMATCH


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = _OneLineParser(prog="pagedkv", description="Bookkeeping of a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "replay a request trace through pool, tables and slot mappings, and verify every token's place"
    replay_parser = commands.add_parser("replay", help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_replay_arguments(replay_parser)
    return parser, replay_parser
