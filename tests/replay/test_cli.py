"""The command: exit status, report files, messages; never a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv
from pagedkv import cli
from pagedkv.replay import job
from pagedkv.replay.engine import Engine
from pagedkv.replay.step_log import PHASES

from ..processes import run_python  # noqa: TID252

KEYS = {
    "requests",
    "completed",
    "rejected",
    "steps",
    "scheduled_tokens",
    "verified_tokens",
    "mismatches",
    "utilization_mean",
    "utilization_reserved_mean",
    "utilization_pow2_mean",
    "prefix_hit_rate",
    "prefix_hit_rate_all",
    "prefix_hit_rate_ideal",
    "evictions",
    "cached_blocks",
    "preemptions",
    "h2d_copies_per_step_max",
    "h2d_bytes_per_step_mean",
    "full_upload_bytes_per_step_mean",
    "host_us_per_step",
    "peak_memory_bytes",
    "wall_seconds",
    "backend",
    "versions",
}
LINE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE * 3)
    return str(path)


def replay(*argv):
    return cli.main(["replay", "--backend", "numpy", *argv])


def test_a_replay_prints_a_table_and_writes_its_report(trace, tmp_path, capsys):
    report_file, plot_file = tmp_path / "report.json", tmp_path / "plot.png"

    status = replay(trace, "--json", str(report_file), "--plot", str(plot_file))

    printed = capsys.readouterr()
    report = json.loads(report_file.read_text())
    assert status == 0
    assert set(report) >= KEYS
    assert (report["requests"], report["completed"], report["mismatches"]) == (3, 3, 0)
    assert {"p50", "p99"} <= set(report["host_us_per_step"]["commit"])
    assert set(report["host_us_per_step"]) == {*PHASES, "total"}
    assert report["scheduled_tokens"] == 3 * 604 - report["prefix_hit_rate"] * 1800
    assert report["peak_memory_bytes"] > 1 << 20
    assert "3 completed, 0 rejected" in printed.out
    assert printed.err == ""  # no bar: nobody watches
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def test_the_builtin_traffic_needs_no_trace(capsys):
    assert replay("--limit", "20", "--seed", "5") == 0
    assert "built-in traffic (seed 5)" in capsys.readouterr().out


def test_a_trace_of_which_everything_is_rejected_is_reported(trace, tmp_path, capsys):
    report_file = tmp_path / "report.json"

    assert (
        replay(trace, "--max-model-len", "5", "--json", str(report_file), "--plot", str(tmp_path / "p.png"))
        == 0
    )

    report = json.loads(report_file.read_text())
    assert (report["rejected"], report["steps"], report["utilization_mean"]) == (3, 0, 0)
    assert "3 rejected" in capsys.readouterr().out


def test_mismatches_end_with_status_1_and_are_shown(trace, monkeypatch, capsys):
    run = Engine.run

    def run_with_a_fault(engine, on_step):
        engine.oracle._kv.flags.writeable = True
        forget = engine.oracle.write
        engine.oracle.write = lambda *args: (forget(*args), engine.oracle._kv.fill(0))
        run(engine, on_step)

    monkeypatch.setattr(Engine, "run", run_with_a_fault)

    assert replay(trace) == 1
    printed = capsys.readouterr()
    assert "mismatch: step 0, row" in printed.err
    assert "found nothing written" in printed.err
    assert "mismatches" in printed.err.splitlines()[-1]


def test_names_are_no_markup(tmp_path, capsys):
    path = tmp_path / "[bold]$x^$ [red.jsonl"
    path.write_text(LINE)

    assert replay(str(path), "--plot", str(tmp_path / "plot.png")) == 0
    assert "[bold]$x^$ [red.jsonl" in capsys.readouterr().out.replace("\n", "")
    assert replay(str(path) + "[/]") == 2
    assert "[red.jsonl[/]: expected a readable trace" in capsys.readouterr().err


def test_invalid_lines_can_be_skipped_and_are_shown(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text("rubbish\n" + LINE)

    assert replay(str(path)) == 2
    assert replay(str(path), "--skip-invalid") == 0
    assert "1 invalid lines skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "argv", "message"),
    [
        (LINE + "{", "", ":2: expected one JSON object, got {"),
        (LINE + LINE.replace("600", "-600"), "", ":2: expected input_length to be an integer in"),
        (LINE + LINE.replace(", 1]", "]"), "", ":2: expected 2 hash_ids"),
        (LINE.replace(": 0,", ": 9,", 1) + LINE, "", ":2: expected a time not before the previous request's"),
        ("", "", ":1: expected at least one request, got an empty trace"),
        (LINE, "--json {folder}/none/x.json", "none/x.json: expected a writable file, got No such file"),
        (LINE, "--plot {folder}", ": expected a writable file, got Is a directory"),
        (LINE, "--kv-memory 1k", "--kv-memory must hold at least 2 blocks"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, content, argv, message, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)

    assert replay(str(path), *argv.format(folder=tmp_path).split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_missing_file_is_status_2(tmp_path, capsys):
    assert replay(str(tmp_path / "none")) == 2
    assert "none: expected a readable trace, got No such file or directory" in capsys.readouterr().err


def test_an_output_is_tried_before_the_run_and_leaves_nothing(trace, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "load_trace", lambda _: pytest.fail("the run had begun"))
    report_file = tmp_path / "report.json"

    assert replay(trace, "--json", str(report_file), "--plot", "/dev/null/x.png") == 2
    assert not report_file.exists()


@pytest.mark.parametrize(
    "outputs",
    [
        ["--json", "{trace}"],
        ["--plot", "{trace}"],
        ["--json", "{folder}/one", "--plot", "{folder}/../{name}/one"],
    ],
)
def test_no_output_replaces_the_trace_or_another(trace, outputs, capsys):
    before = Path(trace).read_bytes()
    folder = Path(trace).parent
    argv = [text.format(trace=trace, folder=folder, name=folder.name) for text in outputs]

    assert cli.main(["replay", str(trace), "--quiet", *argv]) == 2

    assert "expected a file of its own" in capsys.readouterr().err
    assert Path(trace).read_bytes() == before


def test_a_bad_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["replay", "--block-size", "0"])

    message = capsys.readouterr().err
    assert (end.value.code, message.count("\n")) == (2, 1)
    assert "--block-size" in message


def test_a_full_disk_at_the_end_is_status_2(trace, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")

    assert replay(trace, "--json", "/dev/full") == 2
    assert "/dev/full: expected a writable file, got No space left" in capsys.readouterr().err


def test_a_standard_output_that_is_full_is_status_2(trace):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    command = [sys.executable, "-m", "pagedkv", "replay", trace, "--backend", "numpy"]
    root = Path(pagedkv.__file__).parents[1]

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr == "pagedkv replay: <stdout>: expected a writable file, got No space left on device\n"


def test_a_missing_matplotlib_is_named(trace, monkeypatch, capsys):
    monkeypatch.setattr("pagedkv.replay.plot.find_spec", lambda _: None)

    assert replay(trace, "--plot", "x.png") == 2
    assert "pip install pagedkv[plot]" in capsys.readouterr().err


def test_a_backend_that_cannot_run_is_status_2(trace, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises ImportError
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert cli.main(["replay", trace, "--backend", "cupy"]) == 2
    assert "cupy" in capsys.readouterr().err


def test_an_interrupt_is_status_130(trace, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)

    assert replay(trace) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_module_runs_as_the_command_does():
    code = (
        "import runpy, sys; sys.argv = ['pagedkv', 'replay', '--limit', '2', '--backend', 'numpy'];"
        "runpy.run_module('pagedkv', run_name='__main__')"
    )
    root = str(Path(pagedkv.__file__).parents[1])
    with_status = f"try:\n    exec({code!r})\nexcept SystemExit as done:\n    print('status', done.code)"

    printed = run_python(with_status, root)

    assert printed.endswith("status 0\n")


def test_help_names_every_default(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["replay", "--help"])

    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for default in ("default: 16", "default: 256", "default: 8192", "default: 64GiB", "default: 131072"):
        assert default in text


def test_no_command_is_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([])

    assert caught.value.code == 2
