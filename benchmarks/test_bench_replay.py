"""The main job: a slice of traffic on the library's tables and on plain ones, and the full real traces.

`extra_info` holds the share of each phase in a step's host time, the bytes per step, and the whole
report's figures for the full traces. The full traces (about a minute each) run only where timing is on:
`pytest benchmarks/test_bench_replay.py --benchmark-enable`.
"""

import os
from pathlib import Path

import pytest

from pagedkv.replay.engine import Engine
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.step_log import PHASES
from pagedkv.replay.traces import read_trace
from pagedkv.replay.traffic import generate_trace
from pagedkv.specs import KVCacheGroupSpec

from .plain_tables import PlainTables

TRACES = Path(os.environ.get("PAGEDKV_TRACES") or Path(__file__).resolve().parents[2] / "shared" / "traces")
GROUPS = {
    "full": (KVCacheGroupSpec(16),),
    "full and window": (KVCacheGroupSpec(16), KVCacheGroupSpec(16, sliding_window=1024)),
}


def figures(engine):
    """What a run's report says about a step, for `extra_info`."""
    us = engine.log.host_us()
    total = us["total"]["mean"]
    return {
        "steps": engine.log.num_steps,
        "step_us_mean": round(total, 1),
        "percent_by_phase": {phase: round(100 * us[phase]["mean"] / total, 1) for phase in PHASES},
        "h2d_bytes_per_step_mean": round(engine.log.mean("h2d_bytes")),
        "full_upload_bytes_per_step_mean": round(engine.log.mean("full_upload_bytes")),
        "prefix_hit_rate": round(engine.memory.manager.stats().hit_rate, 4),
        "utilization_mean": round(engine.log.mean("utilization"), 4),
        "verified_tokens": engine.findings.num_verified,
        "mismatches": engine.findings.num_mismatches,
    }


@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize("tables", ["pagedkv", "plain"])
def test_replay_slice(benchmark, monkeypatch, groups, tables):
    """Built-in traffic, not verified while the clock runs; verified once before."""
    num_requests = 60 if benchmark.disabled else 400
    benchmark.group = f"replay/{num_requests} built-in requests, {groups}"
    if tables == "plain":
        monkeypatch.setattr("pagedkv.replay.ranks.MultiGroupBlockTable", PlainTables)
    requests = generate_trace(num_requests).requests
    options = {"arrivals": "immediate", "groups": GROUPS[groups], "backend": "numpy", "max_model_len": 32_768}

    def run(*, verify):
        engine = Engine(requests, ReplayOptions(verify=verify, **options))
        engine.run()
        return engine

    assert run(verify=True).findings.num_mismatches == 0

    engine = benchmark.pedantic(run, kwargs={"verify": False}, rounds=3)

    benchmark.extra_info.update(figures(engine))
    assert engine.tally.num_completed == num_requests


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl", "azure_conv_2023.csv"])
def test_replay_full_trace(benchmark, name):
    """A whole trace, every request waiting from the start, verified."""
    benchmark.group = "replay/full trace, verified"
    if benchmark.disabled:
        pytest.skip("a full trace takes a minute (add --benchmark-enable)")
    if not (TRACES / name).is_file():
        pytest.skip(f"needs the real trace {name} (set PAGEDKV_TRACES to its folder)")
    requests = read_trace(str(TRACES / name)).requests

    def run():
        engine = Engine(requests, ReplayOptions(arrivals="immediate", backend="numpy"))
        engine.run()
        return engine

    engine = benchmark.pedantic(run, rounds=1)

    benchmark.extra_info.update(figures(engine))
    assert engine.tally.num_completed == len(requests)
    assert engine.findings.num_mismatches == 0
