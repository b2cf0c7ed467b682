"""What `import pagedkv` loads, where it works, and which room opens into which."""

import ast
import importlib
import json
import os
import pydoc
import re
import shutil
from graphlib import TopologicalSorter
from inspect import ismodule
from pathlib import Path

import pytest

import pagedkv
from pagedkv.kernels import HOME

from .processes import run_python

PACKAGE = Path(pagedkv.__file__).resolve().parent
ROOT = PACKAGE.parent
STRUCTURE = ROOT / "docs" / "structure.md"
GPU_MODULES = {
    "cupy": r"pagedkv\.(backends\.cuda|kernels\._cuda|kernels\._numba)",
    "cupyx": r"pagedkv\.backends\.cuda",
    "numba.cuda": r"pagedkv\.kernels\.(_numba|[a-z]\w*_numba)",
}
"""Where each GPU library may be imported: the GPU backends and what they launch."""


def modules():
    """{dotted name: file} of the package, the kernels counted as `pagedkv.kernels.<name>`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("pagedkv", *path.relative_to(PACKAGE).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found | {f"pagedkv.kernels.{path.stem}": path for path in sorted(HOME.glob("*.py"))}


MODULES = modules()


def statements(node, at_import):
    """All nodes below `node`; with `at_import` only what runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if at_import and lazy:
            continue
        if at_import and typing:
            for other in child.orelse:
                yield other
                yield from statements(other, at_import)
            continue
        yield child
        yield from statements(child, at_import)


