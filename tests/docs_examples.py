"""Examples of the docs' pages: each is run, and each value that a comment states is compared."""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
VALUES = ("array(", "True", "[", "(", *"0123456789")


def examples_of(page):
    """Python blocks of a page; none where the docs are not there."""
    path = DOCS / page
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_example(example):
    """Run an example, compare what its comments state, and return its names."""
    names, checked, lines = {}, 0, example.splitlines()
    for statement in ast.parse(example).body:
        code = ast.get_source_segment(example, statement)
        comment = lines[statement.end_lineno - 1].partition("  # ")[2]
        if isinstance(statement, ast.Expr):
            value = repr(eval(code, names))
            if comment.startswith(VALUES):
                assert comment.startswith(value)
                checked += 1
        else:
            exec(code, names)
    assert checked
    return names
