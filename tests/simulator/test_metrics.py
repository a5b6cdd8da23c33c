"""Metrics against their definitions, computed another way from the same records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factory import chain_acceptance, requests, run, small
from hypothesis import given
from hypothesis import strategies as st

from simulator.metrics import gap_metrics, request_metrics, weighted_percentile
from simulator.records import PartWriter


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 9)), min_size=1, max_size=40).filter(
        lambda pairs: any(weight for _, weight in pairs)
    ),
    st.floats(0, 100),
)
def test_weighted_percentile_is_numpys_on_the_repeated_list(pairs: list[tuple[float, int]], percent: float) -> None:
    values = np.array([value for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs])
    expected = np.percentile(np.repeat(values, weights), percent)
    assert weighted_percentile(values, weights, percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_percentile_of_nothing_is_not_a_number() -> None:
    assert np.isnan(weighted_percentile(np.zeros(0), np.zeros(0, np.int64), 50))


def emissions(kept: dict[str, Any]) -> list[float]:
    """Gaps between successive outputs of every request, from scheduled rounds: here each step lasts as recorded."""
    gaps = []
    for step in kept["steps"]:
        gaps += [step["duration_us"] / 1e3] * int(step["regular_gaps"])
    return gaps + [gap * 1e3 for gap in kept.get("gaps_s", [])]


def test_itl_per_step_and_per_token_count_what_they_say(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    config = small(rows=4, num_blocks=14, max_model_len=160)
    _, kept = run(config, requests([20] * 9, [60] * 9), chain_acceptance(0.8, 0.6, 0.4))
    for kind, array in kept.items():
        writer(kind, array)
    measured = request_metrics(writer.parts("requests"))
    after_first = measured["total_output_tokens"] - measured["completed"]
    gaps = gap_metrics(writer.parts("steps"), writer.parts("gaps_s"), int(after_first))
    expected = emissions(kept)
    assert kept["requests"]["num_preemptions"].sum() > 0
    assert len(expected) < after_first
    assert gaps["mean_itl_ms"] == pytest.approx(np.mean(expected))
    assert gaps["p99_itl_ms"] == pytest.approx(np.percentile(expected, 99))
    assert gaps["mean_itl_per_token_ms"] == pytest.approx(np.sum(expected) / after_first)
    total_ms = ((kept["requests"]["last_token_s"] - kept["requests"]["first_token_s"]) * 1e3).sum()
    assert np.sum(expected) == pytest.approx(total_ms)


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
    several = done[done["output_tokens"] > 1]  # requests of one token have no time per output token
    tpot_ms = (several["last_token_s"] - several["first_token_s"]) / (several["output_tokens"] - 1) * 1e3
    assert metrics["mean_tpot_ms"] == pytest.approx(tpot_ms.mean())


def test_no_requests_give_counts_of_zero_and_no_numbers() -> None:
    metrics = request_metrics([])
    assert metrics["completed"] == 0
    assert np.isnan(metrics["mean_ttft_ms"])
