"""The harness on a backend that only writes down what it is asked: gate before time, refusals, limits, resumption."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from lab.bench.backend import Effort, PhaseTiming
from lab.bench.harness import run_bench
from lab.bench.points import Point
from lab.bench.reference import GateErrors, Reference
from lab.bench.results import BenchResult
from lab.bench.timer import Timing
from lab.methods.base import LayerHeads
from lab.trees import DraftTree

HEADS = LayerHeads(1, 2, 32, 32, "float32")


def point(method: str = "treelog", batch: int = 1, tree: DraftTree | None = None) -> Point:
    tree = tree or DraftTree.chain(1)
    return Point(method, HEADS, batch, tree, f"chain:{tree.num_drafts}")


class FakeBackend:
    """Every phase takes 100 us and moves 50 bytes, a copy 1 MB/s: 50 % of the copy bandwidth."""

    name = "cuda"
    methods = ("treelog",)
    host_processes = 1

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.errors = GateErrors(1e-7, 1e-7)
        self.moved = 50.0
        self.named: tuple[str, ...] = ("verify", "step")
        self.timed: dict[str, tuple[str, ...]] = {}
        self.read: float | None = 1.04e6
        self.no_room_for = 10**9
        self.clock_mhz = [1980, 1980]

    def prepare(self, points: Sequence[Point]) -> None:
        self.asked.append(f"prepare {len(points)}")

    def limits(self, point: Point) -> GateErrors:
        return GateErrors(1e-5, 1e-5)

    def variant(self, point: Point) -> object:
        return point.batch >= 100

    def gate(self, point: Point, known: Reference) -> GateErrors:
        self.asked.append(f"gate {point.batch}")
        return self.errors

    def refusal(self, point: Point) -> str | None:
        return "too large" if point.batch > 1000 else None

    def phases(self, point: Point) -> tuple[str, ...]:
        return self.named

    def timers(self, phase: str) -> tuple[str, ...]:
        return self.timed.get(phase, ("graph",))

    def bytes_moved(self, point: Point, phase: str) -> float:
        return self.moved

    def measure(self, point: Point, phases: Collection[str], effort: Effort) -> Iterator[PhaseTiming]:
        if point.batch >= self.no_room_for:
            raise MemoryError("64 GiB asked for")
        for phase in phases:
            self.asked.append(f"time {point.batch} {phase}")
            for timer in self.timers(phase):
                yield PhaseTiming(phase, timer, Timing(100.0, 99.0, 101.0, 11))

    def copy_bandwidth(self) -> float:
        return 1e6

    def read_bandwidth(self) -> float | None:
        return self.read

    def device(self) -> dict[str, Any]:
        return {"name": "fake"}

    def clocks(self) -> dict[str, Any]:
        return {"sm_clock_mhz": self.clock_mhz.pop(0)}


def bench(backend: FakeBackend, points: list[Point], result: BenchResult | None = None, **more: Any) -> BenchResult:
    result = result or BenchResult({"name": "fake"})
    run_bench(backend, points, result, effort=Effort(), **more)
    return result


def test_the_gate_comes_first_and_a_row_holds_times_bytes_and_errors() -> None:
    backend = FakeBackend()
    result = bench(backend, [point()])
    assert backend.asked == ["prepare 1", "gate 1", "time 1 verify", "time 1 step"]
    row = result.rows[0]
    assert (row.phase, row.latency_us_p50, row.latency_us_p20, row.latency_us_p80, row.samples) == (
        "step", 100.0, 99.0, 101.0, 11,
    )  # fmt: skip
    assert (row.bytes_moved, row.pct_copy_bandwidth, row.rel_err_output) == (50, pytest.approx(50.0), 1e-7)
    assert result.red == []


def test_a_red_gate_gives_rows_without_times_that_say_which_error() -> None:
    backend = FakeBackend()
    backend.errors = GateErrors(1e-7, 0.03)
    result = bench(backend, [point()])
    assert not any(asked.startswith("time") for asked in backend.asked)
    assert [(row.latency_us_p50, row.samples, row.rel_err_state) for row in result.rows] == [(None, 0, 0.03)] * 2
    assert result.red == [f"{point()}: state error 3.0e-02 > 1.0e-05"]


def test_a_phase_has_a_row_for_each_of_its_timers_and_a_point_without_one_is_measured_anew() -> None:
    first = bench(FakeBackend(), [point()])
    backend = FakeBackend()
    backend.timed["step"] = ("graph", "chained")
    result = bench(backend, [point()], first)
    assert [(row.phase, row.timer) for row in result.rows] == [
        ("step", "chained"), ("step", "graph"), ("verify", "graph"),
    ]  # fmt: skip
    backend.asked.clear()
    bench(backend, [point()], result)
    assert backend.asked == []
    backend = FakeBackend()
    backend.timed["step"], backend.errors = ("graph", "chained"), GateErrors(1e-7, 0.03)
    assert {(row.phase, row.timer) for row in bench(backend, [point()]).rows} == {
        ("step", "chained"), ("step", "graph"), ("verify", "graph"),
    }  # fmt: skip


def test_each_variant_of_a_kernel_is_gated_once() -> None:
    backend = FakeBackend()
    bench(backend, [point(batch=1), point(batch=8), point(batch=100), point(batch=200), point("bole", batch=8)])
    assert [asked for asked in backend.asked if "gate" in asked] == ["gate 1", "gate 100", "gate 8"]


def test_more_than_reading_alone_reaches_is_an_error_on_a_gpu_and_nothing_on_a_cpu() -> None:
    backend = FakeBackend()
    backend.moved = 105.0
    result = bench(backend, [point()], phases=("step",))
    assert result.red == [
        f"{point()}, step (graph): 105.0 % of the copy bandwidth, of which this phase can reach 104.0 %; its bytes "
        "or its time must be wrong"
    ]
    backend = FakeBackend()
    backend.moved = 103.0
    result = bench(backend, [point()], phases=("step",))
    assert result.red == []
    assert result.rows[0].pct_copy_bandwidth == pytest.approx(103)
    assert result.device["read_bandwidth_bytes_per_s"] == 1_040_000
    backend = FakeBackend()
    backend.moved, backend.named = 103.0, ("verify", "commit")
    assert [line.split(", ")[-1][:26] for line in bench(backend, [point()]).red] == ["of which this phase can re"], (
        "a commit writes what it reads"
    )
    backend = FakeBackend()
    backend.moved, backend.read = 105.0, None
    result = bench(backend, [point()])
    assert result.red == []
    assert result.rows[0].pct_copy_bandwidth is None


def test_what_does_not_fit_is_left_out_with_its_reason() -> None:
    backend = FakeBackend()
    backend.no_room_for = 500
    result = bench(backend, [point(batch=2000), point(batch=500), point(batch=1)])
    assert result.skipped == [f"{point(batch=2000)}: too large", f"{point(batch=500)}: 64 GiB asked for"]
    assert {row.batch for row in result.rows} == {1}


def test_the_time_limit_counts_what_is_left() -> None:
    ticks = iter(range(100))
    result = bench(
        FakeBackend(), [point(batch=batch) for batch in range(1, 9)], time_limit_s=4, clock=lambda: float(next(ticks))
    )
    assert result.left_out == 8 - len({row.batch for row in result.rows})
    assert 0 < result.left_out < 8


def test_a_bench_that_is_stopped_knows_what_is_left() -> None:
    backend = FakeBackend()
    result = BenchResult({"name": "fake"})
    left: list[int] = []

    def stop(done: int, total: int) -> None:
        left.append(result.left_out)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(backend, [point(batch=batch) for batch in range(1, 9)], result, progress=stop)
    assert left == [7, 6]
    assert result.measured == len({row.batch for row in result.rows}) == 2


def test_nothing_to_measure_leaves_the_device_in_peace() -> None:
    first = bench(FakeBackend(), [point()])
    backend = FakeBackend()
    result = bench(backend, [point()], first)
    assert backend.asked == []
    assert result.left_out == 0


def test_rows_that_are_there_are_not_measured_again() -> None:
    first = bench(FakeBackend(), [point(batch=1)])
    backend = FakeBackend()
    result = bench(backend, [point(batch=1), point(batch=2)], first)
    assert [asked for asked in backend.asked if "time" in asked] == ["time 2 verify", "time 2 step"]
    assert [(row.phase, row.batch) for row in result.rows] == [
        ("step", 1), ("step", 2), ("verify", 1), ("verify", 2),
    ]  # fmt: skip


def test_a_point_that_lacks_a_phase_is_measured_anew_and_its_rows_take_the_place_of_the_old_ones() -> None:
    first = bench(FakeBackend(), [point(batch=1), point(batch=2)], phases=("step",))
    old = {row.batch: row for row in first.rows}
    result = bench(FakeBackend(), [point(batch=2)], first)
    assert [(row.phase, row.batch) for row in result.rows] == [("step", 1), ("step", 2), ("verify", 2)]
    assert result.rows[0] is old[1]
    assert result.rows[1] is not old[2]
    assert result.measured == 3


def test_progress_and_saves_are_called_while_it_runs() -> None:
    seen: list[tuple[int, int]] = []
    saves: list[int] = []
    seconds = iter(range(0, 10_000, 20))
    bench(
        FakeBackend(),
        [point(batch=batch) for batch in (1, 2, 3)],
        progress=lambda done, total: seen.append((done, total)),
        save=lambda: saves.append(len(seen)),
        clock=lambda: float(next(seconds)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert saves


@pytest.mark.parametrize(("after_mhz", "throttled"), [(1980, False), (1500, True), (None, None)])
def test_a_lower_clock_after_the_run_is_noted(after_mhz: int | None, throttled: bool | None) -> None:
    backend = FakeBackend()
    backend.clock_mhz = [1980, after_mhz]  # type: ignore[list-item]
    assert bench(backend, [point()]).device["throttled"] is throttled
