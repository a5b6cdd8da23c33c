"""The facts behind the answers: the best configuration at every point, and how far each method carries.

A point is one memory budget (gpu_memory_utilization) and one load. In a closed loop configurations are ranked by output
throughput. In an open loop all that keep up have the same throughput, and those that do not are not ranked: the others
are ranked by mean TPOT, those tied by p99 TTFT. What differs by up to `TIE` is tied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reports.accuracy import CLEAR, TIE
from reports.data import Cell, Group
from reports.text import quotient

BASELINE = "storeall"


@dataclass(frozen=True, slots=True)
class Best:
    """The best configurations at one point.

    `winners`: each method's best cell that is tied with the best, best first. `baseline`: storeall's best cell over all
    trees, if one was run; in an open loop (`by_latency`) a saturated one where none keeps up.
    """

    budget: float
    load: float
    winners: tuple[Cell, ...]
    baseline: Cell | None
    by_latency: bool

    @property
    def top(self) -> Cell:
        return self.winners[0]

    @property
    def gain(self) -> float:
        """Best over storeall's best: output throughput, or mean TPOT turned over; NaN without a figure of storeall."""
        if self.baseline is None or (self.by_latency and self.baseline.saturated):
            return math.nan
        if self.by_latency:
            return quotient(self.baseline.mean_tpot_ms, self.top.mean_tpot_ms)
        return quotient(self.top.output_throughput, self.baseline.output_throughput)

    @property
    def beats_baseline(self) -> bool:
        """Whether storeall was run and is not among the winners."""
        return self.baseline is not None and not self.has(BASELINE)

    @property
    def clear(self) -> bool:
        """Whether storeall is behind by more than the simulator's error, or does not keep up."""
        falls_behind = self.by_latency and self.baseline is not None and self.baseline.saturated
        return falls_behind or self.gain > 1 + CLEAR

    def has(self, method: str) -> bool:
        """Whether a method is best or tied with the best."""
        return any(cell.state_method == method for cell in self.winners)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one method and tree carries at one memory budget; `lowest` and `highest` are the loads that were run.

    Closed loop: `load` is the lowest at which requests wait, None where they never do. Open loop: `load` is the highest
    up to which the service keeps up, None where it does not at the lowest. `limit` is what then keeps requests waiting.
    """

    load: float | None
    limit: str
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Knee:
    """The marks of one method and tree by memory budget."""

    state_method: str
    tree: str
    marks: dict[float, Mark]


def best_at(group: Group, budget: float, load: float) -> Best | None:
    """The best configurations at one point; None when no cell there finished a request, or none keeps up."""
    cells = [cell for cell in group.at(budget, load) if cell.usable]
    ranked = [cell for cell in cells if not (group.open_loop and cell.saturated)]
    if not ranked:
        return None
    if group.open_loop:
        quick = _within(ranked, lambda cell: cell.mean_tpot_ms)
        tied = _within(quick, lambda cell: cell.p99_ttft_ms)
        ranked.sort(key=lambda cell: (cell not in tied, cell not in quick, _last_if_nan(cell.mean_tpot_ms)))
    else:
        tied = _within(ranked, lambda cell: 1 / cell.output_throughput)
        ranked.sort(key=lambda cell: -cell.output_throughput)
    champions: dict[str, Cell] = {}
    for cell in ranked:
        champions.setdefault(cell.state_method, cell)
    fallen = next((cell for cell in cells if cell.state_method == BASELINE), None)
    winners = tuple(cell for cell in champions.values() if cell in tied)
    return Best(budget, load, winners, champions.get(BASELINE, fallen), group.open_loop)


def all_best(group: Group) -> list[Best]:
    """The best configurations at every point, by memory budget from the largest down, then load."""
    points = [best_at(group, budget, load) for budget in group.budgets for load in group.loads]
    return [best for best in points if best is not None]


def knees(group: Group) -> list[Knee]:
    """How far each method and tree carries, in the order of methods and trees."""
    found = []
    for method in group.methods:
        for tree in group.all_trees:
            mine = [c for c in group.cells if (c.state_method, c.tree) == (method, tree)]
            budgets = [budget for budget in group.budgets if any(c.gpu_memory_utilization == budget for c in mine)]
            if budgets:
                marks = {
                    budget: _mark(group, [c for c in mine if c.gpu_memory_utilization == budget]) for budget in budgets
                }
                found.append(Knee(method, tree, marks))
    return found


def highest_rate(group: Group, budget: float, method: str | None = None) -> float | None:
    """The highest load up to which a method, or any, keeps up with some tree."""
    reached = [
        mark.load
        for knee in knees(group)
        if method in (None, knee.state_method)
        for mark in [knee.marks.get(budget)]
        if mark is not None and mark.load is not None
    ]
    return max(reached, default=None)


def headline(group: Group, points: Sequence[Best]) -> Best | None:
    """The point that the answer opens with: the largest memory budget, there the highest load that can be ranked."""
    budget = max((best.budget for best in points), default=None)
    return max((best for best in points if best.budget == budget), key=lambda best: best.load, default=None)


def largest_gain(points: Sequence[Best]) -> Best | None:
    """The point at which storeall, with a figure to compare with, is furthest behind."""
    gains = [best for best in points if best.beats_baseline and best.gain > 1 + TIE]
    return max(gains, key=lambda best: best.gain, default=None)


def _mark(group: Group, cells: list[Cell]) -> Mark:
    by_load = sorted(cells, key=group.load)
    lowest, highest = group.load(by_load[0]), group.load(by_load[-1])
    if not group.open_loop:
        bound = next((cell for cell in by_load if cell.limit != "none"), None)
        return Mark(group.load(bound), bound.limit, lowest, highest) if bound else Mark(None, "none", lowest, highest)
    reached: float | None = None
    for cell in by_load:
        if cell.saturated:
            return Mark(reached, cell.limit, lowest, highest)
        reached = group.load(cell)
    return Mark(reached, "none", lowest, highest)


def _within(cells: Sequence[Cell], cost: Callable[[Cell], float]) -> list[Cell]:
    """The cells whose cost is within a tie of the lowest; all of them when none has a figure."""
    costs = [cost(cell) for cell in cells]
    finite = [value for value in costs if math.isfinite(value)]
    if not finite:
        return list(cells)
    # The slack keeps an exact tie a tie whatever the rounding of 1 / x.
    ceiling = min(finite) * (1 + TIE) * (1 + 1e-12)
    return [cell for cell, value in zip(cells, costs, strict=True) if value <= ceiling]


def _last_if_nan(value: float) -> float:
    return value if math.isfinite(value) else math.inf
