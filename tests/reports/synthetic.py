"""Run directories with invented but plausible figures, for the tests of the report; run as a script to look at one.

Not a simulator: a request holds memory in proportion to its states and context, the pool caps how many run, and a step
grows with rows and requests. Numbers from here must never be shown as results.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
COLUMNS = [
    "cell",
    "engine",
    "engine_options",
    "model",
    "gpu",
    "tensor_parallel_size",
    "weight_dtype",
    "moe_routing",
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
    "enable_prefix_caching",
    "prefix_cache_retention_interval",
    "scheduling_policy",
    "async_scheduling",
    "workload",
    "arrivals",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "num_requests",
    "num_warmup_requests",
    "seed",
    "completed",
    "duration_s",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "mean_ttft_ms",
    "std_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "std_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "std_itl_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "mean_itl_per_token_ms",
    "std_itl_per_token_ms",
    "median_itl_per_token_ms",
    "p99_itl_per_token_ms",
    "mean_e2el_ms",
    "std_e2el_ms",
    "median_e2el_ms",
    "p99_e2el_ms",
    "mean_queue_ms",
    "std_queue_ms",
    "median_queue_ms",
    "p99_queue_ms",
    "acceptance_length",
    "acceptance_rate",
    "per_position_acceptance_rates",
    "tokens_per_round",
    "num_steps",
    "mean_step_ms",
    "rows_share",
    "head_share",
    "state_share",
    "attention_share",
    "prefill_share",
    "draft_share",
    "host_share",
    "peak_running",
    "mean_running",
    "peak_waiting",
    "num_gpu_blocks",
    "kv_cache_tokens",
    "blocks_per_request",
    "peak_kv_usage",
    "peak_kv_gib",
    "reserved_records_gib",
    "mean_kv_usage",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prefix_cache_hit_rate",
    "memory_bound",
    "memory_limited_steps",
    "seqs_limited_steps",
    "budget_limited_steps",
    "saturated",
    "modelled",
    "extrapolated",
    "extrapolated_steps",
]
METHODS = ("storeall", "replayssm", "treewy", "treelog")
TREES = {"1,1,1": (4, 3.23), "2,2,2": (15, 3.38), "3,3,3": (40, 3.58)}
BUDGETS = (0.6, 0.75, 0.9)
LOADS = (1, 8, 32, 64, 128, 256)
MEMORY, WEIGHTS, DRAFTER, RUNTIME, BLOCK = (
    150_754_820_096,
    71_000_000_000,
    1_600_000_000,
    5_800_000_000,
    21 * 2**20,
)
STATE_GIB, CONTEXT_GIB = 62 / 1024, 0.075


def record_gib(method: str, rows: int) -> float:
    """Records that a method reserves for one request that may run."""
    return {"storeall": 0.0, "replayssm": 0.012, "treewy": 0.002 * rows, "treelog": 0.015 + 0.0008 * rows}[method]


def held_gib(method: str, rows: int) -> float:
    """Memory of one running request."""
    states = rows if method == "storeall" else 1
    return states * STATE_GIB + record_gib(method, rows) + CONTEXT_GIB


def step_ms(method: str, rows: int, running: float) -> float:
    """Time of one engine step."""
    state = {
        "storeall": 0.009 * rows,
        "replayssm": 0.02,
        "treewy": 0.033 + 0.0006 * rows,
        "treelog": 0.021 + 0.0004 * rows,
    }
    return 6.4 + 0.25 * math.sqrt(rows * running) + 0.018 * rows * running + state[method] * running


def term_shares(step: float, rows: int) -> dict[str, float]:
    """Shares of a step's terms: 2 ms of the host, and of the rest the same parts, drafting only with drafts."""
    parts = {"rows": 6.0, "head": 0.4, "state": 2.0, "attention": 1.2, "prefill": 0.3, "draft": 0.8 * (rows > 1)}
    gpu = (1 - 2 / step) / sum(parts.values())
    return {**{term: gpu * part for term, part in parts.items()}, "host": 2 / step}


