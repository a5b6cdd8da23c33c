"""Metrics against their definitions, computed another way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from factory import chain_acceptance, requests, run, small
from hypothesis import given
from hypothesis import strategies as st

from simulator.distribution import Distribution
from simulator.engine import Engine
from simulator.metrics import GPU_TERMS, gap_metrics, mean_queue_s, request_metrics, step_metrics
from simulator.records import PartWriter
from simulator.step import REQUEST, STEP


def percentiles(parts: list[tuple[Any, Any]], percents: list[float]) -> list[float]:
    """Percentiles of values that come in parts."""
    found = Distribution(percents)
    for part in parts:
        found.count(*part)
    for part in parts:
        found.collect(*part)
    return found.percentiles()


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 9)), min_size=1, max_size=60).filter(
        lambda pairs: any(weight for _, weight in pairs)
    ),
    st.lists(st.floats(0, 100), min_size=1, max_size=3),
    st.integers(1, 7),
)
def test_percentiles_are_numpys_on_the_repeated_list(
    pairs: list[tuple[float, int]], percents: list[float], chunk: int
) -> None:
    values = np.array([value for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs])
    parts = [(values[i : i + chunk], weights[i : i + chunk]) for i in range(0, len(values), chunk)]
    expected = np.percentile(np.repeat(values, weights), percents)
    assert percentiles(parts, percents) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_percentile_of_nothing_is_not_a_number() -> None:
    assert np.isnan(percentiles([], [50])).all()


def emission_times(history: list[tuple[int, int, float]], finished: Any) -> dict[int, list[tuple[float, int]]]:
    """For every request its outputs as (time, tokens), from what was seen of it after every step."""
    outputs: dict[int, list[tuple[float, int]]] = {}
    seen: dict[int, int] = {}
    final = [(r["request_id"], r["output_tokens"], r["last_token_s"]) for r in finished]
    for request, emitted, at_s in [*history, *final]:
        if emitted > seen.get(request, 0):
            outputs.setdefault(request, []).append((at_s, emitted - seen.get(request, 0)))
            seen[request] = emitted
    return outputs


def test_itl_per_step_and_per_token_are_those_of_the_outputs_themselves(tmp_path: Path) -> None:
    history: list[tuple[int, int, float]] = []

    def watch(engine: Engine, step: Any) -> None:
        running = engine.queues.slots[engine.queues.running[: engine.state["num_running"]]]
        history.extend((int(s["request_id"]), int(s["emitted"]), float(s["last_token_s"])) for s in running)

    config = small(rows=4, num_blocks=14, max_model_len=160)
    _, kept = run(config, requests([20] * 9, [60] * 9), chain_acceptance(0.8, 0.6, 0.4), after_step=watch)
    assert kept["requests"]["num_preemptions"].sum() > 0
    outputs = emission_times(history, kept["requests"]).values()
    gaps_ms = [(b[0] - a[0]) * 1e3 for times in outputs for a, b in pairwise(times)]
    zeros = [0.0] * sum(tokens - 1 for times in outputs for _, tokens in times[1:])
    writer = PartWriter(tmp_path)
    for kind, array in kept.items():
        writer(kind, array)
    later_tokens = int(kept["requests"]["output_tokens"].sum()) - len(kept["requests"])
    measured = gap_metrics(writer.parts("steps"), writer.parts("gaps_s"), later_tokens)
    assert len(gaps_ms) + len(zeros) == later_tokens
    for name, expected in (("itl_ms", gaps_ms), ("itl_per_token_ms", gaps_ms + zeros)):
        assert measured[f"mean_{name}"] == pytest.approx(np.mean(expected))
        assert measured[f"std_{name}"] == pytest.approx(np.std(expected))
        assert measured[f"median_{name}"] == pytest.approx(np.percentile(expected, 50))
        assert measured[f"p99_{name}"] == pytest.approx(np.percentile(expected, 99))


def test_request_metrics_follow_the_definitions(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    _, kept = run(small(), requests([10, 20, 30], [1, 5, 9], [0.5, 0.6, 0.6]))
    writer("requests", kept["requests"])
    done, metrics = kept["requests"], request_metrics(writer.parts("requests"))
    assert metrics["completed"] == 3
    assert metrics["duration_s"] == pytest.approx(done["last_token_s"].max() - 0.5)
    assert metrics["output_throughput"] == pytest.approx(15 / metrics["duration_s"])
    ttft_ms = (done["first_token_s"] - done["arrival_s"]) * 1e3
    assert metrics["p99_ttft_ms"] == pytest.approx(np.percentile(ttft_ms, 99))
    assert metrics["std_ttft_ms"] == pytest.approx(np.std(ttft_ms))
    several = done[done["output_tokens"] > 1]  # requests of one token have no time per output token
    tpot_ms = (several["last_token_s"] - several["first_token_s"]) / (several["output_tokens"] - 1) * 1e3
    assert metrics["mean_tpot_ms"] == pytest.approx(tpot_ms.mean())


def test_warm_up_requests_do_not_count(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    _, kept = run(small(), requests([10] * 8, [4] * 8), max_concurrency=2)
    for part in np.array_split(kept["requests"], 3):
        writer("requests", part)
    counted = kept["requests"][kept["requests"]["request_id"] >= 2]
    metrics = request_metrics(writer.parts("requests"), warmup=2)
    assert metrics["completed"] == 6
    assert metrics["duration_s"] == pytest.approx(counted["last_token_s"].max() - counted["arrival_s"].min())
    assert metrics["mean_ttft_ms"] == pytest.approx((counted["first_token_s"] - counted["arrival_s"]).mean() * 1e3)


def test_mean_queue_of_a_stretch_of_requests(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    records = np.zeros(4, REQUEST)
    records["request_id"] = [3, 1, 0, 2]
    records["scheduled_s"] = [8.0, 2.0, 1.0, 4.0]
    writer("requests", records)
    assert mean_queue_s(writer.parts("requests"), 1, 3) == 3.0
    assert mean_queue_s(writer.parts("requests"), 7, 9) == 0.0


def test_shares_of_a_step_weigh_steps_by_their_length(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    steps = np.zeros(3, STEP)
    steps["duration_us"] = [1000.0, 3000.0, 6000.0]
    for number, term in enumerate(GPU_TERMS):
        steps[f"{term}_us"] = [10.0 * number, 100.0, 300.0]
    steps["host_us"] = [850.0, 2400.0, 9000.0]  # the last is hidden behind the GPU in part
    for part in (steps[:2], steps[2:]):
        writer("steps", part)
    found = step_metrics(writer.parts("steps"))
    assert found["mean_step_ms"] == pytest.approx(10 / 3)
    assert [found[f"{term}_share"] for term in GPU_TERMS] == pytest.approx([0.04 + 0.001 * n for n in range(6)])
    assert found["host_share"] == pytest.approx(1 - 6 * 0.04 - 0.015)
    assert np.isnan(list(step_metrics([]).values())).all()


def test_no_requests_give_counts_of_zero_and_no_numbers() -> None:
    metrics = request_metrics([])
    assert metrics["completed"] == 0
    assert np.isnan([metrics["mean_ttft_ms"], metrics["p99_ttft_ms"], metrics["output_throughput"]]).all()


def test_parts_merge_in_order_into_one_file(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    for start in (0, 2):
        records = np.zeros(2, REQUEST)
        records["request_id"] = [start, start + 1]
        writer("requests", records)
    frames = [pl.read_parquet(part) for part in writer.parts("requests")]
    assert pl.concat(frames)["request_id"].to_list() == [0, 1, 2, 3]
