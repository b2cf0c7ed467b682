"""Fixtures for all tests: the backends, each under the same tests."""

import pytest

from pagedkv.backends import why_unavailable

GPU_BACKENDS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("numba", "cupy")]


def name_of(request):
    if reason := why_unavailable(request.param):
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


@pytest.fixture(scope="session", params=["numpy", *GPU_BACKENDS])
def backend(request):
    """Name of a backend; one that cannot run here is skipped with its reason."""
    return name_of(request)


@pytest.fixture(scope="session", params=GPU_BACKENDS)
def gpu_backend(request):
    """Name of a backend that takes device arrays."""
    return name_of(request)
