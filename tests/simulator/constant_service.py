"""Both engines with a service that theory knows: one step of `SERVICE_S` per token, room for all that run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import simpy
from factory import constant_cost, no_drafts

from simulator.engine import Client, Engine, EngineConfig
from simulator.requests import RequestBlock
from simulator.sglang.config import SglangConfig

ENGINES = ("vllm", "sglang")
SERVICE_S = 0.01


def engine_config(engine: str, running: int) -> EngineConfig:
    """An engine that runs `running` requests of up to 1000 tokens."""
    return EngineConfig(
        num_blocks=(10 if engine == "vllm" else 1000) * running,
        block_size_tokens=1000 if engine == "vllm" else 1,
        attention_groups=1,
        state_blocks=1 if engine == "vllm" else 0,
        rows=1,
        max_num_seqs=running,
        max_num_batched_tokens=100 * running if engine == "vllm" else 8192,
        max_model_len=1000,
        host_us_per_step=SERVICE_S * 1e6,
        sglang=SglangConfig() if engine == "sglang" else None,
    )


def serve(
    engine: str, blocks: Iterator[RequestBlock], running: int, max_concurrency: int | None = None
) -> tuple[Any, Any]:
    """The engine's counters and the records of all requests."""
    records = []

    def keep(kind: str, array: Any) -> None:
        if kind == "requests":
            records.append(array.copy())

    env = simpy.Environment()
    config = engine_config(engine, running)
    cost = constant_cost(max(config.max_num_batched_tokens, running))
    serving = Engine(env, config, cost, no_drafts(), keep)
    Client(serving, blocks, max_concurrency)
    env.run()
    return serving.state, np.concatenate(records)


def poisson(rate: float, requests: int, output_tokens: int, seed: int) -> Iterator[RequestBlock]:
    """Requests of 10 tokens that arrive at random, in blocks."""
    arrival_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    for part in np.array_split(arrival_s, -(-requests // 4096)):
        yield RequestBlock(part, np.full(len(part), 10, np.int32), np.full(len(part), output_tokens, np.int32))
