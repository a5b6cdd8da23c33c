"""Published serving results beside predictions: constants from half of the loads of a group, the others predicted.

A group is one engine, model and GPU. Its loads, from the lightest, go in turn to the fit and to the prediction,
whatever the weights and drafts. What a group's own levels do not tell is believed to be like the median of its
engine's groups, which are fitted once before with the defaults as belief; only levels of the fitting half enter either
fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from reports.serving_levels import level_of_row
from reports.serving_rows import Row, load, rate, sorted_rows
from simulator.calibration.compare import fitted_metrics
from simulator.calibration.constants import CONSTANTS, DEFAULT_NAMES, Values
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
    by_rates: bool

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

    def text(self, name: str) -> str:
        """A constant's value as text; a dash when the group has none."""
        found = [constant.value for constant in self.constants if constant.name == name]
        return f"{found[0]:.3g}" if found else "–"


def groups() -> dict[Group, list[Row]]:
    """Usable rows by engine, model and GPU, from the lightest load."""
    found: dict[Group, list[Row]] = defaultdict(list)
    for row in sorted_rows().usable:
        found[row["engine"], row["model"], row["gpu"]].append(row)
    for rows in found.values():
        rows.sort(key=lambda row: (_load_order(row), row["quant"], row["spec_k"] or 0, row["id"]))
    return dict(sorted(found.items()))


def _load_order(row: Row) -> tuple[Any, ...]:
    """Loads from the lightest: rates, then clients; one load is one pace of one data set."""
    paced = rate(row)
    pace = (0, paced) if paced is not None else (1, row["max_concurrency"])
    return (*pace, str(row["dataset"]), row["isl"] or 0)


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows at the first, third, … load, for the fit, and the others; a single load is left to the prediction."""
    loads = sorted({_load_order(row) for row in rows})
    fitting = set(loads[::2]) if len(loads) > 1 else set()
    return [row for row in rows if _load_order(row) in fitting], [
        row for row in rows if _load_order(row) not in fitting
    ]


def fit_group(rows: Sequence[Row], belief: Values | None = None) -> tuple[Fitted, ...]:
    """The constants of a group from its fitting half; none when that is empty."""
    levels = [level_of_row(row) for row in halves(rows)[0]]
    return fit(levels, constant_names(rows), belief, belief, passes=1).constants if levels else ()


def constant_names(rows: Sequence[Row]) -> tuple[str, ...]:
    """Host and GPU times; the acceptance where drafts are made and no row tells it."""
    names = list(DEFAULT_NAMES)
    if any(row["spec_k"] and not row["accept_len"] for row in rows):
        names.append("acceptance")
    return tuple(names)


def engine_beliefs(constants: Mapping[Group, Sequence[Fitted]]) -> dict[str, dict[str, float]]:
    """Per engine the median of each constant over its groups."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (engine, _, _), fitted in constants.items():
        for constant in fitted:
            found[engine][constant.name].append(constant.value)
    return {
        engine: {name: float(np.median(values)) for name, values in by_name.items()}
        for engine, by_name in found.items()
    }


def predict_group(group: Group, rows: Sequence[Row], belief: Values) -> GroupResult:
    """Fit on one half of the loads, predict the other."""
    fitting, others = halves(rows)
    constants = fit_group(rows, belief)
    values = {**belief, **{constant.name: constant.value for constant in constants}}
    points: list[Point] = []
    for row in others:
        level = level_of_row(row)
        points += _points(group, row, level, level.predict(values))
    fitted_rows, predicted_rows = (tuple(row["id"] for row in half) for half in (fitting, others))
    return GroupResult(group, fitted_rows, predicted_rows, constants, tuple(points))


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


def predict_all(jobs: int = 2, only: Sequence[Group] | None = None) -> list[GroupResult]:
    """All groups, or some, in parallel processes: one round of fits for the engines' beliefs, one for the groups."""
    tasks = {group: rows for group, rows in groups().items() if only is None or group in only}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        first = dict(zip(tasks, pool.map(fit_group, tasks.values()), strict=True))
        beliefs = engine_beliefs(first)
        belief = [beliefs.get(group[0], {}) for group in tasks]
        return list(pool.map(predict_group, tasks, tasks.values(), belief))


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


def page(jobs: int = 2) -> dict[str, Any]:
    """All that the page's section on serving results shows."""
    results = predict_all(jobs)
    points = [point for result in results for point in result.points]
    tables: dict[str, dict[str, Summary]] = {}
    for position in range(3):
        for name, found in by(points, position).items():
            tables[name] = {summary.metric: summary for summary in found}
    for name, rated in (("operator tables", False), ("data-sheet rates", True)):
        found = summarise([point for point in points if point.by_rates == rated])
        tables[name] = {summary.metric: summary for summary in found}
    signed = []
    for metric in TARGETS:
        errors = np.array([point.relative for point in points if point.metric == metric])
        if len(errors):
            signed.append((metric, np.percentile(errors, (10, 25, 50, 75, 90)).tolist(), float((errors > 0).mean())))
    return {
        "rows": sorted_rows(),
        "results": results,
        "predicted": sum(len(result.predicted_rows) for result in results),
        "thin": sum(1 for result in results if len(result.fitted_rows) == 1),
        "fitted": sum(len(result.fitted_rows) for result in results),
        "by_rates": sum(1 for point in points if point.by_rates),
        "overall": summarise(points),
        "targets": TARGETS,
        "titles": TITLES,
        "by": tables,
        "signed": signed,
        "worst": worst(points),
        "constants": [name for name in CONSTANTS if any(result.text(name) != "–" for result in results)],
    }
