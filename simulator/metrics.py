"""Latency and throughput by vLLM's definitions, from the records of one run.

TTFT, TPOT, ITL and E2EL are those of `vllm bench serve`; percentiles are exact (linear interpolation between order
statistics). ITL counts gaps between a request's successive outputs; per token, the further tokens of an output have gap
zero. Times are milliseconds, throughput is per second of the time from the first send to the last completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def weighted_percentile(values: Floats, weights: NDArray[np.int64], percent: float) -> float:
    """Percentile of `values` repeated `weights` times, as `numpy.percentile` gives it for the repeated list."""
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(weights[order])
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        return float("nan")
    position = (total - 1) * percent / 100
    below = int(np.floor(position))
    low, high = values[order][np.searchsorted(ends, [below, min(below + 1, total - 1)], side="right")]
    return float(low + (high - low) * (position - below))


def request_metrics(parts: Sequence[Path]) -> dict[str, float]:
    """Counts, throughput, TTFT, TPOT, E2EL and queueing of finished requests."""
    frame = pl.concat([pl.read_parquet(part) for part in parts]) if parts else None
    if frame is None or frame.is_empty():
        return _no_requests()
    column = {name: frame[name].to_numpy() for name in frame.columns}
    output = column["output_tokens"]
    ttft = column["first_token_s"] - column["arrival_s"]
    e2el = column["last_token_s"] - column["arrival_s"]
    many = output > 1
    tpot = (column["last_token_s"] - column["first_token_s"])[many] / (output[many] - 1)
    duration = float(column["last_token_s"].max() - column["arrival_s"].min())
    tokens_in, tokens_out = int(column["prompt_tokens"].sum()), int(output.sum())
    return {
        "completed": len(frame),
        "duration_s": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(frame) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        **_spread("ttft_ms", ttft * 1e3),
        **_spread("tpot_ms", tpot * 1e3),
        **_spread("e2el_ms", e2el * 1e3),
        **_spread("queue_ms", (column["scheduled_s"] - column["arrival_s"]) * 1e3),
    }


def gap_metrics(step_parts: Sequence[Path], gap_parts: Sequence[Path], tokens_after_first: int) -> dict[str, float]:
    """Inter-token latency per output and per token.

    `tokens_after_first` is the number of tokens that followed a request's first; those that no gap accounts for came
    together with another one.
    """
    steps = [pl.read_parquet(part, columns=["duration_us", "regular_gaps"]) for part in step_parts]
    gaps = [pl.read_parquet(part)["gaps_s"].to_numpy() for part in gap_parts]
    regular = [step["duration_us"].to_numpy() / 1e3 for step in steps]
    values = np.concatenate([*regular, *(gap * 1e3 for gap in gaps), np.zeros(1)])
    counts = [step["regular_gaps"].to_numpy().astype(np.int64) for step in steps]
    weights = np.concatenate([*counts, *(np.ones(len(gap), np.int64) for gap in gaps), np.zeros(1, np.int64)])
    outputs = int(weights.sum())
    total_ms = float(values @ weights)
    result = {
        "mean_itl_ms": total_ms / outputs if outputs else float("nan"),
        "median_itl_ms": weighted_percentile(values, weights, 50),
        "p99_itl_ms": weighted_percentile(values, weights, 99),
    }
    weights[-1] = tokens_after_first - outputs
    result["mean_itl_per_token_ms"] = total_ms / tokens_after_first if tokens_after_first else float("nan")
    result["p99_itl_per_token_ms"] = weighted_percentile(values, weights, 99)
    return result


def _spread(name: str, values: Floats) -> dict[str, float]:
    if not len(values):
        return {f"{kind}_{name}": float("nan") for kind in ("mean", "median", "p99")}
    median, high = np.percentile(values, [50, 99])
    return {f"mean_{name}": float(values.mean()), f"median_{name}": float(median), f"p99_{name}": float(high)}


def _no_requests() -> dict[str, float]:
    nan = float("nan")
    result: dict[str, Any] = {
        "completed": 0,
        "duration_s": 0.0,
        "total_input_tokens": 0,
        "total_output_tokens": 0,
    }
    result |= dict.fromkeys(("request_throughput", "output_throughput", "total_token_throughput"), nan)
    for name in ("ttft_ms", "tpot_ms", "e2el_ms", "queue_ms"):
        result |= _spread(name, np.zeros(0))
    return result
