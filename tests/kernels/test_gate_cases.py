"""What the gate on the GPU runs: every plan of the shipped grid, enough trees, both kinds of storeall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from kernels_cupy.choice import choose_plan, place_of
from kernels_cupy.covering import MachineCode, machine_code, shipped_plans, traits_of
from kernels_cupy.drift import bf16_failures
from kernels_cupy.drift import failures as drift_failures
from kernels_cupy.gate import GROUPINGS, Case, cases, failures, in_order
from kernels_cupy.gate import problem_of as case_problem
from kernels_cupy.lanes_plans import LanesPlan, lanes_plans
from kernels_cupy.plans import BlockPlan, Problem, StreamPlan, VerifyPlan, stream_plans
from kernels_cupy.sanitize import cases as sanitized_cases
from kernels_cupy.steps import CUDA_METHODS
from kernels_cupy.wide_plans import WidePlan, wide_plans
from lab.bench.cuda_backend import problem_of
from lab.bench.points import default_axes
from lab.data import read_csv
from lab.methods import SERIAL_METHODS
from lab.methods.protocol import STATE_DTYPES
from lab.profiles import plans as plans_module
from lab.profiles.plans import PLANS_FILE, Place, PlanRow, PlanTable, table_of, write_plans

CASES = list(cases(trees=9))


def grid_plans(table: PlanTable | None) -> set[MachineCode]:
    """The launches of every closed-form point of a profile on a GPU like the H200 with this table."""
    return {
        machine_code(choose_plan(problem_of(point), point.batch, table))
        for point in default_axes("cuda", False, CUDA_METHODS).points()
        if point.method not in SERIAL_METHODS
    }


def test_every_plan_of_the_profile_grid_is_gated_but_four_of_replayssm() -> None:
    """But for plans that replayssm, with its bf16 records, takes from other methods' places: the bench gates those."""
    gated = {machine_code(case.plan) for case in CASES if case.plan}
    assert grid_plans(None) - gated == set()
    borrowed = grid_plans(table_of("NVIDIA H200")) - gated
    assert all(("LOG_BF16", 1) in macros for _, macros in borrowed)
    assert len(borrowed) <= 4


def test_the_limits_that_the_page_shows_are_those_that_the_gate_judges_by() -> None:
    rows = read_csv("gate_limits.csv").rows(named=True)
    assert sorted((row["method"], row["state_dtype"]) for row in rows) == sorted(product(CUDA_METHODS, STATE_DTYPES))
    for row in rows:
        case = Case(row["method"], row["state_dtype"], 2, 4, 128, 64, 64, True, 3)  # the longest path has the widest
        assert (row["u"] is None) == (case.method in SERIAL_METHODS)
        for kind in ("u", "output", "state"):
            if (limit := row[kind]) is not None:
                assert failures(case, {kind: limit}) == []
                assert failures(case, {kind: 1.001 * limit}) == [kind]


