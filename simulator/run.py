"""One cell: what was checked in, one summary row and its records out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import simpy

from lab.trees import DraftTree
from lab.units import GIB
from simulator.check import CheckedCell
from simulator.engine import Client, Engine, EngineConfig
from simulator.gputime import with_gpu_time
from simulator.ledger import Ledger
from simulator.metrics import gap_metrics, mean_queue_s, request_metrics, step_metrics
from simulator.records import PartWriter
from simulator.requests import RequestBlock
from simulator.sampling import build_tables
from simulator.scenario import Scenario
from simulator.sglang import cell as sglang
from simulator.sglang.ledger import SglangLedger
from simulator.stepcost import DEFAULT_ROUTING, StepCost, build_step_cost
from simulator.workload import request_blocks

#: A run is memory bound when the queue's head lacked blocks in more than this share of its steps, or on preemption.
BOUND_SHARE = 0.01


def step_cost(cell: CheckedCell) -> StepCost:
    """The cell's cost tables; raises `UsageError` when no operator table covers the model."""
    tables = build_step_cost(
        cell.shape,
        cell.scenario.gpu,
        cell.scenario.tensor_parallel_size,
        cell.engine,
        cell.method,
        cell.tree,
        rows_committed=cell.acceptance_length,
        routing=cell.moe_routing or DEFAULT_ROUTING,
    )
    return with_gpu_time(tables, cell.scenario.gpu_time)


def simulate(cell: CheckedCell, costs: StepCost, folder: Path) -> dict[str, Any]:
    """Run a cell, leave its records as parts in `folder`, return its row of `summary.csv` (without the cell number)."""
    writer = PartWriter(folder)
    engine = run_engine(cell, costs, request_blocks(cell.scenario.workload, cell.scenario.seed), writer)
    state = engine.state
    requests = request_metrics(writer.parts("requests"), cell.scenario.workload.num_warmup_requests)
    later_tokens = int(state["emitted_tokens"]) - int(state["num_finished"])
    gaps = gap_metrics(writer.parts("steps"), writer.parts("gaps_s"), later_tokens)
    settings, layout, blocks = cell.engine, cell.ledger.layout, cell.ledger.usable_blocks
    steps, rounds, span_s = int(state["num_steps"]), int(state["verify_rounds"]), float(state["now_s"]) or float("nan")
    peak_running, peak_blocks = int(state["peak_running"]), int(state["peak_blocks"])
    held_bytes = peak_blocks * layout.bytes_per_block + peak_running * layout.scratch_bytes_per_request
    limits = {name: int(state[f"{name}_limited_steps"]) / max(steps, 1) for name in ("memory", "seqs", "budget")}
    return {
        **identity(cell),
        **{name: value for name, value in requests.items() if not name.endswith("_ms")},
        **{name: value for name, value in requests.items() if name.endswith(("ttft_ms", "tpot_ms"))},
        **gaps,
        **{name: value for name, value in requests.items() if name.endswith(("e2el_ms", "queue_ms"))},
        **_speculation(cell.tree, rounds, engine.accepted_at, later_tokens),
        "num_steps": steps,
        **step_metrics(writer.parts("steps")),
        "peak_running": peak_running,
        "mean_running": float(state["running_integral"]) / span_s,
        "peak_waiting": int(state["peak_waiting"]),
        "num_gpu_blocks": cell.ledger.num_gpu_blocks,
        "kv_cache_tokens": cell.ledger.kv_cache_tokens,
        "blocks_per_request": cell.ledger.blocks_per_request,
        "peak_kv_usage": peak_blocks / blocks,
        "peak_kv_gib": held_bytes / GIB,
        "reserved_records_gib": settings.num_seqs * layout.scratch_bytes_per_request / GIB,
        "mean_kv_usage": float(state["blocks_integral"]) / span_s / blocks,
        "num_preemptions": int(state["num_preemptions"]),
        **_prefix_cache(state),
        "memory_bound": bool(limits["memory"] > BOUND_SHARE or state["num_preemptions"] > 0),
        **{f"{name}_limited_steps": share for name, share in limits.items()},
        "saturated": _saturated(cell.scenario, writer.parts("requests")),
        "modelled": any(source.startswith("modelled") for source in costs.sources.values()),
        "extrapolated": bool(state["extrapolated_steps"] > 0),
        "extrapolated_steps": int(state["extrapolated_steps"]) / steps if steps else 0.0,
        **(sglang.columns(cell.ledger, peak_running, peak_blocks) if isinstance(cell.ledger, SglangLedger) else {}),
    }


