"""The CUDA backend: the one place where the bench meets `kernels_cupy`.

Importing it needs no GPU; making a `CudaBackend` does, and raises `MissingError` without one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_cupy import device, timer
from kernels_cupy.arrays import host_floats
from kernels_cupy.choice import plan_here
from kernels_cupy.compiler import compile_variants, load_cupy
from kernels_cupy.launch import chains_here
from kernels_cupy.passes import allocated_bytes, pass_layers
from kernels_cupy.plans import Problem, VerifyPlan
from kernels_cupy.problems import LOG_METHODS
from kernels_cupy.sessions import SESSIONS, CudaSession
from kernels_cupy.steps import CUDA_METHODS, Shape, Step
from lab.bench.backend import Effort, PhaseTiming
from lab.bench.points import Point
from lab.bench.reference import GateErrors, Reference, gate_session
from lab.bench.timer import AnyOf, MedianSpread, TimeLimit, Timing
from lab.bf16 import to_bits
from lab.methods import SERIAL_METHODS
from lab.methods.protocol import Operands, SessionSpec
from lab.profiles.rows import PHASES, TIMERS

#: Largest relative errors: bfloat16 outputs; then what rounding states (or records) to bfloat16 adds.
SINGLE = GateErrors(4e-3, 1e-5)
ROUNDED = GateErrors(2e-2, 2e-2)
#: Requests of a gate's session, whatever the point's batch: they run with the plan that the point launches.
GATE_BATCH = 5
#: Below so many requests, steps differ in how many of them flush: a sample is then a whole cycle of the logs.
FEW_REQUESTS = 64
#: Device memory that stays in CuPy's pool between points.
POOL_BYTES = 8 << 30


class CudaBackend:
    """Kernels of `kernels_cupy` on the current GPU; `eager` adds timings without a CUDA graph.

    A whole step is timed twice in a graph: layer after layer, and with each layer chained to the one before.
    """

    name = "cuda"
    methods: tuple[str, ...] = CUDA_METHODS

    def __init__(self, eager: bool = False) -> None:
        device.check_gpu()
        self.eager = eager
        self.host_processes = 1 if eager else max(1, min(len(os.sched_getaffinity(0)) - 1, 12))  # eager times the host

    def prepare(self, points: Sequence[Point]) -> None:
        """Compile the verification variants of all points in parallel processes; they stay in CuPy's disk cache."""
        plans = [plan for point in points if (plan := self.variant(point)) is not None]
        if len(plans) > 2:
            self.compile(plans)

    def compile(self, plans: Iterable[VerifyPlan]) -> None:
        """Compile what the plans launch in parallel processes."""
        compile_variants([(plan.file, plan.kernel, plan.macros) for plan in plans], self.host_processes)

    def limits(self, point: Point) -> GateErrors:
        rounds = point.heads.state_dtype == "bfloat16" or point.method == "replayssm"
        return ROUNDED if rounds else SINGLE

    def variant(self, point: Point) -> VerifyPlan | None:
        return None if point.method in SERIAL_METHODS else plan_here(problem_of(point), point.batch)

    def gate(self, point: Point, known: Reference) -> GateErrors:
        """Errors of a session of `GATE_BATCH` requests that runs with the plan of the point's own batch."""
        cp, plan = load_cupy(), self.variant(point)

        def make(spec: SessionSpec, states: Any, slots: NDArray[np.int32]) -> CudaSession:
            session = SESSIONS[point.method](spec, states, slots)
            session.plan = plan
            return session

        def place(operands: Operands, template: NDArray[np.int32]) -> Operands:
            index = cp.asarray(template)
            bits = {name: cp.asarray(to_bits(getattr(operands, name)))[index] for name in ("q", "k", "v", "a", "b")}
            return replace(operands, **bits)

        return gate_session(
            make, point.heads, GATE_BATCH, known, place=place,
            spread=lambda states, template: cp.asarray(states)[cp.asarray(template)], fetch=host_floats, put=cp.asarray,
        )  # fmt: skip

    def refusal(self, point: Point) -> str | None:
        """Layers must fit 90 % of the free memory, that of CuPy's pool included."""
        cp = load_cupy()
        shape = shape_of(point)
        needed = allocated_bytes(shape, pass_layers(shape))
        free = cp.cuda.runtime.memGetInfo()[0] + cp.get_default_memory_pool().free_bytes()
        if needed > 0.9 * free:
            return (
                f"needs {needed / 2**30:.0f} GiB, 90 % of the {free / 2**30:.0f} GiB that are free may be used; give a "
                "smaller --batch or --tree"
            )
        return None

    def phases(self, point: Point) -> tuple[str, ...]:
        tree_commit = point.method == "storeall" and not point.tree.is_chain
        has = {
            "verify": True,
            "commit": point.method == "bole" or tree_commit,
            "flush": point.method in LOG_METHODS and point.method != "treewy",
            "step": True,
        }
        return tuple(phase for phase in PHASES if has[phase])

    def timers(self, phase: str) -> tuple[str, ...]:
        timed = {"graph": True, "chained": phase == "step" and chains_here(), "eager": self.eager}
        return tuple(timer for timer in TIMERS if timed[timer])

    def bytes_moved(self, point: Point, phase: str) -> float:
        return shape_of(point).bytes_moved(phase)

    def measure(self, point: Point, phases: Collection[str], effort: Effort) -> Iterator[PhaseTiming]:
        shape = shape_of(point)
        layers = pass_layers(shape)
        enough = AnyOf(
            (MedianSpread(effort.relative_spread, effort.min_samples), TimeLimit(effort.limit_s, effort.min_samples))
        )
        try:
            step = Step(shape, layers, plan=self.variant(point))  # the plan that was gated
            for phase in phases:
                calls = cycle_of(shape) if phase == "step" else 1
                for name in self.timers(phase):
                    timed = timer.time_eager if name == "eager" else timer.time_graph
                    launch = step.chained_step if name == "chained" else step.phases[phase]
                    samples = timed(launch, enough, calls)
                    yield PhaseTiming(phase, name, Timing.of([sample / layers for sample in samples]))
            step.release()
        finally:
            step = None  # type: ignore[assignment]
            device.trim_pool(POOL_BYTES)

    def copy_bandwidth(self) -> float:
        return timer.copy_bandwidth()

    def read_bandwidth(self) -> float | None:
        return timer.read_bandwidth()

    def device(self) -> dict[str, Any]:
        return device.device_record()

    def clocks(self) -> dict[str, Any]:
        return device.clocks()


def shape_of(point: Point) -> Shape:
    """The point as `kernels_cupy.steps` lays it out."""
    return Shape(point.method, point.heads, point.batch, point.tree)


def cycle_of(shape: Shape) -> int:
    """Steps that a sample covers: one, or a whole cycle of the logs where steps differ in how many requests flush."""
    return shape.cycle_steps if shape.method in LOG_METHODS and shape.batch < FEW_REQUESTS else 1


def problem_of(point: Point) -> Problem:
    """What decides how the point's verification is cut; its method is not a serial one."""
    return shape_of(point).problem
