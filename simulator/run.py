"""One cell: a scenario of plain values in, one summary row and its records out.

`check` finds what can be found before time starts to run; `simulate` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simpy

from lab.acceptance import AcceptanceModel, acceptance_from
from lab.errors import InfeasibleError, UsageError
from lab.methods import get_method
from lab.methods.base import StateMethod
from lab.shapes import ModelShape, load_shape
from lab.trees import DraftTree, parse_tree
from lab.units import GIB
from simulator.engine import Client, Engine, EngineConfig
from simulator.gputime import with_gpu_time
from simulator.ledger import Ledger, build_ledger
from simulator.metrics import gap_metrics, mean_queue_s, request_metrics
from simulator.records import PartWriter
from simulator.sampling import build_tables
from simulator.scenario import Scenario
from simulator.stepcost import StepCost, build_step_cost
from simulator.workload import RequestBlock, length_limits, request_blocks

#: Columns of summary.csv that say what was simulated, in their order.
IDENTITY = (
    "model",
    "gpu",
    "tensor_parallel_size",
    "weight_dtype",
    "kv_cache_dtype",
    "state_dtype",
    "state_method",
    "tree",
    "num_rows",
    "gpu_memory_utilization",
    "max_num_seqs",
    "running_limit",
    "max_model_len",
    "max_num_batched_tokens",
    "workload",
    "arrivals",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "num_requests",
    "num_warmup_requests",
    "seed",
)

#: A run is memory bound when the queue's head lacked blocks in more than this share of its steps, or on preemption.
BOUND_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class CheckedCell:
    """A scenario that can run: its parts by name, its ledger and its acceptance."""

    scenario: Scenario
    shape: ModelShape
    method: StateMethod
    tree: DraftTree
    ledger: Ledger
    acceptance: AcceptanceModel
    acceptance_length: float

    @property
    def tree_name(self) -> str:
        """How tables call the tree: the scenario's text, or `none` when nothing is drafted."""
        return self.scenario.speculation.tree if self.tree.num_drafts else "none"


def check(scenario: Scenario) -> CheckedCell:
    """Check a scenario without building its tables.

    Raises `UsageError` for impossible values and `InfeasibleError` for combinations that cannot run.
    """
    if scenario.engine.enable_prefix_caching:
        raise UsageError(
            "engine.enable_prefix_caching = true: the ledger prices it, the simulator does not model it yet; set false"
        )
    shape = load_shape(scenario.model)
    method = get_method(scenario.speculation.state_method)
    tree = parse_tree(scenario.speculation.tree)
    ledger = build_ledger(shape, scenario.gpu, scenario.tensor_parallel_size, scenario.engine, method, tree)
    ledger.check_num_seqs(scenario.engine.num_seqs)
    ledger.check_fits()
    _check_workload(scenario, tree)
    request_blocks(scenario.workload, scenario.seed)  # its own checks
    settings = scenario.speculation.acceptance
    acceptance = acceptance_from(
        preset=settings.preset,
        per_depth=settings.per_depth,
        rank_rescue=settings.rank_rescue,
        concentration=settings.concentration,
    )
    return CheckedCell(
        scenario,
        shape,
        method,
        tree,
        ledger,
        acceptance,
        acceptance.served_acceptance_length(tree),
    )


def step_cost(cell: CheckedCell) -> StepCost:
    """The cell's cost tables; raises `UsageError` when no operator table covers the model."""
    scenario = cell.scenario
    tables = build_step_cost(
        cell.shape,
        scenario.gpu,
        scenario.tensor_parallel_size,
        scenario.engine,
        cell.method,
        cell.tree,
        rows_committed=cell.acceptance_length,
    )
    return with_gpu_time(tables, scenario.gpu_time)


