"""Python code in a process of its own, for tests of what an import does."""

import os
import subprocess
import sys

_SETTINGS = ("PAGEDKV_", "NUMBA_", "PYTHON")


def run_python(code, *path, cwd=None, **extra):
    """Run code with `path` alone as PYTHONPATH and none of our or Numba's settings; return its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS)}
    env = kept | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"} | extra
    command = [sys.executable, "-P", "-c", code]  # -P: the working directory is not on the path
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
