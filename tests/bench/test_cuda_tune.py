"""The GPU's side of tuning with a step and a timer that only write down what they were asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kernels_cupy.plans import VerifyPlan
from kernels_cupy.steps import Shape
from lab.bench import cuda_tune
from lab.bench.cuda_backend import problem_of
from lab.bench.cuda_tune import CudaTuner, median_step
from lab.bench.points import Point
from lab.methods.base import LayerHeads
from lab.trees import DraftTree


class FakeStep:
    """A step that knows how it is cut now, and how often it was let go of."""

    released = 0

    def __init__(self, shape: Shape, layers: int, plan: VerifyPlan) -> None:
        self.plan, self.layers = plan, layers
        self.phases: dict[str, Callable[[], str]] = {}  # plans are timed as a model runs them

    def chained_step(self) -> str:
        return self.plan.name

    def cut(self, plan: VerifyPlan) -> None:
        self.plan = plan

    def release(self) -> None:
        FakeStep.released += 1


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> CudaTuner:
    monkeypatch.setattr(cuda_tune, "Step", FakeStep)
    monkeypatch.setattr(cuda_tune.device, "trim_pool", lambda keep_bytes: None)
    monkeypatch.setattr(cuda_tune, "shared_bytes_per_cta", lambda: 60_000)
    monkeypatch.setattr(cuda_tune, "multiprocessors", lambda: 132)
    monkeypatch.setattr(cuda_tune, "has_warpgroups", lambda: False)
    FakeStep.released = 0
    monkeypatch.setattr(cuda_tune, "pass_layers", lambda shape: 4)
    return CudaTuner(SimpleNamespace())  # type: ignore[arg-type]


def point(batch: int) -> Point:
    return Point("treelog", LayerHeads(16, 32, 128, 128, "float32"), batch, DraftTree.chain(3), "chain:3")


def test_every_plan_is_timed_on_the_same_buffers(tuner: CudaTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def time_graph(launch: Callable[[], str], enough: Callable[..., bool]) -> list[float]:
        asked.append((launch(), enough))
        return [4.0 * len(launch())] * 40

    monkeypatch.setattr(cuda_tune.timer, "time_graph", time_graph)
    plans = tuner.candidates(problem_of(point(8)))
    times = tuner.measure(point(8), plans)
    assert times == {plan.name: float(len(plan.name)) for plan in plans}, "per layer"
    assert [name for name, _ in asked] == [plan.name for plan in plans]
    assert FakeStep.released == 1
    enough = asked[0][1]
    assert not enough([1.0] * 34, 0.02), "a whole cycle of 35 steps"
    assert not enough([1.0] * 35, 0.009)
    assert enough([1.0] * 35, 0.01)


def test_large_batches_need_five_samples(tuner: CudaTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    rules: list[Callable[..., bool]] = []
    monkeypatch.setattr(cuda_tune.timer, "time_graph", lambda launch, enough: rules.append(enough) or [1.0] * 9)
    tuner.measure(point(256), tuner.candidates(problem_of(point(256)))[:1])
    assert [rules[0]([1.0] * 4, 1.0), rules[0]([1.0] * 5, 0.01)] == [False, True]


def test_a_failed_measurement_lets_go_of_its_step(tuner: CudaTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_graph(launch: Callable[[], str], enough: Callable[..., bool]) -> list[float]:
        raise MemoryError

    monkeypatch.setattr(cuda_tune.timer, "time_graph", time_graph)
    with pytest.raises(MemoryError):
        tuner.measure(point(8), tuner.candidates(problem_of(point(8))))
    assert FakeStep.released == 1


def test_candidates_and_the_safe_plan_fit_the_gpu(tuner: CudaTuner) -> None:
    problem = problem_of(point(8))
    plans = tuner.candidates(problem)
    assert {plan.file for plan in plans} == {"verify.cu", "stream.cu", "lanes.cu"}
    assert max(plan.shared_bytes for plan in plans) <= 60_000
    assert tuner.safe(problem, 8) in plans


@pytest.mark.parametrize("has_them", [True, False])
def test_warpgroups_are_tuned_where_the_gpu_has_them(
    tuner: CudaTuner, monkeypatch: pytest.MonkeyPatch, has_them: bool
) -> None:
    monkeypatch.setattr(cuda_tune, "has_warpgroups", lambda: has_them)
    plans = tuner.candidates(replace(problem_of(point(8)), rows=16))
    assert any(plan.file == "wide.cu" for plan in plans) == has_them


def test_the_median_of_a_cycle_is_that_of_its_steps() -> None:
    assert median_step([1.0, 2.0, 9.0], 1) == 2.0
    cycle = [1.0, 1.0, 10.0]  # the last step flushes
    assert median_step([*cycle, *cycle, 1.0, 50.0, 10.0, 7.0], 3) == pytest.approx(4.0), "an outlier, half a cycle"
