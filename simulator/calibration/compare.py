"""Predicted beside measured: relative errors by metric, and what a fit weighs them with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simulator.calibration.results import LATENCIES

#: Metrics of a comparison, in the order of its table.
COMPARED = (
    "output_throughput",
    "request_throughput",
    *(f"{statistic}_{latency}_ms" for latency in LATENCIES for statistic in ("mean", "median", "p99")),
)
#: Relative difference that a fit takes for noise, by quantity. TTFT is the noisiest: it holds queues and warm-up.
NOISE = {"ttft": 0.15, "tpot": 0.05, "itl": 0.05, "e2el": 0.05, "output_throughput": 0.05}


@dataclass(frozen=True, slots=True)
class Error:
    """One metric of one level; `relative` is predicted over measured, less one."""

    metric: str
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1


def errors(measured: Mapping[str, float], predicted: Mapping[str, float]) -> list[Error]:
    """Errors of all compared metrics that both sides have."""
    return [
        Error(name, measured[name], predicted[name])
        for name in COMPARED
        if measured.get(name, 0) > 0 and predicted.get(name, 0) > 0
    ]


def fitted_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """The metrics a fit looks at, with their noise: output throughput and the mean of every latency, else its median.

    ITL stands in where TPOT is missing. The 99th percentile of TTFT counts too, with twice the noise: it belongs to
    long prompts, which tell time per token from time per prompt.
    """
    found = {"output_throughput": NOISE["output_throughput"]} if measured.get("output_throughput", 0) > 0 else {}
    chosen: dict[str, str] = {}
    for latency in LATENCIES:
        names = (f"mean_{latency}_ms", f"median_{latency}_ms")
        given = [name for name in names if measured.get(name, 0) > 0]
        if given:
            chosen[latency] = given[0]
    if "tpot" in chosen:
        chosen.pop("itl", None)
    if measured.get("p99_ttft_ms", 0) > 0:
        found["p99_ttft_ms"] = 2 * NOISE["ttft"]
    return found | {name: NOISE[latency] for latency, name in chosen.items()}
