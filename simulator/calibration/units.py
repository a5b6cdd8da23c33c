"""Milliseconds or seconds: figures are held against each other and what is possible, and refused with a remedy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lab.errors import UsageError

#: No engine answers or steps faster than this many milliseconds; figures below it are seconds.
LEAST_MS = {"ttft": 1.0, "tpot": 0.1, "itl": 0.1, "e2el": 1.0}
#: How far apart two statements of one quantity may be.
AGREEMENT = 0.1
#: How far apart the sum over the requests and the stated total may be.
TOTALS_AGREEMENT = 0.01
#: Bounds of a statistic over its mean. No sample has a median above twice its mean or a 99th percentile much above
#: a hundred times it; below, only a mixed unit goes so far.
OVER_MEAN = {"median": (1 / 300, 30.0), "p99": (1 / 30, 110.0)}

Floats = NDArray[np.float64]


def check_units(
    metrics: Mapping[str, float], num_requests: int, output_tokens: float, where: str, apart: float = 3.0
) -> None:
    """Raise `UsageError` when a figure cannot be in the unit of its name.

    A latency below what is possible looks like seconds; one longer than the whole run looks like microseconds, or the
    duration is in other units; output tokens over the duration must give the stated throughput. Mean TTFT and TPOT may
    miss the mean E2EL by a factor of `apart`.
    """
    duration_s = metrics["duration_s"]
    if duration_s <= 0:
        raise UsageError(f"{where}: duration is {duration_s:g}; it must be seconds from first send to last completion")
    for latency, least in LEAST_MS.items():
        value = metrics.get(f"mean_{latency}_ms", metrics.get(f"median_{latency}_ms"))
        if value is None:
            continue
        if value < least:
            raise UsageError(
                f"{where}: {latency} of {value:.4g} ms is shorter than any engine's and looks like seconds; fields "
                "that end in _ms hold milliseconds: multiply by 1000"
            )
        if value > 1.05e3 * duration_s:
            raise UsageError(
                f"{where}: {latency} of {value:.4g} ms is longer than the whole run of {duration_s:.4g} s; {latency} "
                "must be milliseconds and duration seconds: divide by 1000 what is too large"
            )
    stated = metrics.get("output_throughput")
    found = output_tokens / duration_s
    if stated and abs(found / stated - 1) > AGREEMENT:
        raise UsageError(
            f"{where}: {output_tokens:g} output tokens in {duration_s:.4g} s are {found:.4g} per second, but "
            f"output_throughput is {stated:.4g}; duration must be seconds and throughput tokens per second"
        )
    _check_statistics(metrics, where)
    _check_sum(metrics, output_tokens / num_requests, where, apart)


def check_detail(
    prompts: Floats, outputs: Floats, starts: Floats | None, stated: Mapping[str, float], where: str
) -> None:
    """Lists of a detailed result must tell of the requests that its totals do; raises `UsageError`.

    Clients list failed requests too, without output tokens, and count only those that finished. `stated`:
    `completed`, `total_input_tokens`, `total_output_tokens`, `duration`.
    """
    done, completed = (outputs > 0) & (prompts > 0), int(stated["completed"])
    if not int(done.sum()) <= completed <= len(outputs):
        raise UsageError(
            f"{where}: input_lens and output_lens tell of {len(outputs)} requests, {int(done.sum())} of them with "
            f"tokens, but completed is {completed}; give the lists of the same run, or leave them out"
        )
    for name, total, lengths in (
        ("input_lens", "total_input_tokens", prompts),
        ("output_lens", "total_output_tokens", outputs),
    ):
        found = float(lengths[done].sum())
        if abs(found - stated[total]) > TOTALS_AGREEMENT * stated[total]:
            raise UsageError(
                f"{where}: {name} of the finished requests add up to {found:.6g}, but {total} is {stated[total]:.6g}; "
                "give the lists of the same run, or leave them out"
            )
    span = 0.0 if starts is None else float(np.ptp(starts[done]))
    if span > (1 + AGREEMENT) * stated["duration"]:
        raise UsageError(
            f"{where}: start_times span {span:.4g}, longer than the duration of {stated['duration']:.4g} s; they look "
            "like milliseconds and must be seconds: divide by 1000"
        )


def _check_statistics(metrics: Mapping[str, float], where: str) -> None:
    """Median and 99th percentile must be in the unit of the mean."""
    for latency in LEAST_MS:
        mean = metrics.get(f"mean_{latency}_ms")
        for statistic, (least, most) in OVER_MEAN.items():
            name = f"{statistic}_{latency}_ms"
            if mean and name in metrics and not least <= metrics[name] / mean <= most:
                raise UsageError(
                    f"{where}: {name} is {metrics[name]:.4g}, but mean_{latency}_ms is {mean:.4g}; one of them is in "
                    "another unit: both must be milliseconds"
                )


def _check_sum(metrics: Mapping[str, float], output_tokens: float, where: str, apart: float) -> None:
    """A mean request takes its first token and then one TPOT per further token; a large factor tells a mixed unit."""
    names = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
    if not all(name in metrics for name in names):
        return
    ttft, tpot, e2el = (metrics[name] for name in names)
    expected = ttft + tpot * max(output_tokens - 1, 0)
    if not 1 / apart <= expected / e2el <= apart:
        raise UsageError(
            f"{where}: ttft {ttft:.4g} ms and {output_tokens:.4g} tokens at tpot {tpot:.4g} ms make {expected:.4g} ms, "
            f"but e2el is {e2el:.4g} ms; one of them is in another unit: all must be milliseconds"
        )
