"""Where the real traces are, for tests that read them."""

import os
from pathlib import Path

import pytest

_FOLDER = Path(os.environ.get("PAGEDKV_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")


def real_trace(name):
    """Path of a real trace; the test is skipped where it is absent."""
    path = _FOLDER / name
    if not path.is_file():
        pytest.skip(f"needs the real trace {name} (set PAGEDKV_TRACES to its folder)")
    return str(path)
