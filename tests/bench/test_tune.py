"""Tuning without a GPU: which places, in which order, what is kept, and what is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_cupy.choice import candidates, modelled_plan, place_of
from kernels_cupy.plans import Problem, VerifyPlan
from lab.bench import tune
from lab.bench.cuda_backend import problem_of
from lab.bench.points import Axes, Point, default_axes
from lab.bench.tune import (
    TUNED_METHODS,
    TuneResult,
    check_plans_target,
    coarse_to_fine,
    run_tuning,
    save_plans,
    targets,
    tuning_record,
)
from lab.errors import UsageError
from lab.profiles.plans import read_plans

MODEL = (("Qwen3.5-35B-A3B", 1),)
AXES = Axes(("treelog", "bole"), MODEL, ("float32",), (1, 32, 256), ("chain:3", "chain:15", "binary:15"))


@dataclass
class FakeTuner:
    """A GPU on which plans take as many microseconds as their name has letters, twice that on chains."""

    largest: int = 227 * 1024
    compiled: list[VerifyPlan] = field(default_factory=list)
    measured: list[Point] = field(default_factory=list)
    refuse: str = ""
    full: int = 10**9

    def candidates(self, problem: Problem) -> list[VerifyPlan]:
        return candidates(problem, self.largest)

    def safe(self, problem: Problem, batch: int) -> VerifyPlan:
        return modelled_plan(problem, batch)

    def compile(self, plans: Iterable[VerifyPlan]) -> None:
        self.compiled += plans

    def refusal(self, point: Point) -> str | None:
        return self.refuse or None

    def measure(self, point: Point, plans: Sequence[VerifyPlan]) -> dict[str, float]:
        if point.batch >= self.full:
            raise MemoryError
        self.measured.append(point)
        return {plan.name: len(plan.name) * (2.0 if point.tree.is_chain else 1.0) for plan in plans}


@given(st.lists(st.integers(1, 600), unique=True, max_size=20).map(sorted))
def test_coarse_to_fine_keeps_every_value_and_starts_spread_out(values: list[int]) -> None:
    order = coarse_to_fine(values)
    assert sorted(order) == values
    if len(values) > 2:
        assert set(order[:3]) == {values[0], values[(len(values) - 1) // 2], values[-1]}


def test_the_first_places_have_every_size_and_every_type() -> None:
    every = targets(replace(default_axes("cuda", False, TUNED_METHODS), methods=TUNED_METHODS).points())
    sizes = {(target.place.size_class, target.place.log_bf16) for target in every}
    first = {(target.place.size_class, target.place.log_bf16) for target in every[: len(every) // 10]}
    assert first == sizes
    assert len({target.place for target in every}) == len(every)


def test_trees_of_one_size_share_a_place_and_their_mean_decides() -> None:
    every = targets(AXES.points())
    shared = [target for target in every if len(target.points) > 1]
    assert {target.place.rows for target in shared} == {16}
    assert all([point.tree_text for point in target.points] == ["chain:15", "binary:15"] for target in shared)
    assert all(target.problem.longest_path == 16 for target in shared)
    tuner, result = FakeTuner(), TuneResult()
    run_tuning(tuner, shared[:1], result)
    (row,) = result.rows.values()
    assert row.latency_us == pytest.approx(1.5 * len(row.plan))
    assert len(tuner.measured) == 2


def test_methods_that_launch_alike_are_tuned_once() -> None:
    points = replace(AXES, methods=("treelog", "deltalog"), trees=("chain:0",)).points()
    every = targets(points)
    assert (len(points), len(every)) == (6, 3)
    assert {point.method for target in every for point in target.points} == {"treelog"}


def test_serial_methods_have_nothing_to_tune() -> None:
    with pytest.raises(UsageError, match="--tune: storeall has one way to run"):
        targets(replace(AXES, methods=("storeall",)).points())


def test_the_fastest_and_the_next_are_kept_after_all_was_compiled() -> None:
    tuner, result, every = FakeTuner(), TuneResult(), targets(AXES.points())
    run_tuning(tuner, every, result)
    assert result.left_out == 0
    assert list(result.rows) == [target.place for target in every]
    for target in every:
        row, lengths = result.rows[target.place], sorted(len(plan.name) for plan in candidates(target.problem))
        assert [len(row.plan), len(row.runner_up)] == lengths[:2]
        assert row.latency_us <= row.runner_up_us
    launched = {(plan.file, *plan.macros.items()) for target in every for plan in candidates(target.problem)}
    assert {(plan.file, *plan.macros.items()) for plan in tuner.compiled} == launched
    assert len(tuner.compiled) == len(launched), "each variant once"
    assert len(result.gains) == len(every)
    assert min(result.gains) >= 1


def test_plans_that_the_gpu_cannot_hold_are_not_timed() -> None:
    tuner, result = FakeTuner(largest=70_000), TuneResult()
    run_tuning(tuner, targets(AXES.points()), result)
    assert tuner.compiled
    assert all(plan.shared_bytes <= 70_000 for plan in tuner.compiled)
    tuner, result = FakeTuner(largest=1), TuneResult()
    run_tuning(tuner, targets(AXES.points()), result)
    assert result.rows == {}
    assert "no plan fits the shared memory" in result.skipped[0]


def test_places_without_room_are_told_and_the_others_kept() -> None:
    result = TuneResult()
    run_tuning(FakeTuner(full=256), targets(AXES.points()), result)
    assert {place.batch for place in result.rows} == {1, 32}
    assert all("batch 256" in line and "out of memory" in line for line in result.skipped)
    refused = TuneResult()
    run_tuning(FakeTuner(refuse="needs 300 GiB"), targets(AXES.points()), refused)
    assert refused.rows == {}
    assert all("needs 300 GiB" in line for line in refused.skipped)


def test_a_time_limit_keeps_what_is_there_and_a_second_run_does_the_rest() -> None:
    every, result, ticks = targets(AXES.points()), TuneResult(), iter(range(1000))
    saved: list[int] = []
    run_tuning(FakeTuner(), every, result, time_limit_s=6, clock=lambda: next(ticks), save=lambda: saved.append(1))
    assert 0 < len(result.rows) < len(every)
    assert result.left_out == len(every) - len(result.rows)
    tuner, done = FakeTuner(), len(result.rows)
    run_tuning(tuner, every, result)
    assert (len(result.rows), result.left_out) == (len(every), 0)
    assert len({place_of(problem_of(point), point.batch) for point in tuner.measured}) == len(every) - done


def test_the_file_is_written_whole_and_is_where_a_run_starts_from(tmp_path: Path) -> None:
    folder, result, here = tmp_path / "new" / "plans", TuneResult(), tuning_record("a GPU")
    assert check_plans_target(folder, resume=False, overwrite=False, record=here) == {}
    run_tuning(FakeTuner(), targets(AXES.points()), result)
    save_plans(result.rows.values(), folder, here)
    assert sorted(path.name for path in folder.iterdir()) == ["plans.csv", "plans_device.json"]
    assert set(read_plans(folder / "plans.csv").rows) == set(result.rows.values())
    assert check_plans_target(folder, resume=True, overwrite=False, record=here) == result.rows
    assert check_plans_target(folder, resume=False, overwrite=True, record=here) == {}
    with pytest.raises(UsageError, match="give --resume to add what it lacks"):
        check_plans_target(folder, resume=False, overwrite=False, record=here)
    with pytest.raises(UsageError, match="leave --resume away to start one"):
        check_plans_target(tmp_path, resume=True, overwrite=False, record=here)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="give a folder of your own"):
        check_plans_target(tmp_path / "file", resume=False, overwrite=False, record=here)


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (
            '{"name": "another GPU", "kernel_hash": "x"}',
            "was tuned on another GPU, this GPU is a GPU; give --over",
        ),
        ('{"name": "a GPU", "kernel_hash": "x"}', "was tuned with other kernels, or timed by other code; give --over"),
        ("{}", "was tuned on None"),
        ("[]", "plans_device.json is missing or no record"),
        ("{", "plans_device.json is missing or no record"),
        (None, "nothing says where plans.csv was tuned; give --overwrite to tune all places anew"),
    ],
)
def test_a_table_of_another_gpu_or_other_kernels_is_not_added_to(tmp_path: Path, then: str | None, words: str) -> None:
    here, result = tuning_record("a GPU"), TuneResult()
    run_tuning(FakeTuner(), targets(AXES.points())[:1], result)
    save_plans(result.rows.values(), tmp_path, here)
    device = tmp_path / "plans_device.json"
    device.unlink() if then is None else device.write_text(then)
    with pytest.raises(UsageError, match=words):
        check_plans_target(tmp_path, resume=True, overwrite=False, record=here)
    assert check_plans_target(tmp_path, resume=False, overwrite=True, record=here) == {}
    save_plans(result.rows.values(), tmp_path, here)
    assert check_plans_target(tmp_path, resume=True, overwrite=False, record=here) == result.rows


@pytest.mark.parametrize("name", ["plans.csv", "plans.csv.tmp", "plans_device.json", "plans_device.json.tmp"])
def test_a_place_where_a_table_could_not_be_saved_is_refused_before_it_is_tuned(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"{name} cannot be written"):
        check_plans_target(tmp_path, resume=False, overwrite=True, record=tuning_record("a GPU"))


def test_a_save_that_fails_leaves_no_record_beside_a_table_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = TuneResult()
    run_tuning(FakeTuner(), targets(AXES.points())[:1], result)
    save_plans(result.rows.values(), tmp_path, tuning_record("another GPU"))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tune, "replace_text", full)
    with pytest.raises(UsageError, match="No space left on device"):
        save_plans(result.rows.values(), tmp_path, tuning_record("a GPU"))
    assert [path.name for path in tmp_path.iterdir()] == ["plans.csv"]
