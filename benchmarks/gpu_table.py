"""Print the GPU benchmarks of a results file as Markdown: python benchmarks/gpu_table.py benchmarks.json.

The file is what `benchmarks/gpu_suite.sh RESULTS bench` leaves in RESULTS/benchmarks.json.
"""

import json
import sys
from pathlib import Path


def main(path):
    benchmarks = json.loads(Path(path).read_text())["benchmarks"]
    steps = [b for b in benchmarks if b["name"].startswith("test_decode_step[")]
    slots = [b for b in benchmarks if b["name"].startswith("test_slot_mapping")]
    print(table(STEP_COLUMNS, [step_row(b) for b in steps]))
    print(table(DEVICE_COLUMNS, [device_row(b) for b in steps]))
    print(table(SLOT_COLUMNS, [slot_row(b) for b in slots]))
    batches = [b for b in benchmarks if b["name"].startswith("test_decode_step_of_a_batch")]
    print(table(BATCH_COLUMNS, [batch_row(b) for b in batches]))
    for b in benchmarks:
        if b["name"] == "test_context_does_not_matter":
            print(b["extra_info"])
        if b["name"].startswith("test_churn_step"):
            print(b["name"], f"median {1e6 * b['stats']['median']:.1f} us", b["extra_info"])


STEP_COLUMNS = (
    "requests, tokens, groups",
    "alone, cupy",
    "alone, numba",
    "in turns, cupy",
    "numba",
    "stable rows",
    "by hand",
    "empty graph",
    "H2D bytes",
)
DEVICE_COLUMNS = (
    "requests, tokens, groups",
    "done, cupy",
    "done, by hand",
    "step's graph, launch to idle",
    "one copy's graph",
    "ratio",
)
SLOT_COLUMNS = (
    "tokens",
    "cupy",
    "numba",
    "device copy",
    "block a request",
    "over copy",
    "over copy, 20 in a graph",
)

BATCH_COLUMNS = (
    "requests, tokens, groups, backend",
    "alone",
    "in turns",
    "stable rows",
    "managed",
    "per request",
    "per request over in turns",
)


def step_row(bench):
    extra = bench["extra_info"]
    names = (
        "cupy alone",
        "numba alone",
        "cupy",
        "numba",
        "cupy, stable rows",
        "by hand",
        "floor: empty graph",
    )
    times = [f"{extra[n]['host_us_p50']:.1f} / {extra[n]['host_us_p99']:.0f}" for n in names]
    return [case_of(bench), *times, str(extra["h2d_bytes"])]


def device_row(bench):
    extra = bench["extra_info"]
    step, copy = (extra["device"][f"{name}_by_host_us"] for name in ("step", "one copy"))
    done = [f"{extra[name]['done_us_p50']:.1f}" for name in ("cupy", "by hand")]
    return [case_of(bench), *done, f"{step:.1f}", f"{copy:.1f}", f"{step / copy:.2f}"]


def slot_row(bench):
    extra = bench["extra_info"]
    single = [f"{extra[f'{n}_us_1_in_a_graph']:.1f}" for n in ("cupy", "numba", "copy", "block_per_request")]
    ratios = [f"{extra[f'over_copy_{calls}_in_a_graph']:.2f}" for calls in (1, 20)]
    return [f"{extra['num_tokens']:,}", *single, *ratios]


def batch_row(bench):
    extra = bench["extra_info"]
    names = ("one call alone", "one call", "one call, stable rows", "managed", "per request")
    times = [f"{extra[n]['host_us_p50']:.1f} / {extra[n]['host_us_p99']:.0f}" for n in names]
    return [case_of(bench), *times, str(extra["per_request_over_one_call"])]


def case_of(bench):
    return bench["name"].split("[")[1].rstrip("]").replace("-", ", ")


def table(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1])
