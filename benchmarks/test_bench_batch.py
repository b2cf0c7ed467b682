"""A decode step of a whole batch on the host: InputBatch's calls beside a loop over the requests.

On a GPU the contenders take turns, as in test_bench_step.py: compare the figures of one test with each other.
"""

import numpy as np
import pytest

from pagedkv.backends import why_unavailable

from .batch_contenders import DecodeTraffic, Managed, OneCall, PerRequest
from .turns import Clock, Steps, take_turns

STEPS = [(256, 8192, 1), (256, 8192, 4), (1024, 8192, 4)]
BACKENDS = ["numpy", *[pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "numba")]]


class NoStream:
    """The NumPy backend's: there is nothing to wait for."""

    def synchronize(self):
        pass


def stream_of(backend):
    if reason := why_unavailable(backend):
        pytest.skip(f"backend {backend}: {reason}")
    if backend == "numpy":
        return NoStream(), None
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    return stream, stream


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_reqs", "context", "num_groups"), STEPS)
def test_decode_step_of_a_batch(benchmark, backend, num_reqs, context, num_groups):
    stream, given = stream_of(backend)
    benchmark.group = f"batch/{num_reqs} requests, {context} tokens, {num_groups} groups, {backend}"
    traffic = DecodeTraffic(num_reqs, context, num_groups)
    contenders = {
        "one call": OneCall(traffic, given, backend),
        "one call, stable rows": OneCall(traffic, given, backend, stable_rows=True),
        "managed": Managed(traffic, given, backend),
        "per request": PerRequest(traffic, given, backend),
    }
    stream.synchronize()
    clocks = {n: Clock(c, Steps(c, traffic).next, stream) for n, c in contenders.items()}
    table = contenders["one call"].table
    clocks["one call"].run(1, keep=False)  # the first begins with a reset, which has a copy of its own
    copies = table.num_h2d_copies
    clocks["one call"].run(1, keep=False)
    assert table.num_h2d_copies == copies + 1, "one copy a step, whatever the groups"

    take_turns(clocks, benchmark, "one call", slow="per request")

    alone = Clock(contenders["one call"], clocks["one call"].arguments, stream)
    alone.run(2 if benchmark.disabled else 800)
    benchmark.extra_info["one call alone"] = alone.figures()
    mine, loop = (float(np.median(clocks[name].host)) for name in ("one call", "per request"))
    benchmark.extra_info["per_request_over_one_call"] = round(loop / mine, 1)
