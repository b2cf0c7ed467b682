"""The wheel, the sdist, an editable install and a plain checkout all give the same package."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from .processes import run_python

ROOT = Path(__file__).resolve().parents[1]
DOOR = ROOT / "pagedkv" / "kernels"
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the repository's tree")

OPERATIONS = (
    "from pagedkv.kernels import definition, operations; print(*map(definition, operations()), sep='\\n')"
)


def build(hook, source, target):
    """Run one hook of the build backend in `source`, offline, and return the file that it made."""
    name = run_python(f"import hatchling.build as b; print(b.{hook}({str(target)!r}))", cwd=source)
    return target / name.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("build_wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def kernel_files(folder):
    return {path.name for path in folder.iterdir() if path.is_file()}


class TestTree:
    def test_top_level_kernels_is_no_package(self):
        """An `__init__.py` there would shadow the `kernels` distribution for all who run from the root."""
        assert not (ROOT / "kernels" / "__init__.py").exists()

    def test_the_two_kernel_folders_share_no_name(self):
        """They become one folder in the wheel."""
        assert kernel_files(ROOT / "kernels") & kernel_files(DOOR) == set()

    def test_another_kernels_package_wins_from_the_root(self, tmp_path):
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("OTHER = True\n")

        assert run_python("import kernels; print(kernels.OTHER)", ROOT, tmp_path, cwd=ROOT) == "True\n"


class TestBuilds:
    def test_top_level_of_the_wheel(self, wheel):
        tops = {name.split("/")[0] for name in names(wheel)}

        assert {top for top in tops if not top.endswith(".dist-info")} == {"pagedkv"}

    def test_wheel_holds_every_file_of_the_package(self, wheel):
        """The kernels beside their door, the type marker, and no bytecode."""
        package = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / "pagedkv").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        kernels = {f"pagedkv/kernels/{name}" for name in kernel_files(ROOT / "kernels")}

        assert {name for name in names(wheel) if ".dist-info/" not in name} == package | kernels
        assert "pagedkv/py.typed" in package

    def test_wheel_from_sdist_is_the_same(self, wheel, sdist, tmp_path):
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path, filter="data")
        source = next(tmp_path.iterdir())

        assert names(build("build_wheel", source, tmp_path)) == names(wheel)

    def test_sdist_holds_what_the_tests_need(self, sdist):
        with tarfile.open(sdist) as archive:
            tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}

        assert tops >= {
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "pagedkv",
            "kernels",
            "tests",
            "benchmarks",
            "docs",
        }


@pytest.fixture(scope="module")
def operations():
    """Modules of the operations as a plain checkout finds them."""
    lines = run_python(OPERATIONS, ROOT, cwd=ROOT).splitlines()
    assert "<function slot_mapping" in {line.split(" at ")[0] for line in lines}
    return [line.split(" at ")[0] for line in lines]


class TestUse:
    """Each way to have the package finds the same operations, away from the checkout."""

    def test_wheel(self, wheel, operations, tmp_path):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")
        code = f"import pagedkv; print(pagedkv.__file__); {OPERATIONS}"

        where, *found = run_python(code, tmp_path / "site", cwd=tmp_path).splitlines()

        assert Path(where).parent == tmp_path / "site" / "pagedkv"
        assert [line.split(" at ")[0] for line in found] == operations

    def test_editable(self, operations, tmp_path):
        """What `pip install -e` lays into site-packages leads back to the checkout."""
        editable = build("build_editable", ROOT, tmp_path)
        with zipfile.ZipFile(editable) as archive:
            archive.extractall(tmp_path / "site")
        code = f"""
import site
site.addsitedir({str(tmp_path / "site")!r})
import pagedkv
print(pagedkv.__file__)
{OPERATIONS}
"""

        where, *found = run_python(code, cwd=tmp_path).splitlines()

        assert Path(where).parent == ROOT / "pagedkv"
        assert [line.split(" at ")[0] for line in found] == operations
