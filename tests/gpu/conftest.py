"""Fixtures of the tests on a device: CuPy itself, streams, and streams that stand still."""

import os
import warnings

import pytest

from pagedkv.backends import why_unavailable

from .stalls import Stalls


@pytest.fixture(scope="session")
def cupy():
    """CuPy, where a device is usable."""
    if reason := why_unavailable("cupy"):
        pytest.skip(f"no usable CUDA device: {reason}")
    import cupy

    return cupy


@pytest.fixture
def stream(cupy):
    """A non-blocking stream, idle at the end."""
    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()


@pytest.fixture(scope="session")
def all_stalls(cupy):
    """The stalling kernel, compiled and loaded."""
    return Stalls()


@pytest.fixture
def stall(all_stalls):
    """`stall(stream)` makes a stream stand still until `.release()`; all are released at the end."""
    if os.environ.get("PAGEDKV_UNDER_SANITIZER"):
        pytest.skip("a sanitizer runs kernels one after another: no stream may wait for the host")
    yield all_stalls.begin
    all_stalls.end()


@pytest.fixture(scope="session")
def torch():
    """torch with CUDA; it warns of things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        torch.cuda.init()
    return torch
