"""Whole traces: sources, formats by content, and what is said about bad ones."""

import gzip
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.replay.errors import ReplayInputError
from pagedkv.replay.traces import read_trace

from .real_traces import real_trace

MOONCAKE = (
    b'{"timestamp": 100, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 100, "input_length": 512, "output_length": 6, "hash_ids": [0]}\n'
    b'{"timestamp": 350.5, "input_length": 700, "output_length": 0, "hash_ids": [2, 1]}\n'
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2023-11-16 18:15:50.9951690,396,109\r\n"
    b"2023-11-16 18:15:51.2224670,879,55"
)


def written(tmp_path, content, name="trace.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def test_mooncake_lines_become_arrays(tmp_path):
    trace = read_trace(written(tmp_path, MOONCAKE))

    requests = trace.requests
    assert (trace.format, trace.num_skipped, len(requests)) == ("Mooncake JSON lines", 0, 3)
    np.testing.assert_array_equal([0, 0, 0.2505], requests.arrivals)
    np.testing.assert_array_equal([600, 512, 700], requests.prompt_lens)
    np.testing.assert_array_equal([5, 6, 0], requests.output_lens)
    assert [requests.keys_of(r) for r in range(3)] == [[0, 1], [0], [2, 3]]  # id 1 after 2 is another block


def test_azure_rows_become_arrays_without_prefix_keys(tmp_path):
    trace = read_trace(written(tmp_path, AZURE, "x.csv"))

    assert trace.format == "Azure CSV"
    np.testing.assert_array_equal([0, 4.314579, 4.541877], trace.requests.arrivals)
    np.testing.assert_array_equal([374, 396, 879], trace.requests.prompt_lens)
    np.testing.assert_array_equal([0, 0, 0], trace.requests.hashed_lens)
    assert trace.requests.keys_of(2) == []


@pytest.mark.parametrize("content", [MOONCAKE, AZURE])
@pytest.mark.parametrize("name", ["trace.gz", "trace"])
def test_gzip_is_read_whatever_its_name(tmp_path, content, name):
    plain = read_trace(written(tmp_path, content, "plain"))

    trace = read_trace(written(tmp_path, gzip.compress(content, mtime=0), name))

    np.testing.assert_array_equal(plain.requests.total_lens, trace.requests.total_lens)


@pytest.mark.parametrize("content", [MOONCAKE, gzip.compress(AZURE, mtime=0)])
def test_a_dash_reads_standard_input(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))

    trace = read_trace("-")

    assert (trace.name, len(trace.requests)) == ("<stdin>", 3)
    assert not sys.stdin.buffer.closed


def test_limit_stops_before_later_lines(tmp_path):
    trace = read_trace(written(tmp_path, MOONCAKE + b"rubbish\n"), limit=3)

    assert len(trace.requests) == 3


def test_blank_lines_are_no_requests_but_count_as_lines(tmp_path):
    path = written(tmp_path, b"\n" + MOONCAKE + b"\n \nrubbish")

    with pytest.raises(ReplayInputError, match=r"trace.jsonl:7: expected one JSON object, got rubbish"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r":1: expected at least one request, got an empty trace"),
        (b"\n\n", r":1: expected at least one request, got an empty trace"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n", r":1: expected at least one request"),
        (b"hello\n", r":1: expected a JSON object or the header .*, got hello"),
        (MOONCAKE + b'{"timestamp": 7}\n', r":4: expected input_length .* got none"),
        (
            MOONCAKE + b'{"timestamp": 350, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            r":4: expected a time not before the previous request's, got one 0.0005 s earlier",
        ),
        (AZURE + b"\r\n2023-11-16 18:15:00,1,1", r":5: expected a time not before the previous request's"),
        (MOONCAKE + b"\xff\xfe\n", r":4: expected UTF-8 text, got b'\\xff\\xfe'"),
        (gzip.compress(MOONCAKE * 3, mtime=0)[:-20], r"expected intact gzip data"),
        (b"\x1f\x8bnonsense", r":1: expected intact gzip data"),
    ],
)
def test_bad_traces_name_file_and_line(tmp_path, content, message):
    path = written(tmp_path, content)

    with pytest.raises(ReplayInputError, match=message) as caught:
        read_trace(path)

    assert str(caught.value).startswith(path + ":")


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(ReplayInputError, match=r"gone.jsonl: expected a readable trace, got No such file"):
        read_trace(str(tmp_path / "gone.jsonl"))
    with pytest.raises(ReplayInputError, match=r"expected a readable trace, got Is a directory"):
        read_trace(str(tmp_path))


def test_skip_invalid_counts_and_goes_on(tmp_path):
    first, second, third = MOONCAKE.splitlines(keepends=True)
    early = b'{"timestamp": 99, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
    path = written(tmp_path, b"rubbish\n" + first + b"{\n" + early + second + b"\xff\n" + third)

    trace = read_trace(path, skip_invalid=True)

    assert (trace.num_skipped, len(trace.requests)) == (4, 3)
    np.testing.assert_array_equal([0, 0, 0.2505], trace.requests.arrivals)


def test_skip_invalid_needs_one_request_all_the_same(tmp_path):
    with pytest.raises(ReplayInputError, match=r":1: expected at least one request, got 2 invalid lines"):
        read_trace(written(tmp_path, b"a\nb\n"), skip_invalid=True)


@pytest.mark.parametrize(
    ("name", "rows", "seconds", "longest"),
    [
        ("mooncake_conversation.jsonl", 12_031, 3536.999, 126_527),
        ("mooncake_synthetic.jsonl", 3_993, 1022.025, 191_386),
        ("azure_conv_2023.csv", 19_366, 3501.721937, 14_089),
        ("azure_code_2023.csv", 8_819, 3435.948056, 7_841),
    ],
)
def test_real_traces_are_read_whole(name, rows, seconds, longest):
    requests = read_trace(real_trace(name)).requests

    assert (rows, longest) == (len(requests), requests.total_lens.max())
    assert seconds == pytest.approx(requests.arrivals[-1], abs=1e-9)
