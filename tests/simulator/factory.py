"""Small engines for tests: constant costs, no drafts or sure drafts, and a driver that looks after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import simpy

from simulator.costtables import CostTables
from simulator.engine import Client, Engine, EngineConfig
from simulator.requests import RequestBlock
from simulator.sampling import AcceptanceTables


def constant_cost(max_rows: int, per_row_us: float = 0.0, max_model_len: int = 1000) -> CostTables:
    """Cost tables that charge rows alone."""
    zeros = np.zeros(max_rows + 1)
    return CostTables(
        rows_us=per_row_us * np.arange(max_rows + 1, dtype=float),
        head_us=zeros.copy(),
        state_us=zeros.copy(),
        draft_us=zeros.copy(),
        attn_batch=np.array([1.0, 1e6]),
        attn_len=np.array([0.0, 1e6]),
        attn_us=np.zeros((2, 2)),
        attn_measured=np.ones((2, 2)),
        prefill_attn_us=np.zeros(max_model_len + 1),
        prefill_state_us=zeros.copy(),
        batch_count=np.array([1.0, 1e6]),
        batch_len=np.array([1.0, 1e6]),
        batch_attn=np.ones((2, 2)),
        batch_state=np.ones((2, 2)),
        limits=np.full(6, 1e9),
    )


def no_drafts() -> AcceptanceTables:
    return AcceptanceTables(np.ones(1), np.zeros((1, 0)))


def chain_acceptance(*survival: float) -> AcceptanceTables:
    """Acceptance of a chain with the given chances that at least 1, 2, … drafts are accepted."""
    return AcceptanceTables(np.ones(1), np.array([survival]))


def requests(prompts: list[int], outputs: list[int], arrivals: list[float] | None = None) -> Iterator[RequestBlock]:
    """One block of requests; all at time 0 unless told otherwise."""
    times = np.zeros(len(prompts)) if arrivals is None else np.array(arrivals)
    return iter([RequestBlock(times, np.array(prompts, np.int32), np.array(outputs, np.int32))])


def run(
    config: EngineConfig,
    blocks: Iterator[RequestBlock],
    acceptance: AcceptanceTables | None = None,
    max_concurrency: int | None = None,
    after_step: Callable[[Engine, Any], None] | None = None,
    buffer_records: int = 1,
) -> tuple[Engine, dict[str, Any]]:
    """Serve all requests, 1 ms a step and 1 µs a row; `after_step(engine, step)` sees the engine after every step."""
    kept: dict[str, list[Any]] = {"steps": [], "requests": [], "gaps_s": []}

    def sink(kind: str, array: Any) -> None:
        kept[kind].append(array.copy())
        if kind == "steps" and after_step is not None:
            after_step(engine, array[0])

    env = simpy.Environment()
    rows = max(config.max_num_batched_tokens, config.max_num_seqs * config.rows)
    cost = constant_cost(rows, 1.0, config.max_model_len)
    engine = Engine(env, config, cost, acceptance or no_drafts(), sink, buffer_records=buffer_records)
    Client(engine, blocks, max_concurrency)
    env.run()
    return engine, {kind: np.concatenate(arrays) for kind, arrays in kept.items() if arrays}


def small(**changes: Any) -> EngineConfig:
    """An engine with blocks of 16 tokens; 1 ms of host time per step."""
    values: dict[str, Any] = {
        "num_blocks": 40,
        "block_size_tokens": 16,
        "attention_groups": 1,
        "state_blocks": 2,
        "rows": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "host_us_per_step": 1000.0,
    }
    return EngineConfig(**(values | changes))
