"""Every `.cu` compiles for every architecture, without a GPU or a driver."""

import re

import pytest

from pagedkv.kernels import operations, source

nvrtc = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="no NVRTC (pip install nvidia-cuda-nvrtc cuda-bindings)"
)

ARCHITECTURES = (80, 90, 100, 120)


def compile_text(text, name, architecture, *options):
    """Return (log, PTX, CUBIN); the log is that of a failure where both are None."""
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return log, None, None
    ptx = _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    is_real = architecture.startswith("sm_")
    cubin = _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if is_real else b""
    return log, ptx.decode(), cubin


def _read(program, size_of, read):
    text = b" " * _checked(size_of(program))
    _checked(read(program, text))
    return text.rstrip(b"\0")


def _checked(result):
    status, *values = result
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return values[0] if values else None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("op", operations())
class TestCompiles:
    def test_to_ptx(self, op, architecture):
        log, ptx, _ = compile_text(source(op), f"{op}.cu", f"compute_{architecture}")

        assert ptx is not None, log
        assert f".target sm_{architecture}" in ptx
        assert f".visible .entry {op}(" in ptx

    def test_to_machine_code(self, op, architecture):
        log, _, cubin = compile_text(source(op), f"{op}.cu", f"sm_{architecture}")

        assert cubin is not None, log
        assert cubin.startswith(b"\x7fELF")
        assert "warning" not in log


@pytest.mark.parametrize("op", operations())
def test_no_register_is_spilled_on_hopper(op):
    log, _, _ = compile_text(source(op), f"{op}.cu", "sm_90")

    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


def test_int32_slots_are_a_compile_option():
    wide_stores = {}
    for slot_type in ("int", "long long"):
        log, ptx, _ = compile_text(
            source("slot_mapping"), "slot_mapping.cu", "compute_90", f"-DSLOT_T={slot_type}"
        )
        assert ptx is not None, log
        wide_stores[slot_type] = len(re.findall(r"st\.global\S*\.[bu]64", ptx))

    assert wide_stores["int"] < wide_stores["long long"]


@pytest.mark.parametrize("op", operations())
def test_an_error_is_shown_at_its_line_of_its_file(op):
    lines = source(op).splitlines()
    at = max(k for k, line in enumerate(lines) if line.startswith("{")) + 1
    first = lines.index(f'#line 1 "{op}.cu"')

    log, ptx, _ = compile_text(
        "\n".join([*lines[:at], "    mistake;", *lines[at:]]), "joined.cu", "compute_90"
    )

    assert ptx is None
    assert f'{op}.cu({at - first}): error: identifier "mistake" is undefined' in log
