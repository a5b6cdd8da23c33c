"""The harness: for every point the gate, then the timer, then the rows of `kernels.csv`.

A red gate gives rows without times. A point that does not fit the device is left out, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab.bench.backend import Backend, Effort
from lab.bench.points import Point
from lab.bench.reference import GateErrors, References
from lab.bench.results import BenchResult
from lab.bench.timer import Timing
from lab.errors import UsageError
from lab.profiles.rows import PHASES, KernelRow

#: Seconds between two calls of `save` while a bench runs.
SAVE_EVERY_S = 30.0
#: Phases that write as much as they read reach the copy bandwidth at most, up to this spread of the copies themselves.
COPY_TOLERANCE = 1.01
#: The fall of the clock, from before a run to after it, that counts as throttled.
THROTTLED = 0.9


def run_bench(
    backend: Backend,
    points: Sequence[Point],
    result: BenchResult,
    *,
    effort: Effort,
    phases: Sequence[str] = PHASES,
    time_limit_s: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    save: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure all points that `result` does not hold yet, into `result`.

    `progress(done, total)` is called after every point, `save()` now and then. `result.left_out` counts the points that
    are left at any time, so that whoever stops the bench can save it; after `time_limit_s` seconds it stops by itself.
    """
    start = last_save = clock()
    have = {row.key for row in result.rows}
    todo = [
        point
        for point in points
        if not all(
            point.key(phase, timer) in have
            for phase in backend.phases(point)
            if phase in phases
            for timer in backend.timers(phase)
        )
    ]
    result.left_out = len(todo)
    if not todo:
        return
    backend.prepare(todo)
    bandwidth, read = backend.copy_bandwidth(), backend.read_bandwidth()
    before = backend.clocks()  # the copies have woken the device up
    result.device["copy_bandwidth_bytes_per_s"] = round(bandwidth)
    highest: dict[str, float] | None = None
    if read is not None:
        result.device["read_bandwidth_bytes_per_s"] = round(read)
        reads = 100 * max(read / bandwidth, COPY_TOLERANCE)
        highest = {phase: reads if phase in ("verify", "step") else 100 * COPY_TOLERANCE for phase in PHASES}
    gated: dict[object, GateErrors] = {}
    with References([(point.heads, point.tree) for point in todo], backend.host_processes) as references:
        for done, point in enumerate(todo):
            if time_limit_s is not None and clock() - start >= time_limit_s:
                break
            result.forget(point)
            rows = _measure_point(
                backend, point, references, result, gated, [p for p in phases if p in backend.phases(point)], effort,
                bandwidth, highest,
            )  # fmt: skip
            fresh = {row.key for row in rows}
            if not have.isdisjoint(fresh):
                result.rows = [row for row in result.rows if row.key not in fresh]
            result.rows += rows
            result.measured += bool(rows)
            result.left_out = len(todo) - done - 1
            progress(done + 1, len(todo))
            if clock() - last_save >= SAVE_EVERY_S:
                save()
                last_save = clock()
    after = backend.clocks()
    result.rows.sort(key=lambda row: row.key)
    result.device |= {"clocks_before": before, "clocks_after": after, "throttled": _throttled(before, after)}


def _measure_point(
    backend: Backend,
    point: Point,
    references: References,
    result: BenchResult,
    gated: dict[object, GateErrors],
    phases: Sequence[str],
    effort: Effort,
    bandwidth: float,
    highest: Mapping[str, float] | None,
) -> list[KernelRow]:
    """The rows of one point, gated and timed; none when it is skipped.

    A row above its phase's `highest` % of the copy bandwidth is red, if that is a bound.
    """
    refusal = backend.refusal(point)
    if refusal is not None:
        result.skipped.append(f"{point}: {refusal}")
        return []
    variant = (point.method, point.heads, point.tree, backend.variant(point))
    try:
        if variant not in gated:
            gated[variant] = backend.gate(point, references(point.heads, point.tree))
        errors = gated[variant]
        excess = errors.excess(backend.limits(point))
        if excess is not None:
            result.red.append(f"{point}: {excess}")
            rows = [_bare(backend, point, phase, timer, errors) for phase in phases for timer in backend.timers(phase)]
        else:
            rows = [
                _timed(_bare(backend, point, phase, timer, errors), timing, bandwidth, highest is not None)
                for phase, timer, timing in backend.measure(point, phases, effort)
            ]
    except (MemoryError, UsageError) as error:
        result.skipped.append(f"{point}: {error or 'out of memory'}")
        return []
    for row in rows:
        if highest is not None and (row.pct_copy_bandwidth or 0) > highest[row.phase]:
            result.red.append(
                f"{point}, {row.phase} ({row.timer}): {row.pct_copy_bandwidth:.1f} % of the copy bandwidth, of which "
                f"this phase can reach {highest[row.phase]:.1f} %; its bytes or its time must be wrong"
            )
    return rows


def _bare(backend: Backend, point: Point, phase: str, timer: str, errors: GateErrors) -> KernelRow:
    return point.row(phase, timer, backend.bytes_moved(point, phase), (errors.output, errors.state))


def _timed(row: KernelRow, timing: Timing, bandwidth: float, bound: bool) -> KernelRow:
    """The row with its times. Where caches may serve a phase, more than the copy bandwidth means nothing: None."""
    percent = 100 * row.bytes_moved / (timing.p50_us * 1e-6) / bandwidth
    return replace(
        row,
        latency_us_p50=timing.p50_us,
        latency_us_p20=timing.p20_us,
        latency_us_p80=timing.p80_us,
        samples=timing.samples,
        pct_copy_bandwidth=percent if bound or percent <= 100 else None,
    )


def _throttled(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool | None:
    """Whether the device lowered its clock during the run; None where clocks are not known."""
    first, last = before.get("sm_clock_mhz"), after.get("sm_clock_mhz")
    if first is None or last is None:
        return None
    return bool(after.get("throttle_reasons")) or last < THROTTLED * first
