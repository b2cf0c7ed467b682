"""The examples of docs/allocation.md give what their comments say."""

import pytest

from tests.docs_examples import examples_of, run_example

EXAMPLES = examples_of("allocation.md")


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_gives_what_it_says(example):
    run_example(example)
