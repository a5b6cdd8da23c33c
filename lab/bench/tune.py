"""Tuning: times every way to cut a verification at every place of the axes and keeps the fastest as `plans.csv`.

`plans_device.json` beside it says on which GPU and with which kernels, so that a run that goes on adds to its own like.
Results are not compared with the oracle here: the gate (`kernels_cupy.gate`) runs every plan of a shipped table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kernels_cupy.choice import place_of
from kernels_cupy.compiler import tuned_hash
from kernels_cupy.plans import Problem, VerifyPlan
from kernels_cupy.problems import LOG_METHODS
from lab.bench.cuda_backend import problem_of, shape_of
from lab.bench.points import Point
from lab.errors import UsageError
from lab.files import check_replaceable, replace_text
from lab.methods import SERIAL_METHODS
from lab.profiles.plans import PLANS_FILE, Place, PlanRow, read_plans, write_plans

#: Methods that are tuned unless a flag says otherwise: every size of tree and log that the shipped methods launch.
TUNED_METHODS = ("treelog", "bole", "deltalog", "replayssm")
DEVICE_FILE = "plans_device.json"
#: Seconds between two calls of `save`.
SAVE_EVERY_S = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """A place to tune, and the points that stand for it: they differ in how many rows a step commits."""

    place: Place
    points: tuple[Point, ...]

    @property
    def problem(self) -> Problem:
        """The verification that is cut; its paths are the longest of the points."""
        return max(map(problem_of, self.points), key=lambda problem: problem.longest_path)


class Tuner(Protocol):
    """What runs on the GPU."""

    def candidates(self, problem: Problem) -> list[VerifyPlan]:
        """Every plan that the GPU can hold."""

    def safe(self, problem: Problem, batch: int) -> VerifyPlan:
        """The plan that is taken without a table."""

    def compile(self, plans: Iterable[VerifyPlan]) -> None:
        """Compile what the plans launch, several at a time."""

    def refusal(self, point: Point) -> str | None:
        """Why the point cannot run on this device, such as its memory; None when it can."""

    def measure(self, point: Point, plans: Sequence[VerifyPlan]) -> dict[str, float]:
        """Median microseconds per layer and step by the plan's name; raises `MemoryError` when there is no room."""


@dataclass(slots=True)
class TuneResult:
    """Rows so far; `skipped` places that could not run, each with its reason; `left_out` counts those not reached.

    `gains` are the safe plan's time over that of the fastest, for every place of this run.
    """

    rows: dict[Place, PlanRow] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    left_out: int = 0
    gains: list[float] = field(default_factory=list)


def targets(points: Iterable[Point]) -> list[Target]:
    """The places that the points stand for, in an order in which a run cut short covers everything coarsely.

    Raises `UsageError` for a method whose verification has one way to run.
    """
    found: dict[Place, dict[object, Point]] = {}
    for point in points:
        if point.method in SERIAL_METHODS:
            raise UsageError(f"--tune: {point.method} has one way to run; give others to --method, or leave it away")
        shape = shape_of(point)
        limits = shape.log_limits if point.method in LOG_METHODS else ()
        alike = (limits, shape.committed().tobytes(), problem_of(point).longest_path)
        found.setdefault(place_of(problem_of(point), point.batch), {}).setdefault(alike, point)
    every = [Target(place, tuple(alike.values())) for place, alike in found.items()]
    rank = {batch: i for i, batch in enumerate(coarse_to_fine(sorted({target.place.batch for target in every})))}
    return sorted(every, key=lambda target: rank[target.place.batch])


