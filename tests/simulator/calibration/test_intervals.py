"""Intervals, leave-one-out and missing metrics of a fit, on a service that is a straight line."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from lab.errors import UsageError
from simulator.calibration.constants import CONSTANTS, Values
from simulator.calibration.fit import fit, leave_one_out


@dataclass(frozen=True)
class Line:
    """A service whose every metric is proportional to the time per step."""

    name: str
    measured: dict[str, float]
    lacks: frozenset[str] = frozenset()
    lost_above: float = math.inf

    @staticmethod
    def metrics(step_ms: float) -> dict[str, float]:
        return {"output_throughput": 1e3 / step_ms, "mean_ttft_ms": 5 * step_ms, "mean_tpot_ms": step_ms}

    def predict(self, values: Values) -> dict[str, float]:
        found = self.metrics(values["host.ms_per_step"])
        lost = {"mean_tpot_ms"} if values["host.ms_per_step"] > self.lost_above else set()
        return {name: value for name, value in found.items() if name not in self.lacks | lost}


STEP = ("host.ms_per_step",)


def test_intervals_hold_the_truth_when_the_metrics_of_a_level_err_together() -> None:
    rng, held = np.random.default_rng(3), 0
    for _ in range(200):
        levels = [Line(str(i), Line.metrics(3.0 * math.exp(0.1 * rng.standard_normal()))) for i in range(5)]
        (found,) = fit(levels, STEP).constants
        held += found.low <= 3.0 <= found.high
    assert held >= 180


def test_an_interval_is_never_wider_than_that_of_the_belief() -> None:
    for count in (1, 2):
        (found,) = fit([Line(str(i), Line.metrics(1.0 + 40 * i)) for i in range(count)], STEP).constants
        assert math.log(found.high / found.low) <= 2 * 1.96 * CONSTANTS[found.name].spread
    assert math.log(found.high / found.low) > 1.0


def test_a_metric_that_the_simulation_lacks_says_nothing() -> None:
    partial = [Line(str(i), {**Line.metrics(3.0), "mean_tpot_ms": 9.0}, frozenset({"mean_tpot_ms"})) for i in range(2)]
    whole = [Line(str(i), {k: v for k, v in Line.metrics(3.0).items() if k != "mean_tpot_ms"}) for i in range(2)]
    assert fit(partial, STEP).constants == fit(whole, STEP).constants
    with pytest.raises(UsageError, match=r"load 0: the simulation has no mean_tpot_ms for some values"):
        fit([Line("0", Line.metrics(3.0), lost_above=2.5)], STEP)
    with pytest.raises(UsageError, match="none of the metrics"):
        fit([Line("0", {"mean_tpot_ms": 3.0}, frozenset({"mean_tpot_ms"}))], STEP)


def test_repetitions_of_a_load_are_left_out_together() -> None:
    levels = [Line("a", Line.metrics(1.0)), Line("a (2)", Line.metrics(1.0)), Line("b", Line.metrics(4.0))]
    found = leave_one_out(levels, STEP, {}, ["a", "a", "b"])
    assert list(found) == ["a", "a (2)", "b"]
    assert found["a"] == found["a (2)"]
    tpot = {name: errors[-1].predicted for name, errors in found.items()}
    assert tpot["a"] == pytest.approx(4.0, rel=0.05)
    assert tpot["b"] == pytest.approx(1.0, rel=0.05)
    assert leave_one_out(levels[:2], STEP, {}, ["a", "a"]) == {}
