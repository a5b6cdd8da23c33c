"""Latency and throughput by vLLM's definitions, from the records of one run.

TTFT, TPOT, ITL and E2EL are those of `vllm bench serve`; percentiles are exact (linear interpolation between order
statistics). ITL counts gaps between a request's successive outputs; per token, the further tokens of an output have gap
zero. Times are milliseconds, throughput is per second of the time from the first send to the last completion. Records
are read part by part, so that memory does not grow with the length of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from simulator.distribution import Distribution, Sample

#: Terms of a step that are GPU time, as records of steps name them; the rest of its length is the host's.
GPU_TERMS = ("rows", "head", "state", "attention", "prefill", "draft")


def request_metrics(parts: Sequence[Path], warmup: int = 0) -> dict[str, float]:
    """Counts, totals, throughput, TTFT, TPOT, E2EL and time in the engine's queue of finished requests.

    Requests with a number below `warmup` do not count.
    """
    completed = tokens_in = tokens_out = 0
    first_s, last_s = float("inf"), float("-inf")
    for frame in _counted(parts, warmup):
        completed += len(frame)
        tokens_in += int(frame["prompt_tokens"].cast(pl.Int64).sum())
        tokens_out += int(frame["output_tokens"].cast(pl.Int64).sum())
        first_s = min(first_s, float(frame["arrival_s"].min()))  # type: ignore[arg-type]
        last_s = max(last_s, float(frame["last_token_s"].max()))  # type: ignore[arg-type]
    duration_s = last_s - first_s if completed else 0.0

    def rate(count: float) -> float:
        return count / duration_s if duration_s else float("nan")

    return {
        "completed": completed,
        "duration_s": duration_s,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": rate(completed),
        "output_throughput": rate(tokens_out),
        "total_token_throughput": rate(tokens_in + tokens_out),
        **_spreads(("ttft_ms", "tpot_ms", "e2el_ms", "queue_ms"), lambda: map(_times_ms, _counted(parts, warmup))),
    }


def step_metrics(parts: Sequence[Path]) -> dict[str, float]:
    """Mean length of a step in ms, and the share of all steps' time that each term takes; the shares add up to 1.

    `host_share` is what is left when the GPU's terms are taken away: host time that no GPU time hides.
    """
    columns = [f"{term}_us" for term in GPU_TERMS]
    steps, total_us = 0, 0.0
    terms_us = np.zeros(len(columns))
    for frame in _frames(parts, ["duration_us", *columns]):
        steps += len(frame)
        total_us += float(frame["duration_us"].sum())
        terms_us += [float(frame[name].cast(pl.Float64).sum()) for name in columns]
    shares = terms_us / total_us if total_us else np.full(len(columns), np.nan)
    return {
        "mean_step_ms": total_us / steps / 1e3 if steps else float("nan"),
        **{f"{term}_share": float(share) for term, share in zip(GPU_TERMS, shares, strict=True)},
        "host_share": float(np.maximum(1.0 - shares.sum(), 0.0)),
    }


def gap_metrics(step_parts: Sequence[Path], gap_parts: Sequence[Path], tokens_after_first: int) -> dict[str, float]:
    """Inter-token latency per output and per token.

    `tokens_after_first` is the number of tokens that followed a request's first; those that no gap accounts for came
    together with another one.
    """

    def gaps() -> Iterator[Sample]:
        for frame in _frames(step_parts, ["duration_us", "regular_gaps"]):
            yield frame["duration_us"].to_numpy() / 1e3, frame["regular_gaps"].to_numpy().astype(np.int64)
        for frame in _frames(gap_parts):
            yield frame["gaps_s"].to_numpy() * 1e3, np.ones(len(frame), np.int64)

    outputs = sum(int(weights.sum()) for _, weights in gaps())
    together = np.array([tokens_after_first - outputs], np.int64)

    def quantities() -> Iterator[dict[str, Sample]]:
        for gap in gaps():
            yield {"itl_ms": gap, "itl_per_token_ms": gap}
        yield {"itl_per_token_ms": (np.zeros(1), together)}

    return _spreads(("itl_ms", "itl_per_token_ms"), quantities)


def _frames(parts: Sequence[Path], columns: list[str] | None = None) -> Iterator[pl.DataFrame]:
    for part in parts:
        yield pl.read_parquet(part, columns=columns)


def _counted(parts: Sequence[Path], warmup: int) -> Iterator[pl.DataFrame]:
    """Finished requests without the warm-up."""
    for frame in _frames(parts):
        counted = frame.filter(pl.col("request_id") >= warmup)
        if len(counted):
            yield counted


def _times_ms(frame: pl.DataFrame) -> dict[str, Sample]:
    """Times of every request, in milliseconds; per output token only of requests that have more than one."""
    column = {name: frame[name].to_numpy() for name in frame.columns}
    output, several = column["output_tokens"], column["output_tokens"] > 1
    decoding_s = (column["last_token_s"] - column["first_token_s"])[several]
    times_s = {
        "ttft_ms": column["first_token_s"] - column["arrival_s"],
        "tpot_ms": decoding_s / (output[several] - 1),
        "e2el_ms": column["last_token_s"] - column["arrival_s"],
        "queue_ms": column["scheduled_s"] - column["arrival_s"],
    }
    return {name: (values * 1e3, np.ones(len(values), np.int64)) for name, values in times_s.items()}


def mean_queue_s(parts: Sequence[Path], first: int, end: int) -> float:
    """Mean time in the engine's queue of the requests numbered `first` to `end` - 1, in seconds; 0 for none."""
    total, count = 0.0, 0
    for frame in _counted(parts, first):
        chosen = frame.filter(pl.col("request_id") < end)
        total += float((chosen["scheduled_s"] - chosen["arrival_s"]).sum())
        count += len(chosen)
    return total / count if count else 0.0


def _spreads(names: Sequence[str], quantities: Callable[[], Iterator[dict[str, Sample]]]) -> dict[str, float]:
    """Mean, standard deviation, median and 99th percentile of every quantity; `quantities()` is walked twice."""
    found = {name: Distribution([50, 99]) for name in names}
    for part in quantities():
        for name, sample in part.items():
            found[name].count(*sample)
    for part in quantities():
        for name, sample in part.items():
            found[name].collect(*sample)
    result: dict[str, float] = {}
    for name, spread in found.items():
        median, high = spread.percentiles()
        result |= {f"mean_{name}": spread.mean, f"std_{name}": spread.std}
        result |= {f"median_{name}": median, f"p99_{name}": high}
    return result
