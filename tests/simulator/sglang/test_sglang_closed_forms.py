"""INV-9: with constant service SGLang's engine meets queueing theory, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import simpy
from factory import constant_cost, no_drafts

from simulator.engine import Client, Engine, EngineConfig
from simulator.requests import RequestBlock
from simulator.sglang.config import SglangConfig

SERVICE_S = 0.01


def serve(blocks: Iterator[RequestBlock], running: int, max_concurrency: int | None = None) -> tuple[Any, Any]:
    """Requests served with one step of `SERVICE_S` per token; returns the engine's counters and all records."""
    records = []

    def keep(kind: str, array: Any) -> None:
        if kind == "requests":
            records.append(array.copy())

    env = simpy.Environment()
    config = EngineConfig(
        num_blocks=1000 * running,
        block_size_tokens=1,
        attention_groups=1,
        state_blocks=0,
        rows=1,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=1000,
        host_us_per_step=SERVICE_S * 1e6,
        sglang=SglangConfig(state_slots=running),
    )
    engine = Engine(env, config, constant_cost(max(8192, running)), no_drafts(), keep)
    Client(engine, blocks, max_concurrency)
    env.run()
    return engine.state, np.concatenate(records)


def poisson(rate: float, requests: int, output_tokens: int, seed: int) -> Iterator[RequestBlock]:
    arrival_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    for part in np.array_split(arrival_s, -(-requests // 4096)):
        yield RequestBlock(part, np.full(len(part), 10, np.int32), np.full(len(part), output_tokens, np.int32))


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waiting_time_is_that_of_m_d_1(load: float) -> None:
    state, requests = serve(poisson(load / SERVICE_S, 1_000_000, output_tokens=1, seed=4), running=1)
    waiting_s = (requests["scheduled_s"] - requests["arrival_s"]).mean()
    assert waiting_s == pytest.approx(load * SERVICE_S / (2 * (1 - load)), rel=0.02)
    assert state["busy_s"] / requests["last_token_s"].max() == pytest.approx(load, rel=0.02)


def test_littles_law() -> None:
    state, requests = serve(poisson(5.0, 50_000, output_tokens=30, seed=5), running=64)
    time_in_system_s = requests["last_token_s"] - requests["scheduled_s"]
    duration_s = requests["last_token_s"].max() - requests["arrival_s"].min()
    expected = len(requests) / duration_s * time_in_system_s.mean()
    assert state["running_integral"] / duration_s == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("batch", [1, 8, 256])
def test_saturated_throughput_is_batch_over_step_time(batch: int) -> None:
    """All of a batch are prompts in one step and decode together from then on, so every token takes one step."""
    requests = 20 * batch
    blocks = iter([RequestBlock(np.zeros(requests), np.full(requests, 5, np.int32), np.full(requests, 200, np.int32))])
    state, records = serve(blocks, running=batch, max_concurrency=batch)
    duration_s = records["last_token_s"].max() - records["arrival_s"].min()
    assert records["output_tokens"].sum() / duration_s == pytest.approx(batch / SERVICE_S, rel=0.02)
    assert state["peak_running"] == batch


def test_prompts_that_go_first_slow_the_decoding_requests_down() -> None:
    """Ten clients out of phase: in every round of a request, each of the other nine stops it for one prompt."""
    outputs = 100
    arrival_s = 0.1 * np.arange(1000)
    block = RequestBlock(arrival_s, np.full(1000, 5, np.int32), np.full(1000, outputs, np.int32))
    _, records = serve(iter([block]), running=10, max_concurrency=10)
    middle = records[200:800]
    gaps = (middle["last_token_s"] - middle["first_token_s"]).mean() / SERVICE_S
    assert gaps == pytest.approx(outputs - 1 + 10, abs=1.5)
