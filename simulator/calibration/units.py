"""Milliseconds or seconds: figures are held against each other and what is possible, and refused with a remedy."""

from __future__ import annotations

from collections.abc import Mapping

from lab.errors import UsageError

#: No engine answers or steps faster than this many milliseconds; figures below it are seconds.
LEAST_MS = {"ttft": 1.0, "tpot": 0.1, "itl": 0.1, "e2el": 1.0}
#: How far apart two statements of one quantity may be.
AGREEMENT = 0.1


def check_units(metrics: Mapping[str, float], num_requests: int, output_tokens: float, where: str) -> None:
    """Raise `UsageError` when a figure cannot be in the unit of its name.

    A latency below what is possible looks like seconds; one longer than the whole run looks like microseconds, or the
    duration is in other units; output tokens over the duration must give the stated throughput.
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
    _check_sum(metrics, output_tokens / num_requests, where)


def _check_sum(metrics: Mapping[str, float], output_tokens: float, where: str) -> None:
    """A mean request takes its first token and then one TPOT per further token; factors of ten tell a mixed unit."""
    names = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
    if not all(name in metrics for name in names):
        return
    ttft, tpot, e2el = (metrics[name] for name in names)
    expected = ttft + tpot * max(output_tokens - 1, 0)
    if not 0.1 < expected / e2el < 10:
        raise UsageError(
            f"{where}: ttft {ttft:.4g} ms and {output_tokens:.4g} tokens at tpot {tpot:.4g} ms make {expected:.4g} ms, "
            f"but e2el is {e2el:.4g} ms; one of them is in another unit: all must be milliseconds"
        )