def _saturated(scenario: Scenario, parts: Sequence[Path]) -> bool:
    """Whether an open loop sends faster than the service can answer.

    Compares the mean time in the engine's queue over the last quarter of the requests with that over the second
    quarter: a queue that grows by half and exceeds a second is not a random swing. A closed loop cannot outrun itself.
    """
    if scenario.workload.arrivals == "closed-loop":
        return False
    count = scenario.workload.num_requests
    early = mean_queue_s(parts, count // 4, count // 2)
    late = mean_queue_s(parts, 3 * count // 4, count)
    return late > max(1.0, 1.5 * early)


def _prefix_cache(state: Any) -> dict[str, float]:
    """Prompt tokens looked up and found at first admissions, by vLLM's counters, and their ratio."""
    queries, hits = int(state["prefix_cache_queries"]), int(state["prefix_cache_hits"])
    rate = hits / queries if queries else float("nan")
    return {"prefix_cache_queries": queries, "prefix_cache_hits": hits, "prefix_cache_hit_rate": rate}


def _speculation(tree: DraftTree, rounds: int, accepted_at: Any, later_tokens: int) -> dict[str, Any]:
    """What drafts brought: acceptance per verification round by vLLM's definitions, and tokens emitted per round.

    The last round of a request is cut at its output length, so it emits fewer tokens than it accepted.
    """
    if not rounds:
        nan = float("nan")
        return {
            "acceptance_length": 1.0,
            "acceptance_rate": nan,
            "per_position_acceptance_rates": "",
            "tokens_per_round": nan,
        }
    at_depth = accepted_at[: tree.max_depth] / rounds
    accepted = float(at_depth.sum())
    return {
        "acceptance_length": 1 + accepted,
        "acceptance_rate": 100 * accepted / tree.num_drafts if tree.num_drafts else float("nan"),
        "per_position_acceptance_rates": ";".join(f"{rate:.4f}" for rate in at_depth),
        "tokens_per_round": later_tokens / rounds,
    }


def run_engine(cell: CheckedCell, costs: StepCost, blocks: Iterator[RequestBlock], sink: Any) -> Engine:
    """Simulate a workload to its end; records go to `sink`. Returns the idle engine with its counters."""
    workload = cell.scenario.workload
    env = simpy.Environment()
    engine = Engine(
        env,
        _engine_config(cell, cell.ledger),
        costs.tables,
        build_tables(cell.acceptance, cell.tree),
        sink,
    )
    Client(engine, blocks, workload.max_concurrency)
    env.run()
    return engine


def _engine_config(cell: CheckedCell, ledger: Ledger | SglangLedger) -> EngineConfig:
    """Limits of the engine that a cell describes."""
    settings, host = cell.engine, cell.scenario.host
    limits: dict[str, Any] = {
        "max_num_seqs": settings.num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": settings.max_model_len,
        "host_us_per_step": host.ms_per_step * 1e3,
        "host_us_per_prompt_step": host.ms_per_prompt_step * 1e3,
        "seed": cell.scenario.seed,
    }
    if isinstance(ledger, SglangLedger):
        return sglang.engine_config(ledger, limits)
    layout = ledger.layout
    return EngineConfig(
        num_blocks=ledger.usable_blocks,
        block_size_tokens=layout.block_size_tokens,
        attention_groups=layout.attention_groups,
        state_blocks=ledger.state_blocks_per_request,
        rows=cell.tree.num_rows,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        chunked_prefill=settings.enable_chunked_prefill,
        prefix_caching=settings.enable_prefix_caching,
        state_groups=layout.linear_groups,
        speculative_blocks=ledger.speculative_blocks,
        retention_blocks=_retention_blocks(settings.prefix_cache_retention_interval, layout.block_size_tokens),
        watermark_blocks=int(settings.watermark * ledger.num_gpu_blocks),
        reserve_full_isl=settings.scheduler_reserve_full_isl,
        priority_policy=settings.scheduling_policy == "priority",
        async_scheduling=settings.async_scheduling,
        **limits,
    )


def identity(cell: CheckedCell) -> dict[str, Any]:
    """What a cell simulated, by the names of summary.csv."""
    scenario, engine, workload = cell.scenario, cell.engine, cell.scenario.workload
    return {
        "engine": scenario.engine.name,
        "engine_options": scenario.engine.options,
        "model": cell.shape.name,
        "gpu": scenario.gpu,
        "tensor_parallel_size": scenario.tensor_parallel_size,
        "weight_dtype": engine.weight_dtype,
        "moe_routing": cell.moe_routing,
        "kv_cache_dtype": engine.kv_dtype,
        "state_dtype": engine.state_dtype(cell.shape.mamba_ssm_dtype),
        "state_method": cell.method.name,
        "tree": cell.tree_name,
        "num_rows": cell.tree.num_rows,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_num_seqs": scenario.engine.max_num_seqs,
        "running_limit": engine.num_seqs,
        "max_model_len": engine.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "prefix_cache_retention_interval": engine.prefix_cache_retention_interval,
        "scheduling_policy": engine.scheduling_policy,
        "async_scheduling": engine.async_scheduling,
        "workload": workload.trace or workload.lengths,
        "arrivals": workload.arrivals,
        "request_rate": workload.request_rate,
        "burstiness": workload.burstiness,
        "max_concurrency": workload.max_concurrency,
        "num_requests": workload.num_requests,
        "num_warmup_requests": workload.num_warmup_requests,
        "seed": scenario.seed,
    }


def _retention_blocks(interval: int | None, block_size_tokens: int) -> int:
    """Every how many blocks a state is kept to be hit; 0: only at the end of a prompt."""
    if interval is None:
        return 1
    return 0 if interval == 0 else max(interval // block_size_tokens, 1)
