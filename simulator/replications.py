"""Replications: every cell with several seeds, means with Student-t intervals, and methods paired by seed.

All methods meet the same seeds, hence the same arrivals, lengths and luck of acceptance (common random numbers): the
ratio of two methods under one seed varies far less than either figure, and its interval is what a comparison needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from lab.errors import UsageError
from simulator.scenario import Scenario

CONFIDENCE = 0.95
BASELINE = "storeall"
#: Metrics whose interval stands beside their mean, as `<name>_ci95` (half its width).
WITH_INTERVAL = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{stat}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for stat in ("mean", "median", "p99")),
    "peak_running",
    "peak_kv_usage",
)
#: Metrics that methods are compared by.
PAIRED = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
#: Columns in which two cells of one comparison may differ, besides the metrics.
_OWN = ("cell", "state_method", "num_rows", "running_limit", "seed")

Row = Mapping[str, Any]


def replicate(cells: Sequence[Scenario], seeds: int) -> list[Scenario]:
    """Every cell `seeds` times, one after the other, with its seed, the next one, and so on."""
    return [cell.model_copy(update={"seed": cell.seed + i}) for cell in cells for i in range(seeds)]


def summarise(rows: Sequence[Row], seeds: int, identity: Sequence[str]) -> list[dict[str, Any]]:
    """One row per cell from `seeds` consecutive rows each: means, and half-widths of 95 % intervals.

    Columns of `identity` are taken from the first seed; flags are true when any replication's is. Intervals are NaN
    when all replications are equal.
    """
    return [_mean_row(rows[i : i + seeds], identity) for i in range(0, len(rows), seeds)]


def _mean_row(group: Sequence[Row], identity: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, first in group[0].items():
        values = [row[name] for row in group]
        if name in identity or all(value == first for value in values):
            result[name] = first
        elif isinstance(first, bool):
            result[name] = any(values)
        elif isinstance(first, str):
            result[name] = _mean_of_lists(values)
        else:
            result[name] = float(np.mean(np.array(values, dtype=np.float64)))
    result["num_seeds"] = len(group)
    drawn = _differ(group, WITH_INTERVAL)
    for name in WITH_INTERVAL:
        if name in group[0]:
            metric = np.array([row[name] for row in group], dtype=np.float64)
            result[f"{name}_ci95"] = half_width(metric) if drawn else math.nan
    return result


def _differ(rows: Sequence[Row], names: Sequence[str]) -> bool:
    """Whether replications differ at all: a trace served without drafts in a closed loop draws nothing at random."""
    return any(row.get(name) != rows[0].get(name) for row in rows for name in names)


def _mean_of_lists(texts: Sequence[str]) -> str:
    """Lists written with semicolons, averaged place by place."""
    lists = [[float(item) for item in text.split(";")] for text in texts if text]
    if not lists or len({len(numbers) for numbers in lists}) > 1:
        return texts[0]
    return ";".join(f"{mean:.4f}" for mean in np.mean(lists, axis=0))


def half_width(values: NDArray[np.float64]) -> float:
    """Half the width of the Student-t interval of the mean; NaN for fewer than two values."""
    count = len(values)
    if count < 2:
        return math.nan
    reach = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1))
    return reach * float(values.std(ddof=1)) / math.sqrt(count)


def paired(rows: Sequence[Row], seeds: int, identity: Sequence[str]) -> list[dict[str, Any]]:
    """Every method's ratio to storeall of the same cell and seed: geometric mean and 95 % interval, by metric.

    `low` and `high` are None when all replications are equal. Raises `UsageError` when the two sides have other seeds.
    """
    cells = [rows[i : i + seeds] for i in range(0, len(rows), seeds)]
    shared = [name for name in identity if name not in _OWN]
    base = {_key(cell[0], shared): cell for cell in cells if cell[0]["state_method"] == BASELINE}
    result = []
    for cell in cells:
        other = base.get(_key(cell[0], shared))
        if other is None or cell[0]["state_method"] == BASELINE:
            continue
        for metric in PAIRED:
            if metric in cell[0] and (found := paired_ratio(cell, other, metric)):
                where = {name: cell[0][name] for name in (*shared, "state_method")}
                result.append({**where, "metric": metric, "num_seeds": seeds, **found})
    return result


def paired_ratio(cell: Sequence[Row], base: Sequence[Row], metric: str) -> dict[str, float | None] | None:
    """`ratio`, `low` and `high` of a metric over equal seeds, as `paired` gives them; None where one is not above 0."""
    if [row["seed"] for row in cell] != [row["seed"] for row in base]:
        raise UsageError("methods can be paired only when they ran with the same seeds; give `seed` one value")
    ours, theirs = (np.array([row[metric] for row in side], dtype=np.float64) for side in (cell, base))
    if not ((ours > 0) & (theirs > 0)).all():
        return None
    logs = np.log(ours / theirs)
    centre, reach = float(logs.mean()), half_width(logs)
    if not (_differ(cell, PAIRED) or _differ(base, PAIRED)):
        return {"ratio": math.exp(centre), "low": None, "high": None}
    return {"ratio": math.exp(centre), "low": math.exp(centre - reach), "high": math.exp(centre + reach)}


def _key(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)
