"""Latency and throughput by vLLM's definitions, from the records of one run.

TTFT, TPOT, ITL and E2EL are those of `vllm bench serve`; percentiles are exact (linear interpolation between order
statistics). ITL counts gaps between a request's successive outputs; per token, the further tokens of an output have gap
zero. Times are milliseconds, throughput is per second of the time from the first send to the last completion. Records
are read part by part, so that memory does not grow with the length of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Chunks = Callable[[], Iterator[tuple[Floats, NDArray[np.int64]]]]

#: Bits of a double that sort it into a bin: sign, exponent and eight bits of mantissa.
_BIN_SHIFT = 44
_BINS = 1 << (63 - _BIN_SHIFT)


def percentiles(chunks: Chunks, percents: Sequence[float]) -> list[float]:
    """Exact percentiles of non-negative values with integer weights: `numpy.percentile` of the repeated list.

    `chunks()` yields (values, weights) and is called twice: to count values per bin, then to sort the few bins that
    hold the order statistics asked for.
    """
    counts = np.zeros(_BINS, np.int64)
    for values, weights in chunks():
        np.add.at(counts, _bins(values), weights)
    ends = np.cumsum(counts)
    total = int(ends[-1])
    if total == 0:
        return [float("nan")] * len(percents)
    positions = [(total - 1) * percent / 100 for percent in percents]
    ranks = sorted({rank for place in positions for rank in (int(place), min(int(place) + 1, total - 1))})
    wanted = np.unique(np.searchsorted(ends, ranks, side="right"))
    found: list[tuple[Floats, NDArray[np.int64]]] = []
    for values, weights in chunks():
        chosen = np.isin(_bins(values), wanted)
        found.append((values[chosen], weights[chosen]))
    values = np.concatenate([part for part, _ in found])
    weights = np.concatenate([part for _, part in found])
    order = np.argsort(values, kind="stable")
    first_rank = {int(bin_): int(ends[bin_] - counts[bin_]) for bin_ in wanted}
    statistic: dict[int, float] = {}
    for bin_ in wanted:
        inside = order[_bins(values[order]) == bin_]
        inner_ends = first_rank[int(bin_)] + np.cumsum(weights[inside])
        for rank in ranks:
            if first_rank[int(bin_)] <= rank < inner_ends[-1]:
                statistic[rank] = float(values[inside][np.searchsorted(inner_ends, rank, side="right")])
    return [_between(statistic, place, total) for place in positions]


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
        **_spread("ttft_ms", _requests(parts, warmup, lambda c: c["first_token_s"] - c["arrival_s"])),
        **_spread("tpot_ms", _requests(parts, warmup, _tpot_s)),
        **_spread("e2el_ms", _requests(parts, warmup, lambda c: c["last_token_s"] - c["arrival_s"])),
        **_spread("queue_ms", _requests(parts, warmup, _queue_s)),
    }


def gap_metrics(step_parts: Sequence[Path], gap_parts: Sequence[Path], tokens_after_first: int) -> dict[str, float]:
    """Inter-token latency per output and per token.

    `tokens_after_first` is the number of tokens that followed a request's first; those that no gap accounts for came
    together with another one.
    """

    def gaps() -> Iterator[tuple[Floats, NDArray[np.int64]]]:
        for frame in _frames(step_parts, ["duration_us", "regular_gaps"]):
            yield frame["duration_us"].to_numpy() / 1e3, frame["regular_gaps"].to_numpy().astype(np.int64)
        for frame in _frames(gap_parts):
            yield frame["gaps_s"].to_numpy() * 1e3, np.ones(len(frame), np.int64)

    outputs = sum(int(weights.sum()) for _, weights in gaps())
    together = np.array([tokens_after_first - outputs], np.int64)

    def gaps_per_token() -> Iterator[tuple[Floats, NDArray[np.int64]]]:
        yield from gaps()
        yield np.zeros(1), together

    return {**_spread("itl_ms", gaps), **_spread("itl_per_token_ms", gaps_per_token)}


def _frames(parts: Sequence[Path], columns: list[str] | None = None) -> Iterator[pl.DataFrame]:
    for part in parts:
        yield pl.read_parquet(part, columns=columns)


def _counted(parts: Sequence[Path], warmup: int) -> Iterator[pl.DataFrame]:
    """Finished requests without the warm-up."""
    for frame in _frames(parts):
        counted = frame.filter(pl.col("request_id") >= warmup)
        if len(counted):
            yield counted


def _requests(parts: Sequence[Path], warmup: int, seconds: Callable[[dict[str, Any]], Floats]) -> Chunks:
    """Chunks of a time of every request, in milliseconds."""

    def chunks() -> Iterator[tuple[Floats, NDArray[np.int64]]]:
        for frame in _counted(parts, warmup):
            values = seconds({name: frame[name].to_numpy() for name in frame.columns}) * 1e3
            yield values, np.ones(len(values), np.int64)

    return chunks


def mean_queue_s(parts: Sequence[Path], first: int, end: int) -> float:
    """Mean time in the engine's queue of the requests numbered `first` to `end` - 1, in seconds; 0 for none."""
    total, count = 0.0, 0
    for frame in _counted(parts, first):
        chosen = frame.filter(pl.col("request_id") < end)
        total += float((chosen["scheduled_s"] - chosen["arrival_s"]).sum())
        count += len(chosen)
    return total / count if count else 0.0


def _queue_s(column: dict[str, Any]) -> Floats:
    waiting: Floats = column["scheduled_s"] - column["arrival_s"]
    return waiting


def _tpot_s(column: dict[str, Any]) -> Floats:
    """Seconds per output token after the first, of requests that have more than one."""
    several = column["output_tokens"] > 1
    decoding_s = (column["last_token_s"] - column["first_token_s"])[several]
    tpot_s: Floats = decoding_s / (column["output_tokens"][several] - 1)
    return tpot_s


def _spread(name: str, chunks: Chunks) -> dict[str, float]:
    """Mean, standard deviation, median and 99th percentile."""
    count, total, squares = 0, 0.0, 0.0
    for values, weights in chunks():
        count += int(weights.sum())
        total += float(values @ weights)
    mean = total / count if count else float("nan")
    for values, weights in chunks():
        squares += float((values - mean) ** 2 @ weights)
    median, high = percentiles(chunks, [50, 99])
    spread = float(np.sqrt(squares / count)) if count else float("nan")
    return {f"mean_{name}": mean, f"std_{name}": spread, f"median_{name}": median, f"p99_{name}": high}


def _bins(values: Floats) -> NDArray[np.int64]:
    """Bin of every value; bins are in the order of the values, whose bits sort as integers do."""
    bits = (np.ascontiguousarray(values) + 0.0).view(np.int64)
    bins: NDArray[np.int64] = bits >> _BIN_SHIFT
    return bins


def _between(statistic: dict[int, float], place: float, total: int) -> float:
    low = statistic[int(place)]
    high = statistic[min(int(place) + 1, total - 1)]
    return low + (high - low) * (place - int(place))
