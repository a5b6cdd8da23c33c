"""Workloads: arrival clocks, lengths from traces and distributions, streaming."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from workloads import csv_file, whole, workload

from lab.errors import UsageError
from simulator.traces import SHIPPED, load_trace
from simulator.workload import (
    LENGTH_LAWS,
    describe,
    length_law,
    length_limits,
    request_blocks,
)

# Arrivals.


def test_closed_loop_arrives_at_time_zero() -> None:
    requests = whole(workload(num_requests=50))
    assert requests.arrival_s.tolist() == [0.0] * 50


@given(
    st.sampled_from(["poisson", "gamma", "constant"]),
    st.integers(1, 3000),
    st.floats(0.01, 1000),
    st.integers(0, 2**32),
)
@settings(max_examples=50, deadline=None)
def test_the_last_request_arrives_at_n_over_rate(arrivals: str, count: int, rate: float, seed: int) -> None:
    burstiness = 0.5 if arrivals == "gamma" else 1.0
    load = workload(arrivals=arrivals, request_rate=rate, num_requests=count, burstiness=burstiness)
    times = whole(load, seed, 512).arrival_s
    assert len(times) == count
    assert times[0] >= 0
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(count / rate, rel=1e-12)


def test_constant_arrivals_are_evenly_spaced() -> None:
    times = whole(workload(arrivals="constant", request_rate=4, num_requests=8)).arrival_s
    assert times == pytest.approx(np.arange(1, 9) / 4)


def test_poisson_gaps_are_exponential() -> None:
    times = whole(workload(arrivals="poisson", request_rate=5, num_requests=20_000), seed=1).arrival_s
    assert stats.kstest(np.diff(times), "expon", args=(0, 0.2)).pvalue > 0.001


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_variation_of_their_shape(burstiness: float) -> None:
    load = workload(arrivals="gamma", request_rate=5, num_requests=40_000, burstiness=burstiness)
    gaps = np.diff(whole(load, seed=2).arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 5 / math.sqrt(len(gaps))


def test_gamma_with_burstiness_one_is_poisson() -> None:
    poisson, gamma = (
        whole(workload(arrivals=arrivals, request_rate=3, num_requests=100), seed=5).arrival_s
        for arrivals in ("poisson", "gamma")
    )
    assert (poisson == gamma).all()


def test_extremely_bursty_arrivals_stay_finite_and_ordered() -> None:
    for count in (1, 3, 500):
        load = workload(arrivals="gamma", request_rate=2, num_requests=count, burstiness=1e-3)
        times = whole(load).arrival_s
        assert np.isfinite(times).all()
        assert (np.diff(times) >= 0).all()
        assert times[-1] == pytest.approx(count / 2)


@pytest.mark.parametrize("arrivals", ["poisson", "closed-loop"])
def test_burstiness_belongs_to_gamma(arrivals: str) -> None:
    rate = 1.0 if arrivals == "poisson" else None
    load = workload(arrivals=arrivals, request_rate=rate, burstiness=0.5)
    with pytest.raises(UsageError, match=f"burstiness = 0.5 needs arrivals 'gamma', not '{arrivals}'"):
        request_blocks(load, 0)


# The clock of a trace.


def test_trace_clock_starts_at_zero_and_keeps_its_gaps(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "t_s,input_tokens,output_tokens\n5,1,2\n6.5,3,4\n9,5,6\n")
    requests = whole(workload(trace=path, arrivals="trace", num_requests=3))
    assert requests.arrival_s.tolist() == [0, 1.5, 4]
    assert requests.prompt_tokens.tolist() == [1, 3, 5]
    assert requests.output_tokens.tolist() == [2, 4, 6]


def test_milliseconds_are_understood(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "t_ms,input_tokens,output_tokens\n0,1,2\n1500,3,4\n")
    assert whole(workload(trace=path, arrivals="trace", num_requests=2)).arrival_s.tolist() == [0, 1.5]


def test_a_trace_repeats_one_mean_gap_after_its_end(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "t_s,input_tokens,output_tokens\n0,1,2\n1,3,4\n4,5,6\n")
    requests = whole(workload(trace=path, arrivals="trace", num_requests=7), block=2)
    assert requests.arrival_s.tolist() == [0, 1, 4, 6, 7, 10, 12]
    assert requests.prompt_tokens.tolist() == [1, 3, 5, 1, 3, 5, 1]
    assert requests.output_tokens.tolist() == [2, 4, 6, 2, 4, 6, 2]


@pytest.mark.parametrize("count", [2, 3, 10, 1000])
def test_a_rate_stretches_the_trace_clock(tmp_path: Path, count: int) -> None:
    path = csv_file(tmp_path, "t_s,input_tokens,output_tokens\n0,1,2\n1,3,4\n4,5,6\n")
    own = whole(workload(trace=path, arrivals="trace", num_requests=count)).arrival_s
    paced = whole(workload(trace=path, arrivals="trace", num_requests=count, request_rate=20)).arrival_s
    assert (count - 1) / paced[-1] == pytest.approx(20)
    assert paced / paced[-1] == pytest.approx(own / own[-1])


def test_a_clock_that_stands_still_cannot_be_stretched(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "t_s,input_tokens,output_tokens\n3,1,2\n3,3,4\n")
    assert whole(workload(trace=path, arrivals="trace", num_requests=4)).arrival_s.tolist() == [0] * 4
    with pytest.raises(UsageError, match="the first 2 time stamps of the trace are equal"):
        request_blocks(workload(trace=path, arrivals="trace", num_requests=2, request_rate=1), 0)


def test_azure_header_is_understood(tmp_path: Path) -> None:
    path = csv_file(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04,3180,8\n"
        "2023-11-16 18:18:04.0319600,110,27\n",
    )
    requests = whole(workload(trace=path, arrivals="trace", num_requests=3))
    assert requests.arrival_s == pytest.approx([0, 0.02004, 60.052])
    assert requests.prompt_tokens.tolist() == [4808, 3180, 110]


def test_azure_stamps_may_carry_an_offset(tmp_path: Path) -> None:
    path = csv_file(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2,3\n2024-05-10 00:00:01.009930+00:00,4,5\n",
    )
    assert whole(workload(trace=path, arrivals="trace", num_requests=2)).arrival_s == pytest.approx([0, 1])


# Lengths.


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output"),
    [
        # Means of the public files.
        ("azure-conv", 19_366, 1154.7, 211.13),
        ("azure-code", 8_819, 2047.85, 27.88),
        ("mooncake-conversation", 12_031, 12035.06, 342.62),
        ("sharegpt", 15_460, 220, 203),
        ("arxiv-summarization", 28_257, None, None),
    ],
)
def test_shipped_traces_hold_their_rows(name: str, rows: int, prompt: float | None, output: float | None) -> None:
    trace = load_trace(name)
    assert len(trace.prompt_tokens) + trace.num_dropped == rows
    if prompt is not None and output is not None:
        assert trace.prompt_tokens.mean() == pytest.approx(prompt, rel=0.01)
        assert trace.output_tokens.mean() == pytest.approx(output, rel=0.01)
    assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 1


@pytest.mark.parametrize("name", [name for name, trace in SHIPPED.items() if trace.has_clock])
def test_shipped_clocks_run_for_an_hour(name: str) -> None:
    clock = load_trace(name, clock=True).arrival_s
    assert clock is not None
    assert clock[0] == 0
    assert 3300 < clock[-1] < 3700


@pytest.mark.parametrize("name", ["sharegpt", "arxiv-summarization"])
def test_a_data_set_without_clock_says_which_have_one(name: str) -> None:
    message = f"'{name}' has no time stamps, .* traces with a clock: azure-conv, azure-code, mooncake-conversation"
    with pytest.raises(UsageError, match=message):
        request_blocks(workload(trace=name, arrivals="trace"), 0)


def test_lengths_stay_in_pairs_and_in_order_under_any_arrivals() -> None:
    trace = load_trace("azure-code")
    for arrivals, rate in (("closed-loop", None), ("poisson", 3.0), ("trace", None)):
        load = workload(trace="azure-code", arrivals=arrivals, request_rate=rate, num_requests=10_000)
        requests = whole(load, block=1000)
        wrapped = np.arange(10_000) % len(trace.prompt_tokens)
        assert (requests.prompt_tokens == trace.prompt_tokens[wrapped]).all()
        assert (requests.output_tokens == trace.output_tokens[wrapped]).all()


def test_sharegpt_keeps_what_the_benchmark_filter_keeps() -> None:
    trace = load_trace("sharegpt")
    assert trace.prompt_tokens.max() <= 1024
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 2048
    assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 4


def test_rows_without_tokens_are_dropped_and_counted(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "t_s,input_tokens,output_tokens\n0,0,5\n2,7,8\n3,9,0\n5,1,1\n")
    load = workload(trace=path, arrivals="trace", num_requests=2)
    requests = whole(load)
    assert requests.prompt_tokens.tolist() == [7, 1]
    assert requests.arrival_s.tolist() == [0, 3]
    assert describe(load)["trace_rows"] == 2
    assert describe(load)["trace_rows_dropped"] == 2


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("balanced-chat", 1024, 1024), ("generation-heavy", 256, 2048), ("summarize-heavy", 8192, 512)],
)
def test_named_distributions_have_their_means(name: str, prompt: int, output: int) -> None:
    requests = whole(workload(lengths=name, num_requests=20_000), seed=3)
    for tokens, mean in ((requests.prompt_tokens, prompt), (requests.output_tokens, output)):
        assert tokens.mean() == pytest.approx(mean, rel=0.01)
        assert np.log(tokens).std() == pytest.approx(0.2, rel=0.03)
    pairs = np.corrcoef(requests.prompt_tokens, requests.output_tokens)[0, 1]
    assert abs(pairs) < 5 / math.sqrt(20_000)


def test_fixed_lengths() -> None:
    requests = whole(workload(lengths="fixed:1024/1", num_requests=5))
    assert requests.prompt_tokens.tolist() == [1024] * 5
    assert requests.output_tokens.tolist() == [1] * 5


@settings(deadline=None)
@given(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_fixed_lengths_are_exact(prompt: int, output: int) -> None:
    assert length_limits(workload(lengths=f"fixed:{prompt}/{output}")) == (prompt, prompt + output)


@pytest.mark.parametrize(
    "text", ["balanced", "fixed:1", "fixed:0/5", "fixed:-1/5", "fixed:1.5/2", "fixed:9999999999/1"]
)
def test_unknown_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"workload.lengths = '.*': allowed are balanced-chat, .* fixed:IN/OUT"):
        length_law(text)


@pytest.mark.parametrize("name", [*LENGTH_LAWS, "fixed:7/9"])
def test_limits_of_a_distribution_hold_for_every_draw(name: str) -> None:
    load = workload(lengths=name, num_requests=20_000)
    requests = whole(load)
    prompt, total = length_limits(load)
    assert requests.prompt_tokens.max() <= prompt
    assert (requests.prompt_tokens + requests.output_tokens).max() <= total


def test_limits_of_a_trace_are_those_of_the_rows_in_use(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "input_tokens,output_tokens\n10,1\n3,9\n100,100\n")
    assert length_limits(workload(trace=path, num_requests=2)) == (10, 12)
    assert length_limits(workload(trace=path, num_requests=50)) == (100, 200)


# Streaming and determinism.


@pytest.mark.parametrize(
    "fields",
    [
        {"lengths": "balanced-chat", "arrivals": "gamma", "request_rate": 2.0, "burstiness": 0.3},
        {"lengths": "summarize-heavy", "arrivals": "constant", "request_rate": 2.0},
        {"trace": "azure-conv", "arrivals": "trace", "request_rate": 9.0},
        {"trace": "sharegpt"},
    ],
    ids=lambda fields: fields.get("arrivals", "closed-loop"),
)
def test_requests_depend_on_the_seed_but_not_on_the_block(fields: dict[str, Any]) -> None:
    load = workload(num_requests=1000, **fields)
    first = whole(load, seed=1, block=4096)
    for block in (1, 7, 1000):
        for a, b in zip(first[:3], whole(load, seed=1, block=block)[:3], strict=True):
            assert a.tobytes() == b.tobytes()
    if "lengths" in fields:
        assert (whole(load, seed=2).prompt_tokens != first.prompt_tokens).any()


def test_lengths_do_not_depend_on_the_arrivals() -> None:
    closed = whole(workload(lengths="balanced-chat", num_requests=500), seed=4)
    timed = whole(workload(lengths="balanced-chat", num_requests=500, arrivals="poisson", request_rate=1), seed=4)
    assert (closed.prompt_tokens == timed.prompt_tokens).all()
    assert (closed.output_tokens == timed.output_tokens).all()


def test_blocks_have_the_size_asked_for_and_exact_types() -> None:
    blocks = list(request_blocks(workload(num_requests=25), 0, block=10))
    assert [len(block.arrival_s) for block in blocks] == [10, 10, 5]
    assert [column.dtype for column in blocks[0][:3]] == [np.float64, np.int32, np.int32]


@pytest.mark.parametrize(
    "fields",
    [
        {"lengths": "balanced-chat"},
        {"lengths": "balanced-chat", "arrivals": "constant", "request_rate": 10.0},
        {"trace": "azure-conv", "arrivals": "trace", "request_rate": 10.0},
    ],
    ids=lambda fields: fields.get("arrivals", "closed-loop"),
)
def test_a_billion_requests_start_at_once(fields: dict[str, Any]) -> None:
    blocks = request_blocks(workload(num_requests=10**9, **fields), 0)
    assert [len(block.arrival_s) for block in islice(blocks, 3)] == [4096] * 3


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    def peak(count: int) -> int:
        load = workload(lengths="balanced-chat", arrivals="poisson", request_rate=1, num_requests=count)
        tracemalloc.start()
        for _ in request_blocks(load, 0, block=1024):
            pass
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(2048)
    assert peak(200_000) < 1.5 * peak(10_000)


# Description.


@pytest.mark.parametrize(
    "fields",
    [
        {"lengths": "balanced-chat"},
        {"lengths": "fixed:3/4"},
        {"trace": "azure-conv", "arrivals": "trace"},
        {"trace": "sharegpt", "arrivals": "gamma", "request_rate": 2.0, "burstiness": 0.5},
    ],
    ids=lambda fields: fields.get("lengths") or fields["trace"],
)
def test_description_is_flat_json_with_the_source(fields: dict[str, Any]) -> None:
    described = describe(workload(**fields))
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert not any(isinstance(value, (dict, list)) for value in described.values())
    assert described["source"]
    for name in ("prompt", "output"):
        assert described[f"p50_{name}_tokens"] <= described[f"p99_{name}_tokens"] <= described[f"max_{name}_tokens"]


def test_description_of_a_distribution_matches_its_draws() -> None:
    load = workload(lengths="generation-heavy", num_requests=50_000)
    described, requests = describe(load), whole(load)
    assert described["mean_output_tokens"] == pytest.approx(requests.output_tokens.mean(), rel=0.01)
    assert described["p99_prompt_tokens"] == pytest.approx(np.percentile(requests.prompt_tokens, 99), rel=0.02)


def test_description_of_a_trace_covers_the_rows_in_use(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "input_tokens,output_tokens\n10,1\n20,3\n9000,900\n")
    described = describe(workload(trace=path, num_requests=2))
    assert (described["mean_prompt_tokens"], described["max_output_tokens"]) == (15, 3)


@pytest.mark.parametrize("module", ["lab.acceptance", "simulator.workload"])
def test_import_stays_light(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('polars', 'numba', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
