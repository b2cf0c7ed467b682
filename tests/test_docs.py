"""The README and the docs are true: commands, example, links, and every doctest of the library."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest

import pagedkv

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
pytestmark = pytest.mark.skipif(not README.is_file(), reason="needs the repository's README")

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def public_modules():
    """Modules of the package whose path has no underscore name."""
    walk = pkgutil.walk_packages(pagedkv.__path__, "pagedkv.")
    return ["pagedkv", *(m.name for m in walk if not any(part.startswith("_") for part in m.name.split(".")))]


def import_or_skip(name):
    """Import a module; one that needs a GPU library may be absent with it, nothing else may."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("cupy", "cupyx", "numba_cuda"):
            raise
        pytest.skip(f"{name} needs {error.name}, which is not installed")


class TestReadme:
    def test_two_commands_set_up_everything(self):
        """.ci/run runs the same two lines, found by the same words."""
        lines = [line for line in README.read_text(encoding="utf-8").splitlines() if ".venv" in line]
        commands = [line for line in lines if line.startswith("python3 -m venv .venv && ")]

        assert len(commands) == 2
        assert commands[0].endswith("&& .venv/bin/pagedkv replay")
        assert commands[1].endswith("&& .venv/bin/python -m pytest")

    def test_example_prints_what_is_shown(self):
        blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
        at = next(i for i, (language, _) in enumerate(blocks) if language == "python")
        (_, code), (_, expected) = blocks[at], blocks[at + 1]
        printed = io.StringIO()

        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})

        assert printed.getvalue() == expected
        assert len(code.splitlines()) <= 20


class TestPages:
    @pytest.mark.parametrize("page", [README, *PAGES], ids=lambda path: path.name)
    def test_links_lead_somewhere(self, page):
        links = LINK.findall(page.read_text(encoding="utf-8"))

        assert [link for link in links if not (page.parent / link).exists()] == []

    def test_index_lists_every_page(self):
        tree = (
            (ROOT / "docs" / "index.md")
            .read_text(encoding="utf-8")
            .split("```{toctree}", 1)[1]
            .split("```")[0]
        )
        listed = {line.strip() for line in tree.splitlines() if line.strip() and not line.startswith(":")}

        assert {page.stem for page in PAGES} - {"index"} == listed

    def test_errors_page_lists_every_error(self):
        page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")

        assert set(pagedkv.errors.__all__) == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))


@pytest.mark.parametrize("name", public_modules())
def test_doctests(name):
    module = import_or_skip(name)

    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)

    assert failed == 0


def test_there_are_doctests():
    """The test above is worth something: the main classes show their use."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    classes = {name: value for name, value in vars(pagedkv).items() if isinstance(value, type)}

    shown = {name for name, value in classes.items() if any(t.examples for t in finder.find(value, name))}

    assert shown >= {"BlockTable", "MultiGroupBlockTable", "BlockPool", "SequenceBlockTable"}
