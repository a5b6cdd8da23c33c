"""INV-9: with constant service the simulator meets queueing theory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import simpy
from factory import constant_cost, no_drafts

from simulator.engine import Client, Engine, EngineConfig
from simulator.requests import RequestBlock

SERVICE_S = 0.01


def serve(blocks: Iterator[RequestBlock], max_num_seqs: int, max_concurrency: int | None = None) -> tuple[Any, Any]:
    """Requests served with one step of `SERVICE_S` per token; returns the engine's counters and all records."""
    records = []

    def keep(kind: str, array: Any) -> None:
        if kind == "requests":
            records.append(array.copy())

    env = simpy.Environment()
    config = EngineConfig(
        num_blocks=10 * max_num_seqs,
        block_size_tokens=1000,
        attention_groups=1,
        state_blocks=1,
        rows=1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=100 * max_num_seqs,
        max_model_len=1000,
        host_us_per_step=SERVICE_S * 1e6,
    )
    engine = Engine(env, config, constant_cost(100 * max_num_seqs), no_drafts(), keep)
    Client(engine, blocks, max_concurrency)
    env.run()
    return engine.state, np.concatenate(records)


def poisson(rate: float, requests: int, output_tokens: int, seed: int) -> Iterator[RequestBlock]:
    rng = np.random.default_rng(seed)
    now_s = 0.0
    for start in range(0, requests, 4096):
        count = min(4096, requests - start)
        arrival_s = now_s + np.cumsum(rng.exponential(1 / rate, count))
        now_s = float(arrival_s[-1])
        yield RequestBlock(arrival_s, np.full(count, 10, np.int32), np.full(count, output_tokens, np.int32))


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_waiting_time_is_that_of_m_d_1(load: float) -> None:
    state, requests = serve(poisson(load / SERVICE_S, 1_000_000, output_tokens=1, seed=4), max_num_seqs=1)
    waiting_s = (requests["scheduled_s"] - requests["arrival_s"]).mean()
    assert waiting_s == pytest.approx(load * SERVICE_S / (2 * (1 - load)), rel=0.02)
    assert state["busy_s"] / requests["last_token_s"].max() == pytest.approx(load, rel=0.02)


def test_littles_law() -> None:
    state, requests = serve(poisson(20.0, 100_000, output_tokens=30, seed=5), max_num_seqs=64)
    time_in_system_s = requests["last_token_s"] - requests["scheduled_s"]
    duration_s = requests["last_token_s"].max() - requests["arrival_s"].min()
    expected = len(requests) / duration_s * time_in_system_s.mean()
    assert state["running_integral"] / duration_s == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_saturated_throughput_is_batch_over_step_time(batch: int) -> None:
    requests = 20 * batch
    blocks = iter([RequestBlock(np.zeros(requests), np.full(requests, 5, np.int32), np.full(requests, 200, np.int32))])
    state, records = serve(blocks, max_num_seqs=batch, max_concurrency=batch)
    duration_s = records["last_token_s"].max() - records["arrival_s"].min()
    assert records["output_tokens"].sum() / duration_s == pytest.approx(batch / SERVICE_S, rel=0.02)
    assert state["peak_running"] == batch


def test_constant_arrivals_below_capacity_never_wait() -> None:
    arrival_s = np.arange(1, 501) * 2 * SERVICE_S
    block = RequestBlock(arrival_s, np.full(500, 5, np.int32), np.full(500, 1, np.int32))
    _, records = serve(iter([block]), max_num_seqs=1)
    assert np.array_equal(records["scheduled_s"], records["arrival_s"])
    assert records["first_token_s"] - records["arrival_s"] == pytest.approx(SERVICE_S)