def row(cell: int, method: str, tree: str, budget: float, load: float, /, **settings: Any) -> dict[str, Any]:
    """One row of summary.csv; `settings` override any column."""
    rows, accepted = TREES[tree]
    pool = max(MEMORY * budget - WEIGHTS - DRAFTER - RUNTIME, 4 * BLOCK) / GIB
    by_rate = settings.get("request_rate") is not None
    offered = min(load * 7.0, 256.0) if by_rate else float(load)
    running = max(min(offered, pool / held_gib(method, rows)), 0.4)
    bound = running < offered
    step = step_ms(method, rows, running)
    shares = term_shares(step, rows)
    output = 0.86 * running * accepted / step * 1000
    if by_rate:
        output = min(output, load * 1100)
    wait = (offered - running) * step * 130 / running if bound else 0.0
    base: dict[str, Any] = dict.fromkeys(COLUMNS, 0)
    base |= {
        "cell": f"c{cell:04d}",
        "engine": "vllm",
        "engine_options": "",
        "model": "Qwen3.5-35B-A3B",
        "gpu": "h200",
        "tensor_parallel_size": 1,
        "weight_dtype": "bf16",
        "moe_routing": "power_law_1.2",
        "kv_cache_dtype": "bfloat16",
        "state_dtype": "float32",
        "state_method": method,
        "tree": tree,
        "num_rows": rows,
        "gpu_memory_utilization": budget,
        "max_num_seqs": 256,
        "running_limit": 256,
        "max_model_len": 32768,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "prefix_cache_retention_interval": "",
        "scheduling_policy": "fcfs",
        "async_scheduling": False,
        "workload": "azure-conv",
        "arrivals": "closed-loop",
        "request_rate": "",
        "burstiness": 1.0,
        "max_concurrency": load,
        "num_requests": 1000,
        "num_warmup_requests": 0,
        "seed": 0,
        "completed": 1000,
        "output_throughput": output,
        "mean_ttft_ms": 70 + wait / 2,
        "p99_ttft_ms": 140 + 2.1 * offered + wait,
        "mean_tpot_ms": step / accepted * 1.12,
        "acceptance_length": accepted,
        "acceptance_rate": 100 * (accepted - 1) / (rows - 1),
        "per_position_acceptance_rates": "0.8000;0.7000;0.6000",
        "tokens_per_round": 0.99 * accepted,
        "mean_step_ms": step,
        **{f"{term}_share": share for term, share in shares.items()},
        "peak_running": math.ceil(running),
        "mean_running": 0.95 * running,
        "num_gpu_blocks": int(pool * GIB / BLOCK),
        "blocks_per_request": 12,
        "peak_kv_usage": min(running * held_gib(method, rows) / pool, 1.0),
        "peak_kv_gib": min(math.ceil(running) * held_gib(method, rows), pool),
        "reserved_records_gib": 256 * record_gib(method, rows),
        "num_preemptions": int(40 * bound),
        "prefix_cache_hit_rate": "",
        "memory_bound": bound,
        "memory_limited_steps": 0.6 if bound else 0.0,
        "seqs_limited_steps": 0.0,
        "budget_limited_steps": 0.01,
        "saturated": by_rate and bound,
        "modelled": True,
        "extrapolated": rows * running > 4096,
        "extrapolated_steps": 0.7 if rows * running > 4096 else 0.0,
    }
    return base | settings


