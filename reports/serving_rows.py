"""Published serving results: which rows a simulation can be held against, and why others cannot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lab.data import model_names, read_csv
from lab.profiles.system import GPU_NAMES

Row = Mapping[str, Any]

#: Engines that the simulator has; `reports.serving_levels` sets each up from a row.
ENGINES = frozenset({"vLLM", "SGLang"})
WEIGHTS = {"BF16": "bf16", "FP8": "fp8_block128"}
#: Rates from here on only mean "all at once".
UNPACED = 1000.0
#: Rows that repeat another row's run agree in all of these.
_RUN = ("engine", "model", "quant", "gpu", "tp", "spec_k", "dataset", "isl", "osl", "max_concurrency", "out_tok_s")
_MEASURED = ("ttft_mean", "ttft_median", "tpot_mean", "tpot_median", "e2e_mean", "e2e_median")


@dataclass(frozen=True, slots=True)
class Sorted:
    """All rows: the usable ones, and how many others there are by reason."""

    total: int
    hybrids: int
    usable: tuple[Row, ...]
    reasons: tuple[tuple[str, int], ...]


@cache
def sorted_rows() -> Sorted:
    """The shipped table, sorted out."""
    rows = read_csv("published", "serving_results.csv.gz").to_dicts()
    usable: list[Row] = []
    reasons: Counter[str] = Counter()
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        reason = why_not(row)
        key = tuple(row[name] for name in (*_RUN, *_MEASURED))
        if reason is None and key in seen:
            reason = "the same run as another row"
        if reason is None:
            seen.add(key)
            usable.append(row)
        else:
            reasons[reason] += 1
    hybrids = sum(1 for row in rows if row["hybrid"] == 1)
    return Sorted(len(rows), hybrids, tuple(usable), tuple(reasons.most_common()))


def why_not(row: Row) -> str | None:
    """What a row lacks; None when it can be simulated. The first reason that holds counts."""
    if row["hybrid"] != 1:
        return "not a hybrid"
    if str(row["gpu"]).lower() not in GPU_NAMES:
        return "GPU without rates of its own here (B300, GB300, H20, or not stated)"
    if row["engine"] not in ENGINES:
        return "engine not labelled"
    if row["model"] not in model_names():
        return "model whose shape is not shipped"
    if row["quant"] is None:
        return "weight type not stated"
    if row["quant"] not in WEIGHTS:
        return "weights in a type without operator tables (NVFP4)"
    if row["spec_method"] is not None and "DFlash" in row["spec_method"]:
        return "drafter that is not the model's own layer"
    if lengths(row) is None:
        return "lengths of prompts or outputs not stated"
    if row["tp"] is None:
        return "tensor-parallel size not stated"
    if not any(row[name] for name in _MEASURED):
        return "no latency given"
    if _contradicts_itself(row):
        return "figures that contradict the stated load (Little's law, or no first token)"
    return None


def _contradicts_itself(row: Row) -> bool:
    """Whether a full closed loop had less than half its clients in flight, or half the requests no first token."""
    if row["ttft_median"] == 0:
        return True
    if rate(row) is not None or not (row["e2e_mean"] and row["req_s"] and row["max_concurrency"]):
        return False
    in_flight = row["req_s"] * row["e2e_mean"] / 1e3
    return bool(in_flight < 0.5 * min(row["max_concurrency"], row["num_prompts"]))


def lengths(row: Row) -> tuple[float, float] | None:
    """Mean prompt and output tokens; None when they are not known well enough."""
    count = row["num_prompts"]
    if row["total_in"] and row["total_out"] and count:
        return row["total_in"] / count, row["total_out"] / count
    if row["isl"] and row["osl"] and "range ratio 1" in str(row["dataset"]):
        return float(row["isl"]), float(row["osl"])
    return None


def rate(row: Row) -> float | None:
    """Requests per second of an open loop; None when a cap on concurrency sets the pace."""
    value = row["request_rate"]
    return None if value is None or not math.isfinite(value) or value >= UNPACED else float(value)


def load(row: Row) -> str:
    """The load in words."""
    paced = rate(row)
    return f"{paced:g} req/s" if paced is not None else f"{row['max_concurrency']} clients"


def measured(row: Row) -> dict[str, float]:
    """The row's figures under the names of summary.csv: throughput per second, latencies in milliseconds."""
    names = {"out_tok_s": "output_throughput"}
    for latency, ours in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        names |= {f"{latency}_{statistic}": f"{statistic}_{ours}_ms" for statistic in ("mean", "median")}
    found = {ours: float(row[theirs]) for theirs, ours in names.items() if row[theirs]}
    if "median_ttft_ms" in found:
        found.pop("mean_ttft_ms", None)  # a few first requests that met a cold engine lie in the mean
    return found
