"""Report: what a run showed, as the JSON document."""

import platform
import resource
import sys
from typing import Any

from pagedkv import __version__
from pagedkv.replay.engine import Engine
from pagedkv.replay.ideal import ideal_hit_rate
from pagedkv.replay.options import ReplayOptions
from pagedkv.replay.traces import Trace

__all__ = ["build_report"]


def build_report(trace: Trace, engine: Engine, wall_seconds: float) -> dict[str, Any]:
    """Return the report of a finished run; every value is a JSON type.

    Lengths are in tokens, memory in bytes, `host_us_per_step` in microseconds, shares in [0, 1];
    ``docs/replay.md`` says what each key means.
    """
    log, tally, findings = engine.log, engine.tally, engine.findings
    cache = engine.memory.manager.stats()
    hits = cache.num_hit_tokens + cache.num_rehit_tokens
    queried = cache.num_queried_tokens + cache.num_requeried_tokens
    return {
        "trace": trace.name,
        "format": trace.format,
        "requests": len(trace.requests),
        "skipped_lines": trace.num_skipped,
        "completed": tally.num_completed,
        "rejected": tally.num_rejected,
        "steps": log.num_steps,
        "scheduled_tokens": tally.num_scheduled_tokens,
        "verified": engine.oracle is not None,
        "verified_tokens": findings.num_verified,
        "mismatches": findings.num_mismatches,
        "mismatch_examples": findings.examples,
        "utilization_mean": log.mean("utilization"),
        "utilization_reserved_mean": log.mean("utilization_reserved"),
        "utilization_pow2_mean": log.mean("utilization_pow2"),
        "prefix_hit_rate": cache.hit_rate,
        "prefix_hit_rate_all": hits / max(queried, 1),
        "prefix_hit_rate_ideal": ideal_hit_rate(trace.requests, engine.layout.alignment),
        "evictions": cache.pool.num_evictions,
        "cached_blocks": cache.pool.num_cached_blocks,
        "preemptions": cache.num_preemptions,
        "running_mean": log.mean("num_reqs"),
        "h2d_copies_per_step_max": int(log.column("h2d_copies").max(initial=0)),
        "h2d_bytes_per_step_mean": log.mean("h2d_bytes"),
        "full_upload_bytes_per_step_mean": log.mean("full_upload_bytes"),
        "host_us_per_step": log.host_us(),
        "simulated_seconds": engine.arrivals.now,
        "wall_seconds": wall_seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "backend": engine.tables.backend,
        "options": _options(engine.options, engine),
        "versions": _versions(),
    }


def peak_memory_bytes() -> int:
    """Most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _options(options: ReplayOptions, engine: Engine) -> dict[str, Any]:
    return {
        "arrivals": options.arrivals,
        "step_ms": options.step_ms,
        "token_us": options.token_us,
        "num_blocks": engine.num_blocks,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "groups": [_group(spec) for spec in engine.layout.specs],
        "cp_world_size": options.context_parallel.world_size,
        "cp_interleave": options.context_parallel.interleave,
        "watermark": options.watermark,
        "prefix_caching": options.prefix_caching,
        "hash": options.hash,
        "compact_every": options.compact_every,
        "limit": options.limit,
        "seed": options.seed,
        "num_samples": options.num_samples,
    }


def _group(spec: Any) -> dict[str, Any]:
    return {
        "block_size": spec.block_size,
        "sliding_window": spec.sliding_window,
        "cp_sharded": spec.cp_sharded,
        "kernel_views": [list(view) for view in spec.views()],
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "pagedkv": __version__}
    loaded = [name for name in ("numpy", "numba", "cupy") if name in sys.modules]
    return versions | {name: str(sys.modules[name].__version__) for name in loaded}
