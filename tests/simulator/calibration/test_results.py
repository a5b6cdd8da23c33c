"""Result files of the clients are read as documented; wrong units and broken files are refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.errors import UsageError
from simulator.calibration.results import read_results
from simulator.calibration.units import check_units

#: Written by hand after the documented fields of `vllm bench serve --save-result --save-detailed`.
VLLM: dict[str, Any] = {
    "date": "20260101-120000",
    "backend": "vllm",
    "num_prompts": 4,
    "request_rate": 2.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 4.0,
    "completed": 4,
    "failed": 0,
    "total_input_tokens": 400,
    "total_output_tokens": 200,
    "request_throughput": 1.0,
    "output_throughput": 50.0,
    "total_token_throughput": 150.0,
    "mean_ttft_ms": 100.0,
    "median_ttft_ms": 90.0,
    "p99_ttft_ms": 150.0,
    "mean_tpot_ms": 10.0,
    "median_tpot_ms": 10.0,
    "p99_tpot_ms": 12.0,
    "mean_itl_ms": 30.0,
    "median_itl_ms": 30.0,
    "p99_itl_ms": 40.0,
    "spec_decode_acceptance_length": 2.9,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.6, 0.4],
}
DETAIL: dict[str, Any] = {
    "input_lens": [100, 50, 150, 100],
    "output_lens": [50, 60, 40, 50],
    "start_times": [1000.5, 1000.0, 1001.0, 1002.0],
    "ttfts": [0.09, 0.09, 0.15, 0.07],
}
SGLANG: dict[str, Any] = {
    "backend": "sglang",
    "request_rate": "inf",
    "max_concurrency": 16,
    "duration": 10.0,
    "completed": 64,
    "total_input_tokens": 6400,
    "total_output_tokens": 3200,
    "request_throughput": 6.4,
    "input_throughput": 640.0,
    "output_throughput": 320.0,
    "total_throughput": 960.0,
    "mean_e2e_latency_ms": 2000.0,
    "median_e2e_latency_ms": 1900.0,
    "p99_e2e_latency_ms": 2600.0,
    "mean_ttft_ms": 200.0,
    "median_ttft_ms": 180.0,
    "p99_ttft_ms": 400.0,
    "mean_tpot_ms": 36.0,
    "accept_length": 3.1,
}


def write(path: Path, *objects: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(item) for item in objects), encoding="utf-8")
    return path


def test_plain_vllm_result(tmp_path: Path) -> None:
    (result,) = read_results(write(tmp_path / "r.json", VLLM))
    assert result.client == "vllm bench serve"
    assert (result.request_rate, result.max_concurrency, result.num_requests) == (2.0, None, 4)
    assert (result.mean_prompt_tokens, result.mean_output_tokens) == (100.0, 50.0)
    assert result.metrics["p99_ttft_ms"] == 150.0
    assert result.acceptance_length == 2.9
    assert result.per_position == (0.9, 0.6, 0.4)
    assert result.prompt_tokens is None


def test_detailed_vllm_result_is_in_the_order_of_its_send_times(tmp_path: Path) -> None:
    (result,) = read_results(write(tmp_path / "r.json", VLLM | DETAIL))
    assert result.arrival_s is not None
    np.testing.assert_allclose(result.arrival_s, [0.0, 0.5, 1.0, 2.0])
    assert result.prompt_tokens is not None
    assert result.prompt_tokens.tolist() == [50, 100, 150, 100]


def test_sglang_results_are_one_per_line(tmp_path: Path) -> None:
    results = read_results(write(tmp_path / "r.jsonl", SGLANG, SGLANG | {"max_concurrency": 32}))
    assert [result.max_concurrency for result in results] == [16, 32]
    assert results[0].request_rate is None
    assert results[0].metrics["mean_e2el_ms"] == 2000.0
    assert results[0].metrics["total_token_throughput"] == 960.0
    assert results[0].acceptance_length == 3.1


def test_csv_of_request_times(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("input_tokens,output_tokens,arrival_s,ttft_ms,e2el_ms\n100,11,5,100,1100\n200,21,6,200,2200\n")
    (result,) = read_results(path)
    assert result.metrics["mean_ttft_ms"] == pytest.approx(150.0)
    assert result.metrics["mean_tpot_ms"] == pytest.approx(100.0)
    assert result.metrics["output_throughput"] == pytest.approx(32 / 3.2)


def test_csv_of_points_on_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("input_tokens,output_tokens,arrival_s,first_token_s,last_token_s\n9,5,1.0,1.5,2.5\n9,1,2,2.2,2.2\n")
    (result,) = read_results(path)
    assert result.metrics["mean_tpot_ms"] == pytest.approx(250.0)  # the request of one token has none


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean_ttft_ms": 0.1, "median_ttft_ms": 0.09}, "ttft of 0.1 ms .* looks like seconds.*multiply by 1000"),
        ({"mean_tpot_ms": 0.01}, "tpot of 0.01 ms .* looks like seconds"),
        ({"mean_ttft_ms": 100000.0}, "longer than the whole run"),
        ({"duration": 4000.0}, "duration must be seconds"),
        ({"output_throughput": 0.05}, "throughput tokens per second"),
        ({"completed": 0}, "completed = 0; at least one"),
        ({"total_output_tokens": None}, "has no total_output_tokens"),
        ({"mean_ttft_ms": "fast"}, "mean_ttft_ms = 'fast'; a number"),
        ({"spec_decode_per_position_acceptance_rates": [0.5, 0.9]}, "shares from 0 to 1 that do not rise"),
        ({"input_lens": [1, 2], "output_lens": [1]}, "input_lens has 2 entries and output_lens 1"),
        (DETAIL | {"completed": 3}, "4 of them with tokens, but completed is 3"),
        (DETAIL | {"completed": 5}, "tell of 4 requests, .* completed is 5; give the lists of the same run"),
        (DETAIL | {"start_times": [1.0, 2.0]}, "input_lens has 4 entries and start_times 2"),
        (DETAIL | {"total_input_tokens": 405}, "input_lens .* add up to 400, but total_input_tokens is 405"),
        (DETAIL | {"output_lens": [50, 60, 40, 54]}, "output_lens .* add up to 204, but total_output_tokens is 200"),
        (DETAIL | {"start_times": [1000, 2000, 3000, 4000]}, "start_times span 3000, .* milliseconds.*divide by 1000"),
        ({"median_ttft_ms": 0.09}, "median_ttft_ms is 0.09, but mean_ttft_ms is 100"),
        ({"p99_tpot_ms": 12000.0}, "p99_tpot_ms is 1.2e\\+04, but mean_tpot_ms is 10; .* both must be milliseconds"),
        ({"mean_e2el_ms": 2000.0}, "make 590 ms, but e2el is 2000 ms"),
    ],
)
def test_bad_figures_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_results(write(tmp_path / "r.json", VLLM | change))


def test_failed_requests_stay_in_the_lists_and_totals_may_be_rounded(tmp_path: Path) -> None:
    failed = {name: [*values, 0] for name, values in DETAIL.items()} | {"total_input_tokens": 403}
    failed["start_times"] = [*DETAIL["start_times"], 1003.0]
    failed["input_lens"] = [*DETAIL["input_lens"], 70]
    (result,) = read_results(write(tmp_path / "r.json", VLLM | failed))
    assert result.prompt_tokens is not None
    assert len(result.prompt_tokens) == 4


def test_per_request_times_in_milliseconds_are_refused(tmp_path: Path) -> None:
    slow = {**DETAIL, "ttfts": [90, 90, 150, 70]}
    with pytest.raises(UsageError, match="ttfts must be seconds"):
        read_results(write(tmp_path / "r.json", VLLM | slow))


def test_a_request_must_take_its_tokens_time() -> None:
    metrics = {"duration_s": 100.0, "mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0, "mean_e2el_ms": 60000.0}
    with pytest.raises(UsageError, match="make 590 ms, but e2el is 6e"):
        check_units(metrics, 10, 500.0, "r.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("input_tokens,output_tokens,arrival_s\n1,1,0\n", "no column first_token_s"),
        ("input_tokens,output_tokens,arrival_s,ttft_s,e2el_s\n1,0,0,1,2\n", "output_tokens = 0"),
        ("input_tokens,output_tokens,arrival_s,ttft_s,e2el_s\n1,2,0,x,2\n", "ttft_s = 'x' is not a number"),
        ("input_tokens,output_tokens,arrival_s,ttft_ms,e2el_ms\n1,2,0,0.2,0.9\n", "rename it to the unit"),
        ("input_tokens,output_tokens,arrival_s,ttft_s,e2el_s\n1,2,0,700,701\n", "by ttft_s .* column to ttft_ms"),
        ("input_tokens,output_tokens,arrival_s,ttft_s,e2el_s\n1,101,0,60,900\n", "by e2el_s .* 8.4 s, .* to e2el_ms"),
        ("input_tokens,output_tokens,arrival_s,ttft_s,e2el_s\n1,2,0,-1,2\n", "row 1: ttft_s = -1 is negative"),
        ("input_tokens,output_tokens,arrival_s,arrival_ms,ttft_s,e2el_s\n1,2,0,0,1,2\n", "both arrival_s and arr"),
        ("input_tokens;output_tokens;arrival_s\n1;1;0\n", "semicolons; use commas"),
        ("input_tokens\toutput_tokens\n1\t1\n", "tabs; use commas"),
        ("input_tokens,output_tokens,arrival_s,first_token_s,last_token_s\n1,2,5,4,6\n", "follow each other"),
    ],
)
def test_bad_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_results(path)


@pytest.mark.parametrize("text", ["[1]", "not json", '{"a": 1}', ""])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"engine result .*r\.json"):
        read_results(path)
