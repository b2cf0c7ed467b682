"""The three forms of an operation are one: name, arguments, order, types; and one layout for all."""

import inspect
import re

import pytest

from pagedkv import constants
from pagedkv.kernels import HOME, _layout, definition, numba_kernel, operations
from pagedkv.kernels._grid import BLOCK_THREADS, GRIDS
from pagedkv.kernels._spec import spec_of, spec_of_cu


def cu_text(op):
    return (HOME / f"{op}.cu").read_text(encoding="utf-8")


def test_the_operations_are_those_of_the_folder():
    expected = {"apply_writes", "expand_blocks", "gather_rows"}
    expected |= {"slot_mapping", "split_batch", "state_indices"}
    assert expected <= set(operations())
    assert set(operations()) == {path.name.removesuffix("_numpy.py") for path in HOME.glob("*_numpy.py")}
    assert set(operations()) == {path.name.removesuffix("_numba.py") for path in HOME.glob("*_numba.py")}


@pytest.mark.parametrize("op", operations())
class TestTwins:
    def test_cuda_c_declares_what_the_definition_declares(self, op):
        spec = spec_of(definition(op))

        cu = spec_of_cu(cu_text(op), op)

        assert list(spec) == list(cu)
        assert {name: (arg.dtype, bool(arg.shape), arg.out) for name, arg in spec.items()} == cu

    def test_numba_takes_the_definitions_arguments_in_order(self, op):
        kernel = numba_kernel(op)
        function = getattr(kernel, "py_func", None) or kernel.fn  # .fn in the simulator

        assert list(spec_of(definition(op))) == list(inspect.signature(function).parameters)

    def test_each_cuda_argument_ends_with_its_shape(self, op):
        comments = {}
        parameter = r"\*\s?(?:__restrict__ )?(\w+)[,)]\s+// \[([^\]]*)\](, out)?"
        for name, shape, out in re.findall(parameter, cu_text(op)):
            comments[name] = (tuple(re.sub(r"\s*([+*])\s*", r"\1", shape).split(", ")), bool(out))

        arrays = {name: (arg.shape, arg.out) for name, arg in spec_of(definition(op)).items() if arg.shape}
        assert arrays == comments

    def test_the_header_names_the_twins_and_the_block(self, op):
        header = cu_text(op).split('extern "C"', 1)[0]

        assert header.startswith(f"// {op}: ")
        assert f"Definition: {op}_numpy.py.  Twin: {op}_numba.py." in header
        assert f"block ({BLOCK_THREADS},)" in header
        assert re.search(rf"__launch_bounds__\({BLOCK_THREADS}(, \d)?\) {op}\(", cu_text(op))

    def test_nothing_is_included(self, op):
        assert "#include" not in cu_text(op)

    def test_it_has_a_launch_shape(self, op):
        assert op in GRIDS


def test_cuda_c_and_python_number_the_layout_alike():
    common = (HOME / "common.cuh").read_text(encoding="utf-8")
    python = {name: value for name, value in vars(_layout).items() if name.isupper()}
    python |= {"PAD_SLOT_ID": constants.PAD_SLOT_ID, "NULL_BLOCK_ID": constants.NULL_BLOCK_ID}

    enums = ", ".join(re.findall(r"enum \w+ \{([^}]*)\}", common))

    assert python == {name: int(value) for name, value in re.findall(r"(\w+) = (-?\d+)", enums)}


def test_both_forms_of_gather_rows_take_as_many_positions_at_a_time():
    tile = re.search(r"GATHER_TILE = (\d+)", cu_text("gather_rows"))
    numba_text = (HOME / "gather_rows_numba.py").read_text(encoding="utf-8")

    assert tile[1] == re.search(r"^TILE = (\d+)", numba_text, re.MULTILINE)[1]
    assert GRIDS["gather_rows"](1 + int(tile[1]), 1) == (2, 1)


def test_the_table_of_operations_has_a_row_for_each():
    text = (HOME / "README.md").read_text(encoding="utf-8")

    rows = re.findall(r"^\| \[(\w+)\]\((\w+)_numpy\.py\)", text, re.MULTILINE)

    assert rows == [(op, op) for op in operations()]
