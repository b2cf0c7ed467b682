"""Progress: a bar with rate and remaining time while a replay runs; silent where nobody watches."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagedkv.replay.engine import Engine

__all__ = ["watched"]

_INTERVAL_S = 0.2


class _Watch:
    """Updates the bar a few times a second; called after every step."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("requests", total=total, rate="")
        self._next, self._began = 0.0, monotonic()

    def __call__(self, engine: Engine) -> None:
        now = monotonic()
        if now < self._next:
            return
        self._next = now + _INTERVAL_S
        tally = engine.tally
        rate = tally.num_scheduled_tokens / max(now - self._began, 1e-3)
        self._progress.update(
            self._task, completed=tally.num_completed + tally.num_rejected, rate=f"{rate / 1e6:.2f} Mtok/s"
        )


@contextmanager
def watched(console: Console, total: int, *, quiet: bool) -> Iterator[_Watch]:
    """Yield what to call after each step; the bar is on `console`, which should write to standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        yield _Watch(progress, total)
