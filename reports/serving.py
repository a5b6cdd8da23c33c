"""Published serving results beside predictions: constants from half of the load levels of a group, the others predicted.

A group is one engine, model and GPU. Its levels, ordered by weights, drafts and load, go in turn to the fit and to the
prediction; a group of one level is predicted with the default constants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from reports.serving_levels import level_of_row
from reports.serving_rows import Row, load, sorted_rows
from simulator.calibration.compare import fitted_metrics
from simulator.calibration.constants import DEFAULT_NAMES, defaults
from simulator.calibration.fit import Fitted, fit
from simulator.calibration.levels import Level

#: Median absolute errors that the predictions should stay within.
TARGETS = {"output_throughput": 0.08, "tpot": 0.10, "e2el": 0.10, "ttft": 0.25}
TITLES = {"output_throughput": "output throughput", "tpot": "TPOT", "e2el": "E2EL", "ttft": "TTFT"}

Group = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Point:
    """One metric of one predicted row."""

    row: str
    group: Group
    load: str
    setting: str
    metric: str
    measured: float
    predicted: float
    modelled_gpu: bool

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Fitted constants of a group (none for a group of one level) and the errors of its predicted rows."""

    group: Group
    fitted_rows: tuple[str, ...]
    predicted_rows: tuple[str, ...]
    constants: tuple[Fitted, ...]
    points: tuple[Point, ...]


def groups() -> dict[Group, list[Row]]:
    """Usable rows by engine, model and GPU, in the order of weights, drafts and load."""
    found: dict[Group, list[Row]] = defaultdict(list)
    for row in sorted_rows().usable:
        found[row["engine"], row["model"], row["gpu"]].append(row)
    for rows in found.values():
        rows.sort(key=_order)
    return dict(sorted(found.items()))


def _order(row: Row) -> tuple[Any, ...]:
    pace = row["request_rate"] if row["max_concurrency"] is None else row["max_concurrency"]
    return (row["quant"], row["tp"], row["spec_k"] or 0, str(row["dataset"]), pace, row["id"])


def predict_group(group: Group, rows: Sequence[Row]) -> GroupResult:
    """Fit on the first, third, … level, predict the others."""
    levels = [level_of_row(row) for row in rows]
    chosen = [i for i in range(len(rows)) if i % 2 == 0] if len(rows) > 1 else []
    unknown = any(level.cell.tree.num_drafts and not level.acceptance_known for level in levels)
    names = (*DEFAULT_NAMES, "acceptance") if unknown else DEFAULT_NAMES
    constants: tuple[Fitted, ...] = ()
    values = defaults(names)
    if chosen:
        solved = fit([levels[i] for i in chosen], names)
        constants, values = solved.constants, solved.values
    points: list[Point] = []
    for i, (row, level) in enumerate(zip(rows, levels, strict=True)):
        if i not in chosen:
            points += _points(group, row, level, level.predict(values))
    others = tuple(row["id"] for i, row in enumerate(rows) if i not in chosen)
    return GroupResult(group, tuple(rows[i]["id"] for i in chosen), others, constants, tuple(points))


def _points(group: Group, row: Row, level: Level, predicted: dict[str, float]) -> Iterator[Point]:
    setting = f"{row['quant']}, TP{row['tp']:g}" + (f", {row['spec_k']:g} drafts" if row["spec_k"] else "")
    for name in fitted_metrics(level.measured):
        metric = name if name in TARGETS else name.split("_")[1]
        yield Point(
            row["id"],
            group,
            load(row),
            setting,
            metric,
            level.measured[name],
            predicted[name],
            level.price.__name__ != "step_cost",
        )


def predict_all(jobs: int = 2) -> list[GroupResult]:
    """All groups, in parallel processes."""
    tasks = list(groups().items())
    if jobs == 1:
        return [predict_group(group, rows) for group, rows in tasks]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(predict_group, *zip(*tasks, strict=True)))


@dataclass(frozen=True, slots=True)
class Summary:
    """Absolute errors of one metric over a set of predicted rows."""

    metric: str
    count: int
    median: float
    p90: float
    within_target: float

    @property
    def met(self) -> bool:
        return self.median <= TARGETS[self.metric]


def summarise(points: Sequence[Point]) -> list[Summary]:
    """One summary per metric that the points hold, in the order of the targets."""
    result = []
    for metric, target in TARGETS.items():
        found = np.array([abs(point.relative) for point in points if point.metric == metric])
        if len(found):
            median, high = np.percentile(found, (50, 90))
            share = float((found <= target).mean())
            result.append(Summary(metric, len(found), float(median), float(high), share))
    return result


def by(points: Sequence[Point], position: int) -> dict[str, list[Summary]]:
    """Summaries by engine (0), model (1) or GPU (2)."""
    names = sorted({point.group[position] for point in points})
    return {name: summarise([point for point in points if point.group[position] == name]) for name in names}


def worst(points: Sequence[Point], count: int = 10) -> list[Point]:
    """The points farthest off, on a logarithmic scale."""
    return sorted(points, key=lambda point: -abs(np.log(point.predicted / point.measured)))[:count]
