"""The facts behind the answers: the best configuration at every point, and where methods become memory bound.

A point is one memory budget (gpu_memory_utilization) and one load. Configurations whose output throughput
differs by up to 2 % are tied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reports.data import Cell, Group
from reports.text import quotient

#: Relative difference in output throughput up to which two configurations are tied.
TIE = 0.02
BASELINE = "storeall"


@dataclass(frozen=True, slots=True)
class Best:
    """The best configurations at one point.

    `winners`: each method's best cell within `TIE` of the highest output throughput, best first. `baseline`:
    storeall's best cell over all trees, if one was run.
    """

    budget: float
    load: float
    winners: tuple[Cell, ...]
    baseline: Cell | None

    @property
    def top(self) -> Cell:
        return self.winners[0]

    @property
    def gain(self) -> float:
        """Output throughput of the best cell over storeall's best; NaN without storeall."""
        if self.baseline is None:
            return math.nan
        return quotient(self.top.output_throughput, self.baseline.output_throughput)

    @property
    def beats_baseline(self) -> bool:
        """Whether storeall was run and is not among the winners."""
        return self.baseline is not None and not self.has(BASELINE)

    def has(self, method: str) -> bool:
        """Whether a method is best or tied with the best."""
        return any(cell.state_method == method for cell in self.winners)


@dataclass(frozen=True, slots=True)
class Knee:
    """Per memory budget, the lowest load at which a method is memory bound; None where no load that was run is.

    `highest` is the highest load that was run, per budget.
    """

    state_method: str
    tree: str
    loads: dict[float, float | None]
    highest: dict[float, float]


def best_at(group: Group, budget: float, load: float) -> Best | None:
    """The best configurations at one point; None when no cell there finished a request.

    With a given arrival rate, methods that keep up have the same throughput: among ties the lower mean TPOT
    comes first.
    """
    cells = [cell for cell in group.at(budget, load) if cell.usable]
    if not cells:
        return None
    floor = max(cell.output_throughput for cell in cells) / (1 + TIE)

    def rank(cell: Cell) -> tuple[bool, float]:
        tied = cell.output_throughput >= floor
        by_latency = tied and group.load_field == "request_rate" and math.isfinite(cell.mean_tpot_ms)
        return not tied, cell.mean_tpot_ms if by_latency else -cell.output_throughput

    champions: dict[str, Cell] = {}
    for cell in sorted(cells, key=rank):
        champions.setdefault(cell.state_method, cell)
    winners = tuple(cell for cell in champions.values() if cell.output_throughput >= floor)
    return Best(budget, load, winners, champions.get(BASELINE))


def all_best(group: Group) -> list[Best]:
    """The best configurations at every point, by memory budget, then load."""
    points = [best_at(group, budget, load) for budget in group.budgets for load in group.loads]
    return [best for best in points if best is not None]


def knees(group: Group) -> list[Knee]:
    """Where each method and tree becomes memory bound, in the order of methods and trees."""
    found = []
    for method in group.methods:
        for tree in group.all_trees:
            bound: dict[float, float | None] = {}
            highest: dict[float, float] = {}
            for cell in sorted(group.cells, key=group.load):
                if (cell.state_method, cell.tree) != (method, tree):
                    continue
                budget, load = cell.gpu_memory_utilization, group.load(cell)
                highest[budget] = load
                if bound.setdefault(budget, None) is None and cell.memory_bound:
                    bound[budget] = load
            if bound:
                found.append(Knee(method, tree, bound, highest))
    return found


def shares(points: list[Best]) -> list[tuple[str, int]]:
    """Methods by the number of points at which they are best or tied with the best, most first."""
    names = [cell.state_method for best in points for cell in best.winners]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return sorted(counts.items(), key=lambda item: -item[1])
