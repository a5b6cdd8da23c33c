"""The CPU backend: Numba sessions timed through the session protocol, checks of operands included."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from kernels_cupy.problems import log_limits
from lab.bench.backend import Effort, PhaseTiming
from lab.bench.operands import random_operands, random_states
from lab.bench.points import Point
from lab.bench.reference import TEMPLATES, GateErrors, Reference, gate_session
from lab.bench.timer import AnyOf, MedianSpread, TimeLimit, time_calls
from lab.cpu import SESSIONS, CpuSession
from lab.cpu.log_sessions import ClosedFormSession
from lab.methods import METHODS
from lab.methods.logs import mean_log_rows, steps_per_flush
from lab.methods.protocol import Operands, SessionSpec

#: Largest relative errors: float32 arithmetic, and what rounding states (or records) to bfloat16 adds.
SINGLE = GateErrors(1e-5, 1e-5)
ROUNDED = GateErrors(2e-2, 2e-2)
#: Methods whose dense state is written once in several steps.
DEFERRED = ("replayssm", "deltalog", "treelog")
#: Methods whose next verification consumes what the commit left: one commit belongs to every verification.
PENDING = ("treewy", "specla")
MAX_LAYERS = 64


class CpuBackend:
    """Numba kernels on all threads that Numba uses."""

    name = "cpu"
    methods = tuple(SESSIONS)
    host_processes = 1

    def prepare(self, points: Sequence[Point]) -> None:
        """Numba compiles while the gate runs."""

    def limits(self, point: Point) -> GateErrors:
        rounds = point.heads.state_dtype == "bfloat16" or point.method == "replayssm"
        return ROUNDED if rounds else SINGLE

    def variant(self, point: Point) -> object:
        return None

    def gate(self, point: Point, known: Reference) -> GateErrors:
        return gate_session(
            SESSIONS[point.method], point.heads, TEMPLATES, known,
            place=_repeat, spread=lambda states, template: states[template],
        )  # fmt: skip

    def refusal(self, point: Point) -> str | None:
        needed = 2 * layer_bytes(point)
        if needed > 0.5 * _memory_bytes():
            return f"two layers need {needed / 2**30:.1f} GiB, more than half of the memory"
        return None

    def phases(self, point: Point) -> tuple[str, ...]:
        launches_commit = ("bole", "specla") + (() if point.tree.is_chain else ("storeall",))
        commit = ("commit",) if point.method in launches_commit else ()
        flush = ("flush",) if point.method in DEFERRED else ()
        return ("verify", *commit, *flush, "step")

    def timers(self, phase: str) -> tuple[str, ...]:
        return ("eager",)

    def bytes_moved(self, point: Point, phase: str) -> float:
        """By the laws of `lab.methods`, whatever types this backend keeps records in."""
        heads = point.heads
        method = METHODS[point.method]
        law = method.phases(heads, point.tree, point.rows_committed)
        if phase == "step":
            return point.batch * sum(part.bytes for part in law)
        if phase == "flush":
            return point.batch * (2 * heads.state_bytes + _log_limits(point)[0] * method.record_bytes(heads))
        names = ("verify", "decode") if phase == "verify" else ("commit", "gather")
        return point.batch * sum(part.read_bytes + part.write_bytes for part in law if part.name in names)

    def measure(self, point: Point, phases: Collection[str], effort: Effort) -> Iterator[PhaseTiming]:
        layers = min(max(-(-effort.cycle_bytes // layer_bytes(point)), 2), MAX_LAYERS)
        steps = _Layers(point, layers)
        stop = AnyOf((MedianSpread(effort.relative_spread, effort.min_samples), TimeLimit(effort.limit_s)))
        for phase in phases:
            before, call = steps.phase(phase)
            calls = steps.steps_per_sample if phase == "step" else 1
            warm_up = max(3, calls) if phase == "step" else 2
            timing = time_calls(call, stop, before=before, warm_up=warm_up, calls_per_sample=calls)
            yield PhaseTiming(phase, "eager", timing)

    def copy_bandwidth(self, nbytes: int = 256 << 20) -> float:
        source = np.ones(nbytes // 8, np.float64)
        target = np.zeros_like(source)
        stop = AnyOf((MedianSpread(0.005), TimeLimit(1.0)))
        return 2e6 * nbytes / time_calls(lambda: _copy(source, target), stop).p20_us  # a busy machine only delays

    def read_bandwidth(self) -> float | None:
        return None

    def device(self) -> dict[str, Any]:
        return {
            "name": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": numba.get_num_threads(),
            "memory_bytes": _memory_bytes(),
            "numba": version("numba"),
            "numpy": version("numpy"),
            "python": platform.python_version(),
            "load_average": [round(value, 2) for value in os.getloadavg()],
        }

    def clocks(self) -> dict[str, Any]:
        return {}


class _Layers:
    """Sessions of several layers in turn, so that a call meets operands that left the cache as far as memory goes."""

    def __init__(self, point: Point, layers: int) -> None:
        self.point = point
        self._rng = np.random.default_rng(0)
        template = SessionSpec.for_tree(point.heads, point.tree, TEMPLATES)
        some_states = random_states(template, TEMPLATES, self._rng)
        some_operands = random_operands(template, point.tree.parent_array(), self._rng)
        spec = replace(template, batch=point.batch)
        place = (np.arange(point.batch) % TEMPLATES).astype(np.int32)
        self._layers: list[tuple[CpuSession, Operands]] = []
        for _ in range(layers):
            slots = self._rng.permutation(point.batch).astype(np.int32)
            session = SESSIONS[point.method](spec, some_states[place], slots)
            if isinstance(session, ClosedFormSession):  # scratch is NaN; logs start with some of it
                for array in (session.log.u, session.log.k, session.log.g):
                    array.fill(0)
            operands = _repeat(some_operands, place)
            session.verify(operands)
            self._layers.append((session, operands))
        self._turn = 0
        self._row_at_depth = {depth: row for row, depth in reversed(list(enumerate(point.tree.depth)))}
        self._accepted = self._accepted_rows()

    @property
    def steps_per_sample(self) -> int:
        """Steps that a sample of phase `step` averages: a whole cycle of the log."""
        return round(_flush_steps(self.point)) if self.point.method in DEFERRED else 1

    def _accepted_rows(self) -> NDArray[np.int32]:
        """Accepted row of each request, `rows_committed` rows deep on average."""
        mean = self.point.rows_committed
        deep = np.floor(mean + self._rng.random(self.point.batch)).astype(int)
        return np.array([self._row_at_depth[int(rows) - 1] for rows in deep], np.int32)

    def phase(self, phase: str) -> tuple[Callable[[], object], Callable[[], object]]:
        """What comes before a call, untimed, and the call."""
        if phase == "step":
            self._set_logs(None)
            return self._advance, self._step
        if phase == "verify":
            if self.point.method in DEFERRED:
                self._set_logs(round(mean_log_rows(_flush_steps(self.point), self.point.rows_committed)))
            return self._before_verify, self._verify
        if phase == "commit":
            return self._before_commit, self._commit
        return self._before_flush, lambda: self._session.flush()

    @property
    def _session(self) -> CpuSession:
        return self._layers[self._turn][0]

    def _verify(self) -> None:
        session, operands = self._layers[self._turn]
        session.verify(operands)

    def _commit(self) -> None:
        self._session.commit(self._accepted)

    def _step(self) -> None:
        self._verify()
        self._commit()

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % len(self._layers)
        self._accepted = self._accepted_rows()

    def _before_verify(self) -> None:
        self._advance()
        if self.point.method in PENDING:
            self._verify()
            self._commit()

    def _before_commit(self) -> None:
        self._advance()
        self._verify()

    def _before_flush(self) -> None:
        self._advance()
        session = self._session
        assert isinstance(session, ClosedFormSession)
        session.log.count.fill(_log_limits(self.point)[0])

    def _set_logs(self, rows: int | None) -> None:
        """Give every request a log of `rows` rows, or of a random number of them, out of phase."""
        if self.point.method not in DEFERRED:
            return
        for session, _ in self._layers:
            assert isinstance(session, ClosedFormSession)
            log = session.log.count
            capacity = _log_limits(self.point)[0]
            log[:] = self._rng.integers(0, capacity + 1, len(log)) if rows is None else rows


def layer_bytes(point: Point) -> int:
    """Memory of one layer: states, records, operands and outputs in float32."""
    resident = METHODS[point.method].resident_bytes(point.heads, point.tree) + point.heads.state_bytes
    return int(point.batch * (resident + 2 * point.tree.num_rows * point.heads.operand_bytes))


def _log_limits(point: Point) -> tuple[int, int]:
    """Rows of a log when it is full before a step, and the rows that a step reserves, as on the GPU."""
    return log_limits(point.method, point.tree.num_rows, point.tree.max_depth + 1)


def _flush_steps(point: Point) -> float:
    return steps_per_flush(*_log_limits(point), point.rows_committed)


def _repeat(operands: Operands, template: NDArray[np.int32]) -> Operands:
    per_request = {name: getattr(operands, name)[template] for name in ("q", "k", "v", "a", "b")}
    return replace(operands, **per_request)


@numba.njit(parallel=True, cache=True)
def _copy(source: Any, target: Any) -> None:
    for i in numba.prange(len(source)):
        target[i] = source[i]


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
