"""Fitting the named constants to load levels: least squares on log ratios, intervals, and leave-one-out.

Every metric of every level gives one residual, log(predicted / measured) over its noise; every constant gives one more,
its distance from the default over the spread of belief, so that what the levels do not tell stays near the default.
The fit runs in passes: the scatter that one leaves is the noise of the next, so that clean results are followed
closely and rough ones loosely.

Intervals (95 %) take a level for one observation, because the metrics of one run err together: the solution moves when
a level is left out (to first order, from the Jacobian), and a jackknife over levels makes of it a variance, to which
the belief adds its own; Student's t has as many degrees of freedom as there are levels, less one. An interval is never
wider than that of the belief, which is what a single level leaves. It holds the scatter of the results, not what the
model gets wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import norm
from scipy.stats import t as student_t

from lab.errors import UsageError
from simulator.calibration.compare import Error, errors, fitted_metrics
from simulator.calibration.constants import CONSTANTS, DEFAULT_NAMES, Values, defaults

Floats = NDArray[np.float64]

#: Step of the finite differences, on the fit's scale: larger than the jitter of a discrete simulation.
_STEP = 0.2
#: Passes of a fit: the scatter that one leaves is the noise of the next.
PASSES = 3
_TOLERANCE = 1e-3
_EVALUATIONS = 25
CONFIDENCE = 0.95
#: Bounds of the scatter of residuals, in units of `compare.NOISE`.
LEAST_SCATTER, MOST_SCATTER = 0.03, 10.0


class LoadLevel(Protocol):
    """What a fit needs of a level: its name, what was measured, and what is predicted with given constants."""

    @property
    def name(self) -> str: ...

    @property
    def measured(self) -> Mapping[str, float]: ...

    def predict(self, values: Values) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Fitted:
    """A constant's value with its 95 % interval."""

    name: str
    value: float
    low: float
    high: float
    default: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants and how far the levels are off before and after."""

    constants: tuple[Fitted, ...]
    before: dict[str, list[Error]]
    after: dict[str, list[Error]]

    @property
    def values(self) -> dict[str, float]:
        return {constant.name: constant.value for constant in self.constants}


def fit(
    levels: Sequence[LoadLevel],
    names: Sequence[str] = DEFAULT_NAMES,
    start: Values | None = None,
    belief: Values | None = None,
    passes: int = PASSES,
) -> Fit:
    """Fit the named constants to all levels, starting from `start`; `belief` takes the place of the defaults as home.

    Raises `UsageError` when no level has a metric to fit. A metric that the simulation lacks (TPOT of single tokens) is
    left out.
    """
    if not any(fitted_metrics(level.measured) for level in levels):
        raise UsageError("the engine results hold no throughput, TTFT, TPOT, ITL or E2EL to fit to")
    problem = _Problem(levels, tuple(names), {**defaults(names), **(belief or {})})
    x = problem.to_fit({**defaults(names), **{k: v for k, v in (start or {}).items() if k in names}})
    problem.leave_out_missing(x)
    for _ in range(passes):
        x = problem.solve(x)
        problem.scatter = min(max(problem.scatter_at(x), LEAST_SCATTER), MOST_SCATTER)
    constants = problem.with_intervals(x)
    default = defaults(names)
    return Fit(
        constants,
        {level.name: errors(level.measured, level.predict(default)) for level in levels},
        {level.name: errors(level.measured, problem.predict(level, x)) for level in levels},
    )


def leave_one_out(
    levels: Sequence[LoadLevel], names: Sequence[str], start: Values, loads: Sequence[str]
) -> dict[str, list[Error]]:
    """Errors of every level predicted with constants that were fitted to the levels of other loads.

    `loads` names the load of each level: repetitions of one load are left out together. Empty for a single load.
    """
    result: dict[str, list[Error]] = {}
    if len(set(loads)) < 2:
        return result
    for load in dict.fromkeys(loads):
        values = fit([level for level, its in zip(levels, loads, strict=True) if its != load], names, start).values
        for level, its in zip(levels, loads, strict=True):
            if its == load:
                result[level.name] = errors(level.measured, level.predict(values))
    return result


class _Problem:
    """Residuals of a set of levels as a function of the constants on the fit's scale."""

    def __init__(self, levels: Sequence[LoadLevel], names: tuple[str, ...], belief: Values) -> None:
        self.levels = levels
        self.constants = [CONSTANTS[name] for name in names]
        self.scatter = 1.0
        self._weights = [fitted_metrics(level.measured) for level in levels]
        self._known: dict[tuple[float, ...], list[dict[str, float]]] = {}
        self._home = np.array([constant.to_fit(belief[constant.name]) for constant in self.constants])
        self._spread = np.array([constant.spread for constant in self.constants])

    def leave_out_missing(self, x: Floats) -> None:
        """Do without the metrics that the simulation does not have at `x`."""
        self._weights = [
            {name: noise for name, noise in weights.items() if predicted.get(name, 0) > 0}
            for weights, predicted in zip(self._weights, self._predictions(x), strict=True)
        ]
        if not any(self._weights):
            raise UsageError("the simulation has none of the metrics that the engine results hold; check the scenario")

    def to_fit(self, values: Values) -> Floats:
        return np.array([constant.to_fit(values[constant.name]) for constant in self.constants])

    def values(self, x: Floats) -> dict[str, float]:
        return {constant.name: constant.from_fit(float(at)) for constant, at in zip(self.constants, x, strict=True)}

    def predict(self, level: LoadLevel, x: Floats) -> dict[str, float]:
        return self._predictions(x)[self.levels.index(level)]

    def solve(self, x: Floats) -> Floats:
        found = least_squares(
            self.residuals,
            x,
            jac=self.jacobian,
            method="lm",
            xtol=_TOLERANCE,
            ftol=_TOLERANCE,
            max_nfev=_EVALUATIONS,
        )
        return np.asarray(found.x, dtype=np.float64)

    def scatter_at(self, x: Floats) -> float:
        """Root mean square of the levels' residuals, in units of the assumed noise."""
        data = self._data(x)
        return math.sqrt(float((data**2).sum()) / max(len(data) - len(x), 1))

    def residuals(self, x: Floats) -> Floats:
        return np.concatenate((self._data(x) / self.scatter, (x - self._home) / self._spread))

    def jacobian(self, x: Floats) -> Floats:
        columns = []
        for i in range(len(x)):
            step = np.zeros(len(x))
            step[i] = _STEP
            columns.append((self.residuals(x + step) - self.residuals(x - step)) / (2 * _STEP))
        return np.stack(columns, axis=1)

    def with_intervals(self, x: Floats) -> tuple[Fitted, ...]:
        """The constants at the solution."""
        reach = self._reach(x)
        return tuple(
            Fitted(
                constant.name,
                constant.from_fit(float(at)),
                constant.from_fit(float(at - by)),
                constant.from_fit(float(at + by)),
                constant.default,
            )
            for constant, at, by in zip(self.constants, x, reach, strict=True)
        )

    def _reach(self, x: Floats) -> Floats:
        """Half the width of every interval, on the fit's scale."""
        most = norm.ppf((1 + CONFIDENCE) / 2) * self._spread
        ends = np.cumsum([len(weights) for weights in self._weights if weights])
        if len(ends) < 2:
            return np.asarray(most, dtype=np.float64)
        residuals, jacobian = self.residuals(x), self.jacobian(x)
        information = jacobian.T @ jacobian
        belief = np.linalg.inv(information) / self._spread
        variance = (belief**2).sum(axis=1)
        for start, end in itertools.pairwise((0, *ends)):
            own = jacobian[start:end]
            moved = np.linalg.solve(information - own.T @ own, own.T @ residuals[start:end])
            variance += (len(ends) - 1) / len(ends) * moved**2
        reach = student_t.ppf((1 + CONFIDENCE) / 2, len(ends) - 1) * np.sqrt(variance)
        return np.asarray(np.minimum(reach, most), dtype=np.float64)

    def _data(self, x: Floats) -> Floats:
        found = []
        for level, weights, predicted in zip(self.levels, self._weights, self._predictions(x), strict=True):
            for name, noise in weights.items():
                if not predicted.get(name, 0) > 0:
                    raise UsageError(
                        f"load {level.name}: the simulation has no {name} for some values of the constants; fit fewer "
                        "of them (--constants)"
                    )
                found.append(math.log(predicted[name] / level.measured[name]) / noise)
        return np.array(found)

    def _predictions(self, x: Floats) -> list[dict[str, float]]:
        key = tuple(float(at) for at in x)
        if key not in self._known:
            values = self.values(x)
            self._known[key] = [level.predict(values) for level in self.levels]
        return self._known[key]