def imports(name, at_import=False):
    """Dotted names that a module imports; `from a import b` counts as `a.b` where that is a module."""
    is_package = MODULES[name].name == "__init__.py"
    for node in statements(ast.parse(MODULES[name].read_text(encoding="utf-8")), at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*up, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in MODULES or base == "numba" else base


def room(name):
    """First part below the package: `pagedkv.tables.device` is in room `tables`."""
    return name.split(".")[1] if "." in name else "__init__"


def floors():
    """{room: floor}, read from the list in docs/structure.md."""
    block = STRUCTURE.read_text(encoding="utf-8").split("## The floors", 1)[1].split("```")[1]
    lines = [line.split() for line in block.splitlines()[1:] if line.strip()]
    assert [line[0] for line in lines] == [str(i) for i in reversed(range(len(lines)))]
    return {name: int(line[0]) for line in lines for name in line[1:]}


@pytest.fixture
def importable(tmp_path):
    """A folder in which cupy, cupyx, torch and matplotlib can be imported, installed or not."""
    for library in ("cupy", "cupyx", "torch", "matplotlib"):
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").touch()
    return tmp_path


OPTIONAL = "{m for m in sys.modules if m.split('.')[0] in ('cupy', 'cupyx', 'torch', 'matplotlib')}"
CUDA = "{m for m in sys.modules if m.startswith(('numba.cuda', 'numba_cuda'))}"


class TestWhatIsLoaded:
    def test_import_loads_no_optional_library(self, importable):
        """Neither CuPy nor numba.cuda nor torch, and nothing that draws."""
        code = f"import json, sys; import pagedkv; print(json.dumps(sorted({OPTIONAL} | {CUDA})))"

        assert json.loads(run_python(code, importable, ROOT)) == []

    def test_numpy_backend_loads_no_optional_library(self, importable):
        """A whole step on the NumPy backend needs no more than the import does."""
        code = f"""
import json, sys
import numpy as np
import pagedkv
table = pagedkv.MultiGroupBlockTable([16], 4, 256, 64, backend="numpy")
table.add_row([[3, 4]], 0)
step = table.commit(1, np.array([0, 2], np.int32), np.array([16], np.int32))
assert list(step.slot_mapping(0)[:2]) == [64, 65]
print(json.dumps(sorted({OPTIONAL} | {CUDA})))
"""
        assert json.loads(run_python(code, importable, ROOT)) == []

    def test_the_command_line_loads_no_optional_library(self, importable):
        code = f"""
import json, sys
import pagedkv.cli
print(json.dumps(sorted({OPTIONAL} | {CUDA})))
"""
        assert json.loads(run_python(code, importable, ROOT)) == []


class TestWhatIsOffered:
    def test_all_lists_every_name_that_is_imported_and_nothing_else(self):
        offered = {n for n, value in vars(pagedkv).items() if not n.startswith("_") and not ismodule(value)}

        assert sorted(pagedkv.__all__) == sorted(offered)

    @pytest.mark.parametrize("part", ["allocation", "batch"])
    def test_what_a_part_offers_the_package_offers(self, part):
        assert set(importlib.import_module(f"pagedkv.{part}").__all__) <= set(pagedkv.__all__)

    def test_help_lists_the_classes(self):
        text = pydoc.render_doc(pagedkv, renderer=pydoc.plaintext)

        for name in ("InputBatch", "KVCacheManager", "MultiGroupBlockTable", "SlidingWindowSpec"):
            assert f"class {name}(" in text


NOWHERE = {"HOME": os.devnull, "XDG_CACHE_HOME": f"{os.devnull}/cache"}


@pytest.fixture
def unwritable(tmp_path):
    """A copy of the package in which Numba can make no cache folder, for root neither.

    A file stands where each `__pycache__` folder would be, and HOME is no folder (NOWHERE).
    """
    for source in ("pagedkv", "kernels"):
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [path for path in tmp_path.rglob("*") if path.is_dir()]:
        (folder / "__pycache__").touch()
    (tmp_path / "probe.py").write_text("import numba\n\n@numba.njit(cache=True)\ndef f():\n    return 1\n")
    (tmp_path / "__pycache__").touch()
    return tmp_path


@pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the repository's tree")
class TestNoCacheFolder:
    def test_numba_itself_cannot_cache_there(self, unwritable):
        """The premise of the next test: without care, the import would raise."""
        code = "try:\n import probe\nexcept RuntimeError as e:\n print('cannot cache' in str(e))"

        assert run_python(code, unwritable, **NOWHERE) == "True\n"

    def test_import_and_compiled_loops_work(self, unwritable):
        code = """
import pagedkv
print(pagedkv.BlockPool(8).allocate(3).tolist(), pagedkv.__file__)
"""
        assert (
            run_python(code, unwritable, **NOWHERE) == f"[1, 2, 3] {unwritable / 'pagedkv' / '__init__.py'}\n"
        )


@pytest.mark.skipif(not STRUCTURE.is_file(), reason="needs the repository's docs")
class TestRooms:
    def test_every_room_has_a_floor_and_every_floor_its_rooms(self):
        assert {room(name) for name in MODULES} == set(floors())

    def test_rooms_import_from_lower_floors_only(self):
        """Rooms beside each other on one floor do not know each other either."""
        floor = floors()
        wrong = [
            f"{name} (floor {floor[room(name)]}) imports {other} (floor {floor[room(other)]})"
            for name in MODULES
            for other in imports(name)
            if other.split(".")[0] == "pagedkv"
            and room(other) != room(name)
            and floor[room(other)] >= floor[room(name)]
        ]

        assert wrong == []

    def test_no_import_cycle(self):
        graph = {
            name: {o for o in imports(name, at_import=True) if o in MODULES} - {name} for name in MODULES
        }

        order = list(TopologicalSorter(graph).static_order())  # raises CycleError where there is one

        assert set(order) == set(MODULES)


class TestBannedImports:
    @pytest.mark.parametrize("library", ["torch", "jax", "triton"])
    def test_never(self, library):
        assert [n for n in MODULES for o in imports(n) if o.split(".")[0] == library] == []

    @pytest.mark.parametrize("library", GPU_MODULES)
    def test_gpu_libraries_stay_in_the_gpu_backends(self, library):
        users = {n for n in MODULES for o in imports(n) if f"{o}.".startswith(f"{library}.")}

        assert {n for n in users if not re.fullmatch(GPU_MODULES[library], n)} == set()

    def test_the_reader_of_imports_sees_them(self):
        """The checks above are worth something: what is known to be imported is found."""
        assert "numpy" in set(imports("pagedkv.constants"))
        assert "numba.cuda" in set(imports("pagedkv.kernels.slot_mapping_numba"))
        assert "pagedkv.kernels._spec" in set(imports("pagedkv.kernels.slot_mapping_numpy", at_import=True))
