"""Plans of kernels with many that the gate and the sanitizers run: all that ship, every trait, a few in each case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kernels_cupy.choice import candidates, place_of
from kernels_cupy.covering import covering, machine_code, select, shipped_plans, traits_of, variant_of
from kernels_cupy.lanes_plans import LanesPlan, lanes_plans
from kernels_cupy.plans import BlockPlan, Problem, StreamPlan, VerifyPlan, stream_plans
from kernels_cupy.wide_plans import WidePlan, wide_plans
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
AT_LEAST = {"stream.cu": 2, "lanes.cu": 2, "wide.cu": 1}


def offered(where: Problem) -> list[VerifyPlan]:
    return [*stream_plans(where), *lanes_plans(where), *wide_plans(where)]


def named(plans: Sequence[tuple[Problem, VerifyPlan]]) -> PlanTable:
    """A table with the plans at a batch of its own each."""
    return PlanTable(
        PlanRow(place_of(where, batch), plan.name, 1.0, plan.name, 1.0) for batch, (where, plan) in enumerate(plans, 1)
    )


def test_every_value_of_every_macro_is_seen_with_every_size() -> None:
    chosen = [plan for plans in select(PROBLEMS, AT_LEAST, []) for plan in plans]
    wanted = {trait for where in PROBLEMS for plan in offered(where) for trait in traits_of(plan)}
    assert {trait for plan in chosen for trait in traits_of(plan)} == wanted


def test_a_problem_runs_a_few_plans_and_none_twice() -> None:
    for where, plans in zip(PROBLEMS, select(PROBLEMS, AT_LEAST, []), strict=True):
        assert len(set(plans)) == len(plans)
        assert set(plans) <= set(candidates(where))
        count = Counter(plan.file for plan in plans)
        assert 2 <= count[StreamPlan.file] <= 4 if where.rows <= 16 else not count[StreamPlan.file]
        assert 2 <= count[LanesPlan.file] <= 4 if where.rows <= 4 else not count[LanesPlan.file]
        assert 1 <= count[WidePlan.file] <= 6 if where.rows >= 9 else not count[WidePlan.file]


def test_shipped_plans_run_on_some_problem_that_has_them_and_are_dealt_out_evenly() -> None:
    large = Problem(LayerHeads(16, 32, 128, 128, "float32"), 3, 16)
    shipped = stream_plans(large)
    small = [problem(1), problem(2), problem(4), problem(40)]
    chosen = select(small, {StreamPlan.file: 0}, [named([(large, plan) for plan in shipped])])
    found = Counter(variant_of(plan) for plans in chosen for plan in plans)
    assert set(found) == set(map(variant_of, shipped))
    sizes = [len(plans) for plans in chosen]
    assert sizes[3] == 0
    assert max(sizes[:3]) - min(sizes[:3]) <= 1
    assert [plan.problem for plan in chosen[0]] == [small[0]] * sizes[0], "cut for the problem that runs it"


def test_a_shipped_wide_plan_runs_on_short_and_on_long_paths() -> None:
    large = replace(problem(64, log_rows=0), longest_path=6)
    shipped = wide_plans(large)
    problems = [large, replace(large, longest_path=64), replace(large, rows=50, longest_path=50)]
    found = select(problems, {WidePlan.file: 0}, [named([(large, plan) for plan in shipped])])
    parts = [{plan.macros["L_PARTS"] for plan in plans} for plans in found]
    assert parts == [{2}, {3}, {3}]
    wanted = {variant_of(plan) for where in problems for plan in wide_plans(where)}
    assert {variant_of(plan) for plans in found for plan in plans} == wanted


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
    assert Counter(machine_code(plan) for plan in kept) == dict.fromkeys({machine_code(plan) for plan in shipped}, 1)


def test_without_a_table_the_sanitizers_see_every_trait() -> None:
    for ways in (stream_plans, lanes_plans, wide_plans, offered):
        plans = [p for where in PROBLEMS for p in ways(where)]
        kept = covering(plans, [])
        assert {trait for plan in kept for trait in traits_of(plan)} == {trait for p in plans for trait in traits_of(p)}
        assert len(kept) < len(plans) / 2


def test_a_table_of_one_kernel_leaves_all_traits_of_the_other_to_the_sanitizers() -> None:
    where = problem(16)
    streams = stream_plans(where)
    kept = covering(offered(where), [named([(where, plan) for plan in streams[:1]])])
    assert [plan for plan in kept if isinstance(plan, StreamPlan)] == streams[:1]
    wanted = {trait for plan in wide_plans(where) for trait in traits_of(plan)}
    assert {trait for plan in kept if isinstance(plan, WidePlan) for trait in traits_of(plan)} == wanted
