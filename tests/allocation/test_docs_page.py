"""The examples of docs/allocation.md give what their comments say."""

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "allocation.md"
EXAMPLES = (
    re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL) if PAGE.is_file() else []
)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_gives_what_it_says(example):
    names, checked, lines = {}, 0, example.splitlines()
    for statement in ast.parse(example).body:
        code = ast.get_source_segment(example, statement)
        comment = lines[statement.end_lineno - 1].partition("  # ")[2]
        if isinstance(statement, ast.Expr):
            value = repr(eval(code, names))
            if comment.startswith(("array", "True", *"0123456789[(")):
                assert comment.startswith(value)
                checked += 1
        else:
            exec(code, names)
    assert checked
