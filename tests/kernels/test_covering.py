"""The stream plans that the gate and the sanitizers run: all that ship, every value of every macro, a few each."""

from __future__ import annotations

from collections import Counter

import pytest

from kernels_cupy.choice import candidates, place_of
from kernels_cupy.covering import covering, select, shipped_plans, traits_of, variant_of
from kernels_cupy.plans import BlockPlan, Problem, StreamPlan, stream_plans
from lab.methods.base import LayerHeads
from lab.profiles.plans import PlanRow, PlanTable


def problem(rows: int, value_heads: int = 4, dtype: str = "float32", log_rows: int = 16) -> Problem:
    return Problem(LayerHeads(2, value_heads, 128, 128, dtype), rows, log_rows)


PROBLEMS = [
    problem(rows, value_heads, dtype, log_rows)
    for dtype in ("float32", "bfloat16")
    for log_rows in (0, 16)
    for value_heads in (2, 4, 6, 8)
    for rows in (1, 2, 7, 16, 40)
]


def named(plans: list[tuple[Problem, StreamPlan]]) -> PlanTable:
    """A table with the plans at a batch of its own each."""
    return PlanTable(
        PlanRow(place_of(where, batch), plan.name, 1.0, plan.name, 1.0) for batch, (where, plan) in enumerate(plans, 1)
    )


def test_every_value_of_every_macro_is_seen_with_every_size() -> None:
    chosen = [plan for plans in select(PROBLEMS, 2, []) for plan in plans]
    wanted = {trait for where in PROBLEMS for plan in stream_plans(where) for trait in traits_of(plan)}
    assert {trait for plan in chosen for trait in traits_of(plan)} == wanted


def test_a_problem_runs_a_few_plans_and_none_twice() -> None:
    for where, plans in zip(PROBLEMS, select(PROBLEMS, 2, []), strict=True):
        assert len(set(plans)) == len(plans)
        assert set(plans) <= set(candidates(where))
        assert 2 <= len(plans) <= 4 if where.rows <= 16 else plans == []


def test_shipped_plans_run_on_some_problem_that_has_them_and_are_dealt_out_evenly() -> None:
    large = Problem(LayerHeads(16, 32, 128, 128, "float32"), 3, 16)
    shipped = stream_plans(large)
    small = [problem(1), problem(2), problem(4), problem(40)]
    chosen = select(small, 0, [named([(large, plan) for plan in shipped])])
    found = Counter(variant_of(plan) for plans in chosen for plan in plans)
    assert set(found) == set(map(variant_of, shipped))
    sizes = [len(plans) for plans in chosen]
    assert sizes[3] == 0
    assert max(sizes[:3]) - min(sizes[:3]) <= 1
    assert [plan.problem for plan in chosen[0]] == [small[0]] * sizes[0], "cut for the problem that runs it"


def test_tables_name_plans_of_both_kernels_for_their_own_heads() -> None:
    where = problem(4)
    plans: list[BlockPlan | StreamPlan] = [BlockPlan(where, 2, 1), *stream_plans(where)[:1]]
    rows = [PlanRow(place_of(where, 8 * i), plan.name, 1.0, "gone", 1.0) for i, plan in enumerate(plans, 1)]
    assert list(shipped_plans([PlanTable(rows)])) == plans
    assert list(shipped_plans([PlanTable([PlanRow(place_of(where, 8), "gone", 1.0, "gone", 1.0)])])) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sanitizers_run_one_plan_for_each_set_of_macros_that_ships(dtype: str) -> None:
    where = problem(4, dtype=dtype)
    plans = stream_plans(where)
    shipped = plans[:5]
    kept = covering(plans, [named([(where, plan) for plan in shipped])])
    assert Counter(variant_of(plan)[:2] for plan in kept) == dict.fromkeys(
        {variant_of(plan)[:2] for plan in shipped}, 1
    )


def test_without_a_table_the_sanitizers_see_every_trait() -> None:
    plans = [plan for where in PROBLEMS for plan in stream_plans(where)]
    kept = covering(plans, [])
    assert {trait for plan in kept for trait in traits_of(plan)} == {trait for p in plans for trait in traits_of(p)}
    assert len(kept) < len(plans) / 2