def simulate(cell: CheckedCell, costs: StepCost, folder: Path) -> dict[str, Any]:
    """Run a cell, leave its records as parts in `folder`, return its row of `summary.csv` (without the cell number)."""
    writer = PartWriter(folder)
    engine = run_engine(cell, costs, request_blocks(cell.scenario.workload, cell.scenario.seed), writer)
    state = engine.state
    requests = request_metrics(writer.parts("requests"), cell.scenario.workload.num_warmup_requests)
    later_tokens = int(state["emitted_tokens"]) - int(state["num_finished"])
    gaps = gap_metrics(writer.parts("steps"), writer.parts("gaps_s"), later_tokens)
    settings, layout, blocks = cell.scenario.engine, cell.ledger.layout, cell.ledger.usable_blocks
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
        "mean_step_ms": float(state["busy_s"]) / steps * 1e3 if steps else float("nan"),
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
        "memory_bound": bool(limits["memory"] > BOUND_SHARE or state["num_preemptions"] > 0),
        **{f"{name}_limited_steps": share for name, share in limits.items()},
        "saturated": _saturated(cell.scenario, writer.parts("requests")),
        "modelled": any(source.startswith("modelled") for source in costs.sources.values()),
        "extrapolated": bool(state["extrapolated_steps"] > 0),
        "extrapolated_steps": int(state["extrapolated_steps"]) / steps if steps else 0.0,
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
    workload, settings, host = cell.scenario.workload, cell.scenario.engine, cell.scenario.host
    layout = cell.ledger.layout
    env = simpy.Environment()
    engine = Engine(
        env,
        EngineConfig(
            num_blocks=cell.ledger.usable_blocks,
            block_size_tokens=layout.block_size_tokens,
            attention_groups=layout.attention_groups,
            state_blocks=layout.state_blocks_per_request,
            rows=cell.tree.num_rows,
            max_num_seqs=settings.num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            chunked_prefill=settings.enable_chunked_prefill,
            host_us_per_step=host.ms_per_step * 1e3,
            host_us_per_prompt_step=host.ms_per_prompt_step * 1e3,
            seed=cell.scenario.seed,
        ),
        costs.tables,
        build_tables(cell.acceptance, cell.tree),
        sink,
    )
    Client(engine, blocks, workload.max_concurrency)
    env.run()
    return engine


def _check_workload(scenario: Scenario, tree: DraftTree) -> None:
    """Every request must fit `max_model_len`, and one step when prompts are not cut into chunks."""
    engine = scenario.engine
    _, longest_total = length_limits(scenario.workload)
    if longest_total > engine.max_model_len:
        raise UsageError(
            f"engine.max_model_len = {engine.max_model_len}: the longest request of the workload has {longest_total} "
            f"tokens (prompt and output); raise max_model_len to at least {longest_total} or use another workload"
        )
    if not engine.enable_chunked_prefill and longest_total > engine.max_num_batched_tokens:
        raise UsageError(
            f"engine.max_num_batched_tokens = {engine.max_num_batched_tokens}: without chunked prefill it must hold "
            f"the longest request, {longest_total} tokens, which may be recomputed in one step"
        )
    if engine.max_num_batched_tokens < tree.num_rows:
        raise InfeasibleError(
            f"engine.max_num_batched_tokens = {engine.max_num_batched_tokens} is below the {tree.num_rows} rows of "
            f"tree {scenario.speculation.tree}; it must be at least that"
        )


def identity(cell: CheckedCell) -> dict[str, Any]:
    """What a cell simulated, by the names of summary.csv."""
    scenario, engine, workload = cell.scenario, cell.scenario.engine, cell.scenario.workload
    return {
        "model": cell.shape.name,
        "gpu": scenario.gpu,
        "tensor_parallel_size": scenario.tensor_parallel_size,
        "weight_dtype": engine.weight_dtype,
        "kv_cache_dtype": engine.kv_dtype,
        "state_dtype": engine.state_dtype(cell.shape.mamba_ssm_dtype),
        "state_method": cell.method.name,
        "tree": cell.tree_name,
        "num_rows": cell.tree.num_rows,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_num_seqs": engine.max_num_seqs,
        "running_limit": engine.num_seqs,
        "max_model_len": engine.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "workload": workload.trace or workload.lengths,
        "arrivals": workload.arrivals,
        "request_rate": workload.request_rate,
        "burstiness": workload.burstiness,
        "max_concurrency": workload.max_concurrency,
        "num_requests": workload.num_requests,
        "num_warmup_requests": workload.num_warmup_requests,
        "seed": scenario.seed,
    }
