"""Times every plan of one point on the current GPU: the same buffers, cut again and again.

A plan's time is that of the chained step, for a model runs layer after layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kernels_cupy import device, timer
from kernels_cupy.choice import candidates, modelled_plan
from kernels_cupy.compiler import has_warpgroups, multiprocessors, shared_bytes_per_cta
from kernels_cupy.passes import pass_layers
from kernels_cupy.plans import Problem, VerifyPlan
from kernels_cupy.steps import Step
from lab.bench.cuda_backend import POOL_BYTES, CudaBackend, cycle_of, shape_of
from lab.bench.points import Point
from lab.bench.timer import TimeLimit

#: Samples and seconds of each plan, at least.
MIN_SAMPLES, MIN_SECONDS = 5, 0.01


@dataclass(frozen=True, slots=True)
class CudaTuner:
    """The GPU's side of `lab.bench.tune.Tuner`."""

    backend: CudaBackend

    def candidates(self, problem: Problem) -> list[VerifyPlan]:
        return candidates(problem, shared_bytes_per_cta(), has_warpgroups())

    def safe(self, problem: Problem, batch: int) -> VerifyPlan:
        return modelled_plan(problem, batch, multiprocessors(), shared_bytes_per_cta())

    def compile(self, plans: Iterable[VerifyPlan]) -> None:
        self.backend.compile(plans)

    def refusal(self, point: Point) -> str | None:
        return self.backend.refusal(point)

    def measure(self, point: Point, plans: Sequence[VerifyPlan]) -> dict[str, float]:
        shape = shape_of(point)
        layers, cycle = pass_layers(shape), cycle_of(shape)
        enough = TimeLimit(MIN_SECONDS, max(MIN_SAMPLES, cycle))
        times: dict[str, float] = {}
        step = Step(shape, layers, plan=plans[0])
        try:
            for plan in plans:
                step.cut(plan)
                times[plan.name] = median_step(timer.time_graph(step.chained_step, enough), cycle) / layers
        finally:
            step.release()
            del step
            device.trim_pool(POOL_BYTES)
        return times


def median_step(samples_us: Sequence[float], cycle: int) -> float:
    """Microseconds of a step: the median of every step of a cycle over its turns, then their mean over the cycle."""
    whole = np.asarray(samples_us[: len(samples_us) // cycle * cycle]).reshape(-1, cycle)
    return float(np.mean(np.median(whole, axis=0)))
