"""Lines of both trace formats, good and bad."""

import re

import pytest

from pagedkv.replay.errors import TraceLineError
from pagedkv.replay.trace_formats import TraceRequest, azure_parser, find_parser, parse_mooncake

HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
parse_azure = azure_parser(HEADER)


def mooncake(timestamp="27", input_length="513", output_length="3", hash_ids="[0, 7]"):
    return (
        f'{{"timestamp": {timestamp}, "input_length": {input_length}, '
        f'"output_length": {output_length}, "hash_ids": {hash_ids}}}'
    )


def test_a_mooncake_line_is_read_in_milliseconds():
    assert TraceRequest(27_000_000, 513, 3, (0, 7)) == parse_mooncake(mooncake())


def test_an_azure_time_keeps_its_seven_fractional_digits():
    first = parse_azure("2023-11-16 18:15:46.6805900,374,44")
    second = parse_azure("2023-11-16 18:15:46.6805901,1,0")

    assert second.arrival_ns - first.arrival_ns == 100
    assert (first.prompt_len, first.output_len) == (374, 44)
    assert (second.prompt_len, second.output_len) == (1, 0)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("1970-01-01 00:00:02", 2),
        ("1970-01-01 00:00:02.5", 2.5),
        ("1970-01-01 01:00:02.5+01:00", 2.5),
        ("1970-01-01 00:00:02.000000001", 2.000000001),
    ],
)
def test_azure_times_with_no_fraction_or_a_zone(time, seconds):
    assert round(seconds * 1e9) == parse_azure(f"{time},5,6").arrival_ns


def test_azure_columns_are_found_by_name():
    _, parse, is_header = find_parser("GeneratedTokens,extra,TIMESTAMP,ContextTokens")

    assert is_header
    assert TraceRequest(0, 5, 9) == parse("9,x,1970-01-01 00:00:00.0000000,5")


def test_formats_are_found_by_content():
    assert find_parser(mooncake())[::2] == ("Mooncake JSON lines", False)
    assert find_parser("\ufeff" + ",".join(HEADER))[::2] == ("Azure CSV", True)


@pytest.mark.parametrize("line", ["hello", "1,2,3", "[1, 2]", "TIMESTAMP,ContextTokens", '"x"'])
def test_other_first_lines_are_refused(line):
    with pytest.raises(
        TraceLineError, match=r"expected a JSON object or the header TIMESTAMP,.*, got " + re.escape(line)
    ):
        find_parser(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 0, "inp', "expected one JSON object"),
        ("[1]", "expected one JSON object"),
        ("[" * 100_000, "expected one JSON object"),
        ("{}", "expected input_length in .*, got none"),
        (mooncake(input_length="-5"), r"expected input_length to be an integer in \[1, 2147483647\], got -5"),
        (mooncake(input_length="0"), "expected input_length .* got 0"),
        (mooncake(input_length="1.5"), "expected input_length .* got 1.5"),
        (mooncake(input_length="true"), "expected input_length .* got true"),
        (mooncake(input_length="3000000000"), "expected input_length .* got 3000000000"),
        (mooncake(output_length="-1"), r"expected output_length to be an integer in \[0, .*, got -1"),
        (mooncake(output_length="null"), "expected output_length in .* got none"),
        (mooncake(hash_ids="[1]"), "expected 2 hash_ids .one per 512 of 513 tokens., got 1"),
        (mooncake(hash_ids="[1, 2, 3]"), "expected 2 hash_ids .* got 3"),
        (mooncake(hash_ids="null"), "expected 2 hash_ids .* got none"),
        (mooncake(hash_ids='"ab"'), 'expected 2 hash_ids .* got "ab"'),
        (mooncake(hash_ids='[1, "b"]'), 'expected hash_ids to be integers, got "b"'),
        (mooncake(timestamp='"noon"'), "expected timestamp to be a number of milliseconds, got noon"),
        (mooncake(timestamp="NaN"), "expected timestamp .* got nan"),
        (mooncake(timestamp="1e400"), "expected timestamp .* got inf"),
        (mooncake(timestamp="null"), "expected timestamp .* got none"),
    ],
)
def test_bad_mooncake_lines_name_the_field(line, message):
    with pytest.raises(TraceLineError, match=message):
        parse_mooncake(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:46.6805900,374", "expected 3 comma-separated values"),
        ("2023-11-16 18:15:46.6805900,374,4,4", "expected 3 comma-separated values"),
        ("2023-11-16 18:15:46.6805900,-374,44", "expected ContextTokens .* got -374"),
        ("2023-11-16 18:15:46.6805900,,44", "expected ContextTokens .* got none"),
        ("2023-11-16 18:15:46.6805900,3e2,44", 'expected ContextTokens .* got "3e2"'),
        ("2023-11-16 18:15:46.6805900,\u00b2,44", "expected ContextTokens .* got"),
        ("2023-11-16 18:15:46.6805900,374,1" + "0" * 5000, "expected GeneratedTokens .* got"),
        ("yesterday,374,44", "expected TIMESTAMP like 2023-11-16 18:15:46.6805900, got yesterday"),
        ("2023-13-16 18:15:46.6805900,374,44", "expected TIMESTAMP like"),
        ("2023-11-16 18:15:46.,374,44", "expected TIMESTAMP "),
        ("2023-11-16 18:15:46.1234567890,374,44", "expected TIMESTAMP with 1 to 9 fractional digits"),
        (",374,44", "expected TIMESTAMP like .* got"),
    ],
)
def test_bad_azure_lines_name_the_column(line, message):
    with pytest.raises(TraceLineError, match=message):
        parse_azure(line)