def test_a_table_brings_its_plans_into_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream, lanes and wide plan that a point can take, each at a place of its own."""
    rows: dict[Place, PlanRow] = {}
    for i, point in enumerate(default_axes("cuda", False, ("treelog", "treewy", "bole", "replayssm")).points()):
        where = problem_of(point)
        plans: list[VerifyPlan] = [*stream_plans(where), *lanes_plans(where), *wide_plans(where)]
        if plans:
            place, name = place_of(problem_of(point), point.batch), plans[i % len(plans)].name
            rows[place] = PlanRow(place, name, 1.0, name, 1.0)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / PLANS_FILE).write_text(write_plans(rows.values()))
    monkeypatch.setattr(plans_module, "SHIPPED", tmp_path)
    found = list(cases(trees=9))
    gated = {machine_code(case.plan) for case in found if case.plan}
    wanted = grid_plans(table_of("NVIDIA H200"))
    assert len({x for x in wanted if x[0] == StreamPlan.file}) > 50
    assert len({x for x in wanted if x[0] == WidePlan.file}) > 50
    assert len({x for x in wanted if x[0] == LanesPlan.file}) > 20
    assert wanted - gated == set()
    sanitized = {
        machine_code(case.plan) for case in sanitized_cases() if case.plan and case.plan.file != BlockPlan.file
    }
    assert sanitized == {machine_code(plan) for plan in shipped_plans()} & gated


@pytest.mark.parametrize(
    ("kind", "offered"), [(StreamPlan, stream_plans), (LanesPlan, lanes_plans), (WidePlan, wide_plans)]
)
def test_the_gate_sees_every_value_of_every_macro(
    kind: type[VerifyPlan], offered: Callable[[Problem], Sequence[VerifyPlan]]
) -> None:
    seen = {trait for case in CASES if isinstance(case.plan, kind) for trait in traits_of(case.plan)}
    problems = [case_problem(case) for case in CASES if case.method not in SERIAL_METHODS]
    assert seen == {trait for where in problems for plan in offered(where) for trait in traits_of(plan)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_trees_of_every_kind_are_gated(dtype: str) -> None:
    wide = [case for case in CASES if isinstance(case.plan, WidePlan) and case.state_dtype == dtype]
    assert {1, 2, 3, 4} <= {case.value_heads // case.key_heads for case in wide}
    assert {9, 17, 40, 64} <= {case.rows for case in wide}
    assert {case.plan.macros["LOG_BLOCKS"] for case in wide if case.plan} == {0, 1}
    assert {case.chain for case in wide} == {True, False}


def test_a_case_runs_a_few_streams_and_every_name_is_one_case() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    streams = Counter(replace(case, plan=None) for case in CASES if isinstance(case.plan, StreamPlan))
    assert set(streams.values()) <= {2, 3, 4, 5}, "5: of a bf16 state with an fp32 log, which treewy and deltalog have"
    lanes = Counter(replace(case, plan=None) for case in CASES if isinstance(case.plan, LanesPlan))
    assert set(lanes.values()) <= {2, 3, 4}
    wide = Counter(replace(case, plan=None) for case in CASES if isinstance(case.plan, WidePlan))
    assert max(wide.values()) <= 8
    assert sum(plans > 2 for plans in wide.values()) < len(wide) / 10, "more where the table names plans of few sizes"
    assert list(cases(trees=9)) == CASES, "the same in every process"


def test_the_sanitizers_see_every_kernel_and_every_gated_plan() -> None:
    seen = sanitized_cases()
    assert {case.method for case in seen} == set(CUDA_METHODS)
    assert {case.head_dim for case in seen} == {64, 128}
    plans = {machine_code(case.plan) for case in seen if isinstance(case.plan, BlockPlan)}
    assert {machine_code(case.plan) for case in CASES if isinstance(case.plan, BlockPlan)} == plans
    assert any(case.plan.l_parts == 3 for case in seen if isinstance(case.plan, BlockPlan))
    assert any(isinstance(case.plan, StreamPlan) for case in seen)
    assert any(isinstance(case.plan, LanesPlan) for case in seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", CUDA_METHODS)
def test_each_head_grouping_meets_200_trees_or_more(method: str, dtype: str) -> None:
    trees: Counter[tuple[int, int]] = Counter()
    for case in CASES:
        if (case.method, case.state_dtype) == (method, dtype):
            trees[case.key_heads, case.value_heads] += case.trees
    assert min(trees[pair] for pair in GROUPINGS) >= 200


def test_storeall_runs_chains_and_trees_of_odd_and_even_sizes() -> None:
    kinds = {(case.chain, case.rows % 2) for case in CASES if case.method == "storeall"}
    assert kinds == {(True, 0), (True, 1), (False, 0), (False, 1)}


def test_large_cases_run_first_and_records_keep_the_order_of_the_cases() -> None:
    asked: list[Case] = []

    def run_all(found: list[Case]) -> list[dict[str, str]]:
        asked.extend(found)
        return [{"name": case.name} for case in found]

    assert [entry["name"] for entry in in_order(run_all, CASES)] == [case.name for case in CASES]
    assert asked[0].rows == 64
    assert asked[-1].rows == 1
    assert Counter(asked) == Counter(CASES)


def test_an_error_that_is_no_number_is_red() -> None:
    case = Case("treelog", "float32", 1, 2, 128, 4, 4, False, 3)
    assert failures(case, {"state": float("nan")}) == ["state"]
    assert failures(case, {"state": 1.1e-5, "u": 9e-6}) == ["state"]
    assert drift_failures("treelog", [1e-6, float("nan")]) != []


def test_bf16_records_may_be_off_by_their_rounding_and_no_more() -> None:
    """u by 2^-8; states by as much per row of the path, added as independent errors, and 2e-2 at most."""
    for method, path, limit in (
        ("treelog", 1, 4e-3), ("treelog", 4, 8e-3), ("replayssm", 9, 1.2e-2), ("treelog", 64, 2e-2),
        ("treewy", 64, 4e-3),
    ):  # fmt: skip
        case = Case(method, "bfloat16", 1, 2, 128, 64, path, False, 3)
        assert failures(case, {"state": 0.99 * limit}) == []
        assert failures(case, {"state": 1.01 * limit}) == ["state"]
    assert failures(Case("treelog", "bfloat16", 1, 2, 128, 7, 7, False, 3), {"u": 3.9e-3}) == []
    assert failures(Case("treewy", "bfloat16", 1, 2, 128, 7, 7, False, 3), {"u": 3.9e-3}) == ["u"]
    assert failures(Case("treelog", "float32", 1, 2, 128, 7, 7, False, 3), {"u": 3.9e-3}) == ["u"]


def test_a_bf16_loop_worse_than_storeall_is_red() -> None:
    assert bf16_failures("treelog", [1e-3, 2e-3], [3e-3, 3e-3]) == []
    assert bf16_failures("treelog", [1e-3, 4e-3], [3e-3, 3e-3]) == ["above storeall"]
    assert bf16_failures("replayssm", [1e-3, 4e-3], [3e-3, 3e-3]) == []
    assert bf16_failures("treewy", [1e-3, float("nan")], [3e-3, 3e-3]) == ["not finite"]


def test_a_loop_whose_error_grows_is_red() -> None:
    flat, growing = [1e-6, 1.2e-6, 1.3e-6], [1.9e-7, 4e-7, 8.7e-7, 2.3e-6, 6.1e-6]
    assert drift_failures("treelog", flat) == []
    assert drift_failures("treelog", growing) == ["grows"], "as the plain recurrence does"
    assert drift_failures("treelog", [2.6e-7, 3.7e-7, 5.5e-7, 7.8e-7, 1.3e-6]) == [], "rounding to nearest"
    assert drift_failures("treelog", [1e-7, 3e-7, 1e-6, 3e-6, 9e-6]) == ["grows"], "with the steps: to one side"
    assert drift_failures("treelog", [1e-6, 1.2e-6, 1.1e-5]) == ["above 1e-05", "grows"]
    assert drift_failures("replayssm", [1e-3, 2e-3]) == [], "its published records are shown, not judged"
