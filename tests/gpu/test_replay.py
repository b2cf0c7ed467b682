"""The main job on a device: slices of real traces and of the built-in traffic, every token verified."""

import json

import pytest

from pagedkv.cli import main
from pagedkv.replay.engine import Engine
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.traces import read_trace
from pagedkv.specs import ContextParallel, KVCacheGroupSpec
from tests.replay.real_traces import real_trace

pytestmark = pytest.mark.gpu

WINDOWED = {
    "groups": (KVCacheGroupSpec(16, (8,)), KVCacheGroupSpec(16, (8,), sliding_window=4096)),
    "context_parallel": ContextParallel(2, 0, 8),
}


@pytest.mark.parametrize(
    ("name", "limit", "options"),
    [
        ("mooncake_conversation.jsonl", 40, {}),
        ("azure_conv_2023.csv", 150, {}),
        ("azure_code_2023.csv", 60, {"num_blocks": 1200, "watermark": 0.0}),
        ("mooncake_conversation.jsonl", 12, WINDOWED),
    ],
    ids=["mooncake", "azure conversation", "azure code, few blocks", "mooncake, windows, two ranks"],
)
def test_a_real_slice_is_verified_on_the_device(gpu_backend, name, limit, options):
    trace = read_trace(real_trace(name), limit=limit)
    engine = Engine(trace.requests, ReplayOptions(backend=gpu_backend, arrivals="immediate", **options))
    engine.run()
    assert engine.tally.num_completed == limit
    assert engine.findings.examples == []
    assert engine.findings.num_mismatches == 0
    assert engine.findings.num_verified > engine.tally.num_scheduled_tokens // 2
    assert engine.log.column("h2d_copies").max() == 1


def test_the_command_verifies_the_built_in_traffic(gpu_backend, tmp_path, capsys):
    report = tmp_path / "report.json"
    options = [
        "--limit",
        "30",
        "--arrivals",
        "immediate",
        "--groups",
        "full,window:1024",
        "--kernel-views",
        "8,4:6",
        "--quiet",
    ]
    status = main(["replay", "--backend", gpu_backend, "--json", str(report), *options])
    assert status == 0, capsys.readouterr().err
    written = json.loads(report.read_text())
    assert written["mismatches"] == 0
    assert written["backend"] == gpu_backend
    assert written["verified_tokens"] > 0
