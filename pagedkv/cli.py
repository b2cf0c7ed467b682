"""The command line: `pagedkv replay [TRACE]`."""

import argparse
from collections.abc import Sequence

from rich.console import Console

from pagedkv import __version__
from pagedkv.replay.arguments import add_replay_arguments, options_from
from pagedkv.replay.errors import ReplayInputError
from pagedkv.replay.job import replay

__all__ = ["main"]

EXIT_MISMATCH, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done; 1: the replay found mismatches; 2: bad input (argparse exits with 2 by itself); 130: interrupted.
    """
    parser, replay_parser = _parsers()
    args = parser.parse_args(argv)
    options = options_from(replay_parser, args)
    messages = Console(stderr=True, highlight=False)
    try:
        report = replay(options, Console(highlight=False), messages)
    except ReplayInputError as error:
        messages.print(f"pagedkv replay: {error}", markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        messages.print("pagedkv replay: interrupted")
        return EXIT_INTERRUPTED
    if report["mismatches"]:
        messages.print(f"pagedkv replay: {report['mismatches']:,} mismatches", style="bold red")
        return EXIT_MISMATCH
    return 0


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(prog="pagedkv", description="Bookkeeping of a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "replay a request trace through pool, tables and slot mappings, and verify every token's place"
    replay_parser = commands.add_parser("replay", help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_replay_arguments(replay_parser)
    return parser, replay_parser
