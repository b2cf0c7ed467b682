"""The table at the end of a run: the report in lines that a person reads."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["report_table"]


def report_table(report: dict[str, Any]) -> Table:
    """Return the report as a two-column table."""
    title = Text(f"pagedkv replay: {report['trace']}", style="table.title")  # a name is no markup
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section in (_requests, _verification, _memory, _transfers, _time):
        for name, text in section(report):
            table.add_row(name, text)
        table.add_section()
    return table


def _requests(r: dict[str, Any]) -> Iterator[tuple[str, str]]:
    counts = f"{r['requests']:,}: {r['completed']:,} completed, {r['rejected']:,} rejected"
    yield (
        "requests",
        counts + (f" ({r['skipped_lines']:,} invalid lines skipped)" if r["skipped_lines"] else ""),
    )
    yield "steps", f"{r['steps']:,}, {r['running_mean']:.1f} sequences running on average"
    yield "tokens", f"{r['scheduled_tokens']:,} scheduled, {r['preemptions']:,} preemptions"
    ideal = f"{r['prefix_hit_rate_ideal']:.2%} if nothing were evicted"
    yield "prefix hits", f"{r['prefix_hit_rate']:.2%} of prompt tokens, at first admission ({ideal})"
    yield "prefix cache", f"{r['cached_blocks']:,} blocks at the end, {r['evictions']:,} evictions"


def _verification(r: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if not r["verified"]:
        yield "verification", "off"
        return
    yield "verified", f"{r['verified_tokens']:,} positions read back"
    style = "bold red" if r["mismatches"] else "green"
    yield "mismatches", f"[{style}]{r['mismatches']:,}[/]"


def _memory(r: dict[str, Any]) -> Iterator[tuple[str, str]]:
    options = r["options"]
    sizes = ", ".join(str(group["block_size"]) for group in options["groups"])
    yield "pool", f"{options['num_blocks']:,} blocks of {sizes} tokens"
    yield "utilization", f"{r['utilization_mean']:.2%} of the slots of held blocks"
    yield "  if reserved", f"{r['utilization_reserved_mean']:.2%} at {options['max_model_len']:,} tokens each"
    yield "  if powers of 2", f"{r['utilization_pow2_mean']:.2%}"


def _transfers(r: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "backend", r["backend"]
    yield "host to device", f"at most {r['h2d_copies_per_step_max']} copies a step"
    yield "bytes per step", f"{r['h2d_bytes_per_step_mean']:,.0f}"
    yield "  if rows whole", f"{r['full_upload_bytes_per_step_mean']:,.0f}"


def _time(r: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for phase, times in r["host_us_per_step"].items():
        yield f"{phase} us", f"p50 {times['p50']:,.0f}, p99 {times['p99']:,.0f}, mean {times['mean']:,.0f}"
    rate = r["scheduled_tokens"] / max(r["wall_seconds"], 1e-9)
    yield "simulated time", f"{r['simulated_seconds']:,.1f} s"
    yield "wall time", f"{r['wall_seconds']:,.1f} s, {rate:,.0f} tokens/s"
    yield "peak memory", f"{r['peak_memory_bytes'] / (1 << 20):,.0f} MiB"
