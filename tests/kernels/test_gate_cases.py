"""What the gate on the GPU runs: every plan of the shipped grid, enough trees, both kinds of storeall."""

from __future__ import annotations

from collections import Counter

import pytest

from kernels_cupy.closed_form import VerifyPlan
from kernels_cupy.drift import failures as drift_failures
from kernels_cupy.gate import GROUPINGS, SERIAL, Case, cases, failures
from kernels_cupy.sanitize import cases as sanitized_cases
from kernels_cupy.steps import CUDA_METHODS, LOG_METHODS, Shape
from lab.bench.points import default_axes

CASES = list(cases(trees=9))


def grid_plans() -> set[tuple[str, int, VerifyPlan]]:
    """Method, value heads per key head and plan of every closed-form point of a profile on a GPU like the H200."""
    found = set()
    for point in default_axes("cuda", False, CUDA_METHODS).points():
        if point.method in SERIAL:
            continue
        shape = Shape(point.method, point.heads, point.batch, point.tree)
        log_rows = shape.log_limits[0] if point.method in LOG_METHODS else 0
        plan = VerifyPlan.choose(
            point.heads, point.tree.num_rows, log_rows, point.batch, point.method == "replayssm",
            longest_path=point.tree.max_depth + 1,
        )  # fmt: skip
        found.add((point.method, point.heads.value_heads // point.heads.key_heads, plan))
    return found


def test_every_plan_of_the_profile_grid_is_gated() -> None:
    gated = {(case.method, case.value_heads // case.key_heads, case.plan) for case in CASES}
    assert grid_plans() - gated == set()


def test_the_sanitizers_see_every_kernel_and_every_gated_plan() -> None:
    seen = sanitized_cases()
    assert {case.method for case in seen} == set(CUDA_METHODS)
    assert {case.head_dim for case in seen} == {64, 128}
    plans = {case.plan for case in seen if case.plan}
    assert {plan for _, _, plan in grid_plans()} <= plans
    assert {case.plan for case in CASES if case.plan} == plans
    assert any(plan.long_path for plan in plans)


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


def test_an_error_that_is_no_number_is_red() -> None:
    case = Case("treelog", "float32", 1, 2, 128, 4, 4, False, 3)
    assert failures(case, {"state": float("nan")}) == ["state"]
    assert failures(case, {"state": 1.1e-5, "u": 9e-6}) == ["state"]
    assert drift_failures("treelog", [1e-6, float("nan")]) != []


def test_a_loop_whose_error_grows_is_red() -> None:
    assert drift_failures("treelog", [1e-6, 1.2e-6, 1.3e-6]) == []
    assert drift_failures("treelog", [1.9e-7, 4e-7, 8.7e-7, 2.3e-6, 6.1e-6]) == ["grows"], (
        "as the plain recurrence does"
    )
    assert drift_failures("treelog", [1e-6, 1.2e-6, 1.1e-5]) == ["above 1e-05", "grows"]
    assert drift_failures("replayssm", [1e-3, 2e-3]) == [], "its published records are shown, not judged"
