"""One simulated run held in memory, and its metrics by the names of summary.csv.

For runs of a benchmark's size: `simulator.metrics` reads runs of any length from disk and gives the same figures (a
test compares them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.check import CheckedCell
from simulator.requests import RequestBlock
from simulator.run import run_engine
from simulator.step import REQUEST
from simulator.stepcost import StepCost

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Finished requests in the order of their numbers, and the metrics of the run."""

    requests: Any  # [n] simulator.step.REQUEST
    metrics: dict[str, float]


def measure(cell: CheckedCell, costs: StepCost, blocks: Iterator[RequestBlock]) -> Measured:
    """Simulate a workload to its end."""
    kept: dict[str, list[Any]] = {"requests": [], "steps": [], "gaps_s": []}

    def sink(kind: str, records: Any) -> None:
        columns = records[["duration_us", "regular_gaps"]] if kind == "steps" else records
        kept[kind].append(columns.copy())

    engine = run_engine(cell, costs, blocks, sink)
    requests = np.concatenate(kept["requests"]) if kept["requests"] else np.zeros(0, REQUEST)
    requests = requests[np.argsort(requests["request_id"], kind="stable")]
    metrics = latency_metrics(
        *(requests[name] for name in ("arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens"))
    )
    steps = np.concatenate(kept["steps"])
    odd = np.concatenate(kept["gaps_s"]) * 1e3 if kept["gaps_s"] else np.zeros(0)
    gaps = np.concatenate((np.repeat(steps["duration_us"] / 1e3, steps["regular_gaps"]), odd))
    if len(gaps):
        metrics |= _spread("itl_ms", gaps)
    rounds = int(engine.state["verify_rounds"])
    metrics["acceptance_length"] = 1 + float(engine.accepted_at.sum()) / rounds if rounds else 1.0
    metrics["peak_running"] = float(engine.state["peak_running"])
    metrics["num_preemptions"] = float(engine.state["num_preemptions"])
    metrics["extrapolated_steps"] = float(engine.state["extrapolated_steps"]) / max(len(steps), 1)
    return Measured(requests, metrics)


def latency_metrics(arrival_s: Any, first_s: Any, last_s: Any, prompts: Any, outputs: Any) -> dict[str, float]:
    """Throughput, TTFT, TPOT and E2EL of finished requests, by vLLM's definitions (milliseconds, per second)."""
    duration = float(last_s.max() - arrival_s.min())
    several = outputs > 1
    metrics = {
        "duration_s": duration,
        "request_throughput": len(outputs) / duration,
        "output_throughput": float(outputs.sum(dtype=np.float64)) / duration,
        "total_token_throughput": float((outputs + prompts).sum(dtype=np.float64)) / duration,
        **_spread("ttft_ms", (first_s - arrival_s) * 1e3),
        **_spread("e2el_ms", (last_s - arrival_s) * 1e3),
    }
    if several.any():
        metrics |= _spread("tpot_ms", (last_s - first_s)[several] / (outputs[several] - 1) * 1e3)
    return metrics


def _spread(name: str, values: Floats) -> dict[str, float]:
    median, high = np.percentile(values, (50, 99))
    return {f"mean_{name}": float(values.mean()), f"median_{name}": float(median), f"p99_{name}": float(high)}
