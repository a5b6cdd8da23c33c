"""Trace files that cannot be used are refused by file, column and row."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from workloads import csv_file, whole, workload

from lab.errors import UsageError
from simulator.workload import request_blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; its first line must name the columns"),
        ("input_tokens,output_tokens\n", "holds no rows"),
        ("input_tokens,tokens\n1,2\n", "has no column output_tokens; found input_tokens, tokens"),
        ("5,6\n7,8\n", "has no column input_tokens; found 5, 6"),
        (
            "input_tokens,output_tokens\n1,2\nNaN,3\n",
            "column input_tokens, row 2: 'NaN' is not a whole number",
        ),
        (
            "input_tokens,output_tokens\n1,2\n3,-4\n",
            "column output_tokens, row 2: '-4' is not a whole number",
        ),
        ("input_tokens,output_tokens\n1.5,2\n", "column input_tokens, row 1: '1.5' is not a whole number"),
        (
            "input_tokens,output_tokens\n1,2\n,3\n",
            "column input_tokens, row 2: an empty field is not a whole",
        ),
        (
            "input_tokens,output_tokens\n1,2\n3\n",
            "column output_tokens, row 2: an empty field is not a whole",
        ),
        ("input_tokens,output_tokens\n1,many\n", "column output_tokens, row 1: 'many' is not a whole number"),
        ("input_tokens,output_tokens\ninf,2\n", "column input_tokens, row 1: 'inf' is not a whole number"),
        (
            "input_tokens,output_tokens\n3000000000,2\n",
            "'3000000000' is not a whole number from 0 to 2147483647",
        ),
        ("input_tokens,output_tokens\n0,2\n3,0\n", "holds no row with both input and output tokens"),
        ("input_tokens,output_tokens\n1,2\n1,2,3\n", "cannot be read as CSV"),
        ("input_tokens,output_tokens, input_tokens\n1,2,3\n", "cannot be read as CSV"),
    ],
)
def test_bad_lengths_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = csv_file(tmp_path, text)
    with pytest.raises(UsageError) as refused:
        request_blocks(workload(trace=path), 0)
    assert message in str(refused.value)
    assert path in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("input_tokens,output_tokens\n1,2\n", "has no column t_s or t_ms, which arrivals 'trace' needs"),
        (
            "t_s,input_tokens,output_tokens\n0,1,2\n-1,1,2\n",
            "column t_s, row 2: '-1' is not a time from 0 to 1e+10 s",
        ),
        (
            "t_ms,input_tokens,output_tokens\nnan,1,2\n",
            "column t_ms, row 1: 'nan' is not a time from 0 to 1e+10 s",
        ),
        (
            "t_s,input_tokens,output_tokens\n0,1,2\n,1,2\n",
            "column t_s, row 2: an empty field is not a time",
        ),
        (
            "t_s,input_tokens,output_tokens\n0,1,2\n7,1,2\n6.5,1,2\n",
            "column t_s, row 3: 6.5 is earlier than the row before; sort the file by time",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,1,2\nyesterday,1,2\n",
            "column TIMESTAMP, row 2: 'yesterday' is not a time like",
        ),
    ],
)
def test_bad_clocks_are_named(tmp_path: Path, rows: str, message: str) -> None:
    path = csv_file(tmp_path, rows)
    with pytest.raises(UsageError) as refused:
        request_blocks(workload(trace=path, arrivals="trace"), 0)
    assert message in str(refused.value)
    assert path in str(refused.value)


def test_a_bad_clock_does_not_matter_when_it_is_not_used(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "t_s,input_tokens,output_tokens\n9,1,2\n,3,4\n")
    assert whole(workload(trace=path, num_requests=2)).prompt_tokens.tolist() == [1, 3]


def test_an_unknown_trace_lists_the_shipped_ones() -> None:
    with pytest.raises(UsageError, match=r"workload.trace = 'azure': neither a shipped trace \(azure-conv, .*\) nor"):
        request_blocks(workload(trace="azure"), 0)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_bytes(b"\xff\xfe\x00input_tokens\n\x80\x81\n")
    with pytest.raises(UsageError, match=r"requests\.csv"):
        request_blocks(workload(trace=str(path)), 0)


def test_compressed_files_spaces_and_whole_floats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv.gz"
    path.write_bytes(gzip.compress("\ufeffinput_tokens, output_tokens\n 5 ,6.0\n".encode()))
    requests = whole(workload(trace=str(path), num_requests=1))
    assert (requests.prompt_tokens.tolist(), requests.output_tokens.tolist()) == ([5], [6])
