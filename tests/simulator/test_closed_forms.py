"""INV-9: with constant service both engines meet queueing theory."""

from __future__ import annotations

import numpy as np
import pytest
from constant_service import ENGINES, SERVICE_S, poisson, serve

from simulator.requests import RequestBlock

every_engine = pytest.mark.parametrize("engine", ENGINES)


@every_engine
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waiting_time_is_that_of_m_d_1(engine: str, load: float) -> None:
    state, requests = serve(engine, poisson(load / SERVICE_S, 1_000_000, output_tokens=1, seed=4), running=1)
    waiting_s = (requests["scheduled_s"] - requests["arrival_s"]).mean()
    assert waiting_s == pytest.approx(load * SERVICE_S / (2 * (1 - load)), rel=0.02)
    assert state["busy_s"] / requests["last_token_s"].max() == pytest.approx(load, rel=0.02)


@every_engine
def test_littles_law(engine: str) -> None:
    state, requests = serve(engine, poisson(5.0, 50_000, output_tokens=30, seed=5), running=64)
    time_in_system_s = requests["last_token_s"] - requests["scheduled_s"]
    duration_s = requests["last_token_s"].max() - requests["arrival_s"].min()
    expected = len(requests) / duration_s * time_in_system_s.mean()
    assert state["running_integral"] / duration_s == pytest.approx(expected, rel=0.02)


@every_engine
@pytest.mark.parametrize("batch", [1, 8, 256])
def test_saturated_throughput_is_batch_over_step_time(engine: str, batch: int) -> None:
    """All of a batch are prompts in one step and decode together from then on, so every token takes one step."""
    requests = 20 * batch
    blocks = iter([RequestBlock(np.zeros(requests), np.full(requests, 5, np.int32), np.full(requests, 200, np.int32))])
    state, records = serve(engine, blocks, running=batch, max_concurrency=batch)
    duration_s = records["last_token_s"].max() - records["arrival_s"].min()
    assert records["output_tokens"].sum() / duration_s == pytest.approx(batch / SERVICE_S, rel=0.02)
    assert state["peak_running"] == batch


@every_engine
def test_constant_arrivals_below_capacity_never_wait(engine: str) -> None:
    arrival_s = np.arange(1, 501) * 2 * SERVICE_S
    block = RequestBlock(arrival_s, np.full(500, 5, np.int32), np.full(500, 1, np.int32))
    _, records = serve(engine, iter([block]), running=1)
    assert np.array_equal(records["scheduled_s"], records["arrival_s"])
    assert records["first_token_s"] - records["arrival_s"] == pytest.approx(SERVICE_S)
