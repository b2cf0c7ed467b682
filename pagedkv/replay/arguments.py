"""Arguments: the options of `pagedkv replay` on the command line, and their texts."""

import argparse
from typing import Any

from pagedkv.allocation.hashing import ALGORITHMS
from pagedkv.replay.argument_types import count, kernel_views, memory_size, parse_group, real, share
from pagedkv.replay.options import ReplayOptions
from pagedkv.specs import ContextParallel

__all__ = ["add_replay_arguments", "options_from"]


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the trace and all options; defaults are those of `ReplayOptions`."""
    defaults = ReplayOptions()
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="Mooncake JSON lines or Azure CSV, plain or gzip; - reads standard input (default: built-in)",
    )
    _add_clock(parser.add_argument_group("clock"), defaults)
    _add_memory(parser.add_argument_group("memory"), defaults)
    _add_batch(parser.add_argument_group("batch and tables"), defaults)
    _add_run(parser.add_argument_group("run and output"), defaults)


def options_from(parser: argparse.ArgumentParser, args: argparse.Namespace) -> ReplayOptions:
    """Return the options; ends the program with status 2 where they contradict each other."""
    values = vars(args).copy()
    block_size, views = values.pop("block_size"), values.pop("kernel_views")
    world_size, interleave = values.pop("cp_world_size"), values.pop("cp_interleave")
    try:
        groups = tuple(parse_group(text, block_size, views) for text in values.pop("groups"))
        context_parallel = ContextParallel(world_size, 0, interleave)
        for spec in groups:
            spec.shard(context_parallel)
    except ValueError as error:
        parser.error(str(error))
    names = ReplayOptions.__dataclass_fields__
    chosen = {name: value for name, value in values.items() if name in names}
    return ReplayOptions(groups=groups, context_parallel=context_parallel, **chosen)


def _add_clock(group: Any, defaults: ReplayOptions) -> None:
    group.add_argument(
        "--arrivals",
        choices=("trace", "immediate"),
        default=defaults.arrivals,
        help="the trace's own times, or every request waiting from the start (default: %(default)s)",
    )
    group.add_argument(
        "--step-ms",
        type=real,
        default=defaults.step_ms,
        help="simulated ms of a step (default: %(default)s)",
    )
    group.add_argument(
        "--token-us",
        type=real,
        default=defaults.token_us,
        help="simulated us that each scheduled token adds (default: %(default)s)",
    )


def _add_memory(group: Any, defaults: ReplayOptions) -> None:
    group.add_argument(
        "--block-size", type=count(1), default=16, help="tokens a block (default: %(default)s)"
    )
    group.add_argument(
        "--num-blocks", type=count(2), help="blocks of the pool (default: what --kv-memory holds)"
    )
    group.add_argument(
        "--kv-memory",
        type=memory_size,
        default=defaults.kv_memory,
        metavar="SIZE",
        help="bytes of KV cache on each rank, such as 64GiB (default: 64GiB)",
    )
    group.add_argument(
        "--bytes-per-token",
        type=count(1),
        default=defaults.bytes_per_token,
        metavar="N",
        help="bytes of K and V in all layers (default: %(default)s, an 8B model with 8 KV heads in bfloat16)",
    )
    group.add_argument(
        "--watermark",
        type=share,
        default=defaults.watermark,
        help="share of the pool that an admission leaves free while others run (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=defaults.prefix_caching,
        help="find full blocks again by their content, as long as they are not handed out (default: on)",
    )
    group.add_argument(
        "--hash",
        choices=ALGORITHMS,
        default=defaults.hash,
        help="hash of blocks for prefix caching (default: %(default)s)",
    )


def _add_batch(group: Any, defaults: ReplayOptions) -> None:
    group.add_argument(
        "--max-model-len", type=count(1), help="longest prompt + output (default: the trace's longest)"
    )
    group.add_argument(
        "--max-num-seqs", type=count(1), default=defaults.max_num_seqs, help="rows (default: %(default)s)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=count(1),
        default=defaults.max_num_batched_tokens,
        help="tokens a step (default: %(default)s)",
    )
    group.add_argument(
        "--compact-every",
        type=count(0),
        default=defaults.compact_every,
        metavar="N",
        help="every N steps, move the highest table rows into holes; 0: never (default: %(default)s)",
    )
    group.add_argument(
        "--groups",
        type=lambda text: text.split(","),
        default=["full"],
        metavar="LIST",
        help="KV-cache groups, such as full,window:4096; each may end in /BLOCK_SIZE, full ones "
        "in +replicated (every context-parallel rank holds all of it) (default: full)",
    )
    group.add_argument(
        "--kernel-views",
        type=kernel_views,
        default=(),
        metavar="LIST",
        help="attention-kernel block sizes that see every group's table, such as 8,4:6 (size:stride)",
    )
    group.add_argument(
        "--cp-world-size",
        type=count(1),
        default=1,
        help="context-parallel ranks, all simulated (default: 1)",
    )
    group.add_argument(
        "--cp-interleave", type=count(1), default=1, help="consecutive tokens on one rank (default: 1)"
    )
    group.add_argument(
        "--backend",
        choices=("auto", "numpy", "numba", "cupy"),
        default=defaults.backend,
        help="where tables and slot mappings live (default: %(default)s)",
    )


def _add_run(group: Any, defaults: ReplayOptions) -> None:
    group.add_argument("--limit", type=count(1), metavar="N", help="only the first N requests")
    group.add_argument(
        "--seed", type=count(0), default=defaults.seed, help="of traffic and samples (default: %(default)s)"
    )
    group.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=defaults.verify,
        help="write every token through its slot and read it back through the table (default: on)",
    )
    group.add_argument(
        "--samples",
        dest="num_samples",
        type=count(1),
        default=defaults.num_samples,
        metavar="N",
        help="positions read back in each group at every step (default: %(default)s)",
    )
    group.add_argument(
        "--skip-invalid", action="store_true", help="count lines that are no request, and go on"
    )
    group.add_argument("--json", metavar="FILE", help="write the report as JSON")
    group.add_argument("--plot", metavar="FILE.png", help="write utilisation, load and bytes over time")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
