"""docs/replay.md names every option and every key of the report."""

import argparse
import re
from pathlib import Path

import pytest

from pagedkv.replay.arguments import add_replay_arguments
from pagedkv.replay.job import load_trace
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.report import build_report
from pagedkv.replay.step_log import PHASES

from .runs import options_of, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "replay.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs the repository's docs")
PLAIN = {"--help", "--limit", "--max-model-len", "--max-num-seqs", "--backend", "--no-verify", "--verify"}


def page():
    return PAGE.read_text(encoding="utf-8")


def test_every_option_is_explained():
    parser = argparse.ArgumentParser()
    add_replay_arguments(parser)
    options = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}

    assert {name for name in options - PLAIN if name not in page()} == set()


def test_every_key_of_the_report_is_explained_and_no_other():
    trace = load_trace(ReplayOptions(limit=2))
    engine = run(trace.requests, num_blocks=2000, max_num_batched_tokens=4096)
    rows = [line.split("|")[1] for line in page().splitlines() if line.startswith("| `")]

    explained = {key for row in rows for key in re.findall(r"`(\w+)`", row)}

    assert explained == set(build_report(trace, engine, 1.0))
    assert {phase for phase in PHASES if f"`{phase}`" not in page()} == set()


def test_the_budget_is_as_stated():
    assert "32,768 blocks of 16" in page()
    assert options_of(num_blocks=None, groups=(16,)).resolved_num_blocks() == 32_768
