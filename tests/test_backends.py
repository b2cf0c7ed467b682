"""Which backend runs: asked for by name or found, and what is said where it cannot run."""

import importlib.util

import numpy as np
import pytest

from pagedkv import BackendUnavailableError, MultiGroupBlockTable, backends, get_backend
from pagedkv.backends import BACKENDS, why_unavailable


@pytest.fixture
def no_cupy(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else found(name))
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)


def test_numpy_is_always_there(no_cupy):
    assert why_unavailable("numpy") is None
    assert get_backend("numpy").name == "numpy"


def test_auto_falls_back_to_numpy(no_cupy):
    assert get_backend().name == "numpy"
    assert MultiGroupBlockTable([16], 2, 64, 8).backend == "numpy"


@pytest.mark.parametrize("name", ["cupy", "numba"])
def test_a_backend_without_cupy_says_how_to_get_it(no_cupy, name):
    with pytest.raises(
        BackendUnavailableError, match=rf"backend '{name}' is not available: CuPy is not inst.*pip"
    ):
        get_backend(name)
    with pytest.raises(LookupError, match="cuda13"):
        MultiGroupBlockTable([16], 2, 64, 8, backend=name)


@pytest.mark.parametrize("name", ["torch", "", "Numpy"])
def test_a_name_that_no_backend_has(name):
    with pytest.raises(BackendUnavailableError, match="it must be one of auto, numpy, numba, cupy"):
        get_backend(name)


def test_the_environment_chooses_for_auto_alone(no_cupy, monkeypatch):
    monkeypatch.setenv("PAGEDKV_BACKEND", "NumPy")
    assert get_backend().name == "numpy"
    monkeypatch.setenv("PAGEDKV_BACKEND", "cupy")
    with pytest.raises(BackendUnavailableError, match="backend 'cupy' is not available"):
        get_backend()
    assert get_backend("numpy").name == "numpy"
    monkeypatch.setenv("PAGEDKV_BACKEND", "")
    assert get_backend("auto").name == "numpy"
    monkeypatch.setenv("PAGEDKV_BACKEND", "cuda")
    with pytest.raises(BackendUnavailableError, match="must be one of auto, numpy, numba, cupy"):
        get_backend("auto")


def test_auto_takes_cupy_where_it_can_run(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.setattr(backends, "why_unavailable", lambda name: "no" if name == "cupy" else None)
    assert get_backend().name == "numpy"
    if importlib.util.find_spec("cupy") is None or why_unavailable("cupy"):
        return
    monkeypatch.setattr(backends, "why_unavailable", lambda _: None)
    assert get_backend().name == "cupy"


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_a_machine_without_a_device_says_so(monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda, "is_available", lambda: False)
    for driver, message in ((0, "no CUDA driver is installed"), (13000, "the driver shows no CUDA device")):
        monkeypatch.setattr("pagedkv.backends.cuda.runtime.driverGetVersion", lambda version=driver: version)
        with pytest.raises(BackendUnavailableError, match=f"backend 'cupy' is not available: {message}"):
            get_backend("cupy")


def test_arrays_of_a_backend(backend):
    made = get_backend(backend)
    assert made.name == backend
    assert backend in BACKENDS
    host = np.arange(6, dtype=np.int32).reshape(2, 3)
    device = made.asarray(host)
    host[0, 0] = 9
    np.testing.assert_array_equal(np.arange(6).reshape(2, 3), made.asnumpy(device))
    np.testing.assert_array_equal(np.full((2, 2), 7), made.asnumpy(made.full((2, 2), 7, np.int64)))
    assert not made.asnumpy(made.zeros(5, np.int32)).any()
    assert not made.is_device_array(host)
    assert made.is_device_array(device) == (backend != "numpy")
    assert made.slot_dtype == np.int64
    made.synchronize()


def test_a_staging_buffer_is_copied_up_to_its_words(backend):
    made = get_backend(backend)
    buffer, target, stream = made.host_buffer(256), made.zeros(256, np.int32), made.stream(None)
    buffer.words[:] = np.arange(1, 257)
    made.copy(target, buffer, 100, stream)
    made.synchronize()
    np.testing.assert_array_equal([*range(1, 101), *[0] * 156], made.asnumpy(target))


def test_streams_where_there_are_none():
    with pytest.raises(BackendUnavailableError, match="stream must be None on the numpy backend"):
        get_backend("numpy").stream(object())