def coarse_to_fine(values: Sequence[int]) -> list[int]:
    """Ascending values in an order whose every prefix is spread out: the middle, the ends, the middles between."""
    if not values:
        return []
    last = len(values) - 1
    order = [last // 2, 0, last]
    spans = [(0, last // 2), (last // 2, last)]
    for low, high in spans:  # grows while it is read
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [values[i] for i in dict.fromkeys(order)]


def run_tuning(
    tuner: Tuner,
    wanted: Sequence[Target],
    result: TuneResult,
    *,
    time_limit_s: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    save: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Tune the places that `result` does not hold yet, into `result`.

    `progress(done, total)` is called after every place, `save()` now and then; after `time_limit_s` seconds, which
    compilation counts towards, it stops by itself.
    """
    start = last_save = clock()
    todo = [target for target in wanted if target.place not in result.rows]
    result.left_out = len(todo)
    plans = {target.place: tuner.candidates(target.problem) for target in todo}
    distinct = {(plan.file, *plan.macros.items()): plan for each in plans.values() for plan in each}
    if distinct:
        tuner.compile(distinct.values())
    for done, target in enumerate(todo, 1):
        if time_limit_s is not None and clock() - start >= time_limit_s:
            break
        _tune(tuner, target, plans[target.place], result)
        result.left_out = len(todo) - done
        progress(done, len(todo))
        if clock() - last_save >= SAVE_EVERY_S:
            save()
            last_save = clock()


def _tune(tuner: Tuner, target: Target, plans: Sequence[VerifyPlan], result: TuneResult) -> None:
    refusal = "no plan fits the shared memory of this GPU" if not plans else None
    for point in target.points:
        refusal = refusal or tuner.refusal(point)
    if refusal is not None:
        result.skipped.append(f"{target.place}: {refusal}")
        return
    try:
        times = mean_times([tuner.measure(point, plans) for point in target.points])
    except MemoryError as error:
        result.skipped.append(f"{target.place}: {str(error) or 'out of memory'}")
        return
    result.rows[target.place] = row_of(target.place, times)
    safe = times.get(tuner.safe(target.problem, target.place.batch).name)
    if safe is not None:
        result.gains.append(safe / min(times.values()))


def mean_times(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the points of a place, of the plans that all of them have."""
    common = [name for name in times[0] if all(name in each for each in times)]
    return {name: sum(each[name] for each in times) / len(times) for name in common}


def row_of(place: Place, times: Mapping[str, float]) -> PlanRow:
    """The fastest plan and the next one."""
    ordered = sorted(times, key=lambda name: times[name])
    first, second = ordered[0], ordered[1 % len(ordered)]
    return PlanRow(place, first, times[first], second, times[second])


def tuning_record(device: str) -> dict[str, str]:
    """What a table of plans holds for: the GPU, and a hash of the kernels and of what times them."""
    return {"name": device, "kernel_hash": tuned_hash()}


def check_plans_target(folder: Path, resume: bool, overwrite: bool, record: Mapping[str, str]) -> dict[Place, PlanRow]:
    """The rows to start from; raises `UsageError` when `folder` cannot be written or holds a table to be kept.

    With `resume` that table must have been tuned on the GPU and with the kernels of `record`.
    """
    path = folder / PLANS_FILE
    if path.exists() and not (resume or overwrite):
        raise UsageError(
            f"{path} is there already; give --resume to add what it lacks (tuned on this GPU with these kernels), "
            "--overwrite to tune anew, or another folder"
        )
    if resume and not path.exists():
        raise UsageError(f"--resume: {folder} holds no {PLANS_FILE}; leave --resume away to start one")
    rows: dict[Place, PlanRow] = {}
    if resume:
        _check_same(folder, record)
        rows = {row.place: row for row in read_plans(path).rows}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); give a folder of your own") from error
    for name in (PLANS_FILE, DEVICE_FILE):
        check_replaceable(folder / name)
    return rows


def _check_same(folder: Path, record: Mapping[str, str]) -> None:
    remedy = "give --overwrite to tune all places anew, or another folder"
    then = _device_record(folder / DEVICE_FILE)
    if then is None:
        raise UsageError(
            f"--resume: {folder / DEVICE_FILE} is missing or no record, so nothing says where {PLANS_FILE} was tuned; "
            f"{remedy}"
        )
    if then.get("name") != record["name"]:
        raise UsageError(f"--resume: {folder} was tuned on {then.get('name')}, this GPU is {record['name']}; {remedy}")
    if then.get("kernel_hash") != record["kernel_hash"]:
        raise UsageError(f"--resume: {folder} was tuned with other kernels, or timed by other code; {remedy}")


def _device_record(path: Path) -> Mapping[str, object] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def save_plans(rows: Iterable[PlanRow], folder: Path, record: Mapping[str, str]) -> None:
    """Write `plans.csv` and what it holds for; whoever looks finds the old table or the new one."""
    device = folder / DEVICE_FILE
    try:
        if _device_record(device) != record:
            device.unlink(missing_ok=True)  # it never stands beside a table of another GPU
        replace_text(folder / PLANS_FILE, write_plans(rows))
        replace_text(device, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); give a folder of your own") from error
