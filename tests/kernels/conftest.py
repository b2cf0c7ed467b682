import pytest

from .forms import BY_NAME, FORMS

GPU = {"cupy", "numba"}


@pytest.fixture(
    scope="session", params=[pytest.param(f, marks=[pytest.mark.gpu] * (f in GPU)) for f in FORMS]
)
def form(request, tmp_path_factory):
    """One form of the kernels; a form whose tools are absent is skipped with its reason."""
    return BY_NAME[request.param](tmp_path_factory.mktemp(f"kernels_{request.param}"))
