"""Slices of real traces: completed, verified, and as full as paging promises."""

import pytest

from pagedkv.replay.engine import Engine
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.traces import read_trace
from pagedkv.specs import ContextParallel, KVCacheGroupSpec

from .real_traces import real_trace


@pytest.mark.parametrize(
    ("name", "limit", "options"),
    [
        ("mooncake_conversation.jsonl", 150, {"arrivals": "immediate"}),
        ("mooncake_conversation.jsonl", 100, {"arrivals": "trace"}),
        ("mooncake_synthetic.jsonl", 40, {"arrivals": "immediate", "num_blocks": 8000}),
        ("azure_conv_2023.csv", 300, {"arrivals": "immediate"}),
        ("azure_conv_2023.csv", 200, {"arrivals": "trace"}),
        ("azure_code_2023.csv", 200, {"arrivals": "immediate"}),
        ("azure_conv_2023.csv", 300, {"arrivals": "immediate", "num_blocks": 600, "watermark": 0.0}),
        (
            "mooncake_conversation.jsonl",
            30,
            {
                "arrivals": "immediate",
                "groups": (KVCacheGroupSpec(16, (8,)), KVCacheGroupSpec(16, (8,), sliding_window=4096)),
                "context_parallel": ContextParallel(2, 0, 8),
            },
        ),
    ],
)
def test_a_slice_completes_verified(name, limit, options):
    trace = read_trace(real_trace(name), limit=limit)

    engine = Engine(trace.requests, ReplayOptions(backend="numpy", **options))
    engine.run()

    assert engine.tally.num_completed == limit
    assert engine.findings.examples == []
    assert engine.findings.num_mismatches == 0
    assert engine.findings.num_verified > engine.tally.num_scheduled_tokens // 2
    assert engine.log.mean("utilization") >= 0.98
    assert (engine.memory.manager.stats().num_preemptions > 0) == (options.get("num_blocks") == 600)
    assert engine.log.column("h2d_copies").max() == 1
