"""The bar: shown on a terminal, silent elsewhere and when asked."""

import io

import pytest
from rich.console import Console

from pagedkv.replay.engine import Engine
from pagedkv.replay.progress import watched

from .runs import options_of, requests_of


def shown(*, terminal, quiet):
    stream = io.StringIO()
    engine = Engine(requests_of((0.0, 20, 4)), options_of())
    with watched(Console(file=stream, force_terminal=terminal, width=100), 1, quiet=quiet) as watch:
        engine.run(watch)
    return stream.getvalue()


def test_a_terminal_sees_requests_and_rate():
    text = shown(terminal=True, quiet=False)

    assert "requests" in text
    assert "Mtok/s" in text


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True), (False, True)])
def test_nobody_else_does(terminal, quiet):
    assert shown(terminal=terminal, quiet=quiet) == ""