def sweep(
    methods: Sequence[str] = METHODS,
    trees: Sequence[str] = tuple(TREES),
    budgets: Sequence[float] = BUDGETS,
    loads: Sequence[float] = LOADS,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Rows of a sweep over concurrency; chains only for replayssm."""
    points = [(m, t, b, c) for b in budgets for c in loads for t in trees for m in methods]
    points = [point for point in points if not (point[0] == "replayssm" and point[1] != "1,1,1")]
    return [row(number, *point, **settings) for number, point in enumerate(points)]


def rate_sweep(rates: Sequence[float] = (2, 4, 8, 12, 16), **settings: Any) -> list[dict[str, Any]]:
    """Rows of a sweep over Poisson arrival rates."""
    points = [(m, t, b, r) for b in BUDGETS for r in rates for t in TREES for m in ("storeall", "treewy", "treelog")]
    return [
        row(n, m, t, b, r, **{"request_rate": r, "max_concurrency": "", "arrivals": "poisson"} | settings)
        for n, (m, t, b, r) in enumerate(points)
    ]


def ledgers(methods: Sequence[str] = METHODS) -> list[dict[str, Any]]:
    """Ledgers whose lines add up to the GPU's memory."""
    found = []
    for method in methods:
        for tree, (rows, _) in TREES.items():
            if method == "replayssm" and tree != "1,1,1":
                continue
            for budget in BUDGETS:
                found.append(_ledger(method, tree, rows, budget))
    return found


def _ledger(method: str, tree: str, rows: int, budget: float) -> dict[str, Any]:
    reserve = MEMORY - int(MEMORY * budget)
    scratch = int(256 * record_gib(method, rows) * GIB)
    pool = MEMORY - reserve - WEIGHTS - DRAFTER - RUNTIME - scratch
    blocks = pool // BLOCK
    state, kv = int(STATE_GIB * GIB), 640 * 2**20
    states = rows if method == "storeall" else 1
    requests = pool // (states * state + kv)
    lines = {
        "outside_gpu_memory_utilization": reserve,
        "weights": WEIGHTS,
        "drafter_weights": DRAFTER,
        "runtime_and_activations": RUNTIME,
        "collectives": 0,
        "attention_kv": requests * kv * 10 // 11,
        "drafter_kv": requests * (kv - kv * 10 // 11),
        "recurrent_state": requests * state,
        "speculative_states": requests * (states - 1) * state,
        "method_scratch": scratch,
    }
    lines["free_blocks"] = blocks * BLOCK - sum(
        lines[k] for k in ("attention_kv", "drafter_kv", "recurrent_state", "speculative_states")
    )
    lines["pool_remainder"] = MEMORY - sum(lines.values())
    return {
        "state_method": method,
        "tree": tree,
        "gpu_memory_utilization": budget,
        "lines": lines,
        "num_gpu_blocks": blocks,
        "kv_cache_tokens": blocks * 1056 // (3 * states),
        "max_concurrency": pool / (states * state + kv),
        "blocks_per_request": 32 + 3 * states,
        "block_size_tokens": 1056,
        "bytes_per_block": BLOCK,
        "gpu_blocks_source": "estimated",
    }


def record(name: str = "qwen3.5-35b-h200", **changes: Any) -> dict[str, Any]:
    """A run.json; `changes` override its fields."""
    base: dict[str, Any] = {
        "schema_version": 1,
        "treewy_version": "0.1.0",
        "name": name,
        "scenario": {
            "name": name,
            "model": "Qwen3.5-35B-A3B",
            "gpu": "h200",
            "engine": {"gpu_memory_utilization": list(BUDGETS)},
            "speculation": {"state_method": list(METHODS), "tree": list(TREES)},
            "workload": {
                "trace": "azure-conv",
                "arrivals": "closed-loop",
                "max_concurrency": list(LOADS),
                "num_requests": 1000,
            },
            "seed": 0,
        },
        "versions": {"python": "3.11.7", "numpy": "2.4.6", "numba": "0.68.1", "simpy": "4.1.2", "polars": "2.1.0"},
        "seed": 0,
        "first_cell": {
            "name": name,
            "engine": {"max_num_seqs": 256, "running_limit": None, "enable_chunked_prefill": True},
            "speculation": {"state_method": "storeall", "tree": "1,1,1"},
            "host": {"ms_per_step": 2.0, "ms_per_prompt_step": 9.0},
        },
        "operator_tables": {"h200": "82f57a3c79069c52"},
        "skipped": [
            {
                "model": "Qwen3.5-35B-A3B",
                "state_method": "replayssm",
                "tree": tree,
                "gpu_memory_utilization": budget,
                "max_concurrency": load,
                "request_rate": None,
                "reason": "state method 'replayssm' verifies chains only; give it a chain such as 1,1,1",
            }
            for tree in ("2,2,2", "3,3,3")
            for budget in BUDGETS
            for load in LOADS
        ],
        "acceptance": {
            "name": "mtp-hybrid",
            "concentration": math.inf,
            "decay": 1.0,
            "rank_rescue": [0.28, 0.2],
            "acceptance_length": {"1,1,1": 3.23, "2,2,2": 3.38, "3,3,3": 3.58},
            "source": "preset fitted to published lengths",
        },
        "workload": {
            "trace": "azure-conv",
            "requests": 1000,
            "dropped_rows": 0,
            "prompt_tokens": {"mean": 1154.7, "p50": 1020.0, "p99": 4142.0},
            "output_tokens": {"mean": 211.1, "p50": 129.0, "p99": 601.0},
            "source": "Azure LLM inference trace 2023, conversation",
        },
        "step_cost": [
            {
                "term": "rows",
                "source": "measured",
                "detail": "projections, experts, norms by rows in the step, up to 4,096 rows",
            },
            {"term": "attention", "source": "measured", "detail": "decode attention by requests and context"},
            {"term": "state", "source": "modelled", "detail": "GDN phases from bytes moved at 75 % of copy bandwidth"},
            {"term": "draft", "source": "modelled", "detail": "one drafter pass per tree depth from the same tables"},
            {"term": "host", "state_method": "all", "source": "fitted: 2 ms a step and 9 ms more with a prompt"},
            {"term": "head", "source": "extrapolated", "detail": "lm_head beyond 8,192 rows holds the last rate"},
        ],
        "ledgers": ledgers(),
    }
    return base | changes


def write_run(run_dir: Path, rows: Sequence[dict[str, Any]], run_record: dict[str, Any] | None = None) -> Path:
    """Write summary.csv and run.json; returns the directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "summary.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="raise")
        writer.writeheader()
        for values in rows:
            writer.writerow({k: str(v).lower() if isinstance(v, bool) else v for k, v in values.items()})
    (run_dir / "run.json").write_text(json.dumps(record() if run_record is None else run_record), encoding="utf-8")
    return run_dir


def write_examples(out: Path) -> list[Path]:
    """One run directory per kind of data: full, single point, empty, rate axis, several groups."""
    single = [row(0, "treelog", "1,1,1", 0.75, 64)]
    several = sweep(loads=(8, 64, 256)) + sweep(loads=(8, 64, 256), workload="sharegpt")
    return [
        write_run(out / "full", sweep()),
        write_run(out / "single", single, record("single", skipped=[], ledgers=ledgers(("treelog",))[1:2])),
        write_run(out / "empty", [], record("empty", ledgers=[])),
        write_run(out / "rate", rate_sweep(), record("rate", skipped=[])),
        write_run(out / "several", several, record("several")),
    ]


if __name__ == "__main__":
    from reports import write_report

    for directory in write_examples(Path(sys.argv[1])):
        print(write_report(directory))
