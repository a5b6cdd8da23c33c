"""Which plan is chosen: the measured one, the nearest one that can run, or the cost model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_cupy import choice
from kernels_cupy.choice import candidates, choose_plan, modelled_plan, place_of, runs_here
from kernels_cupy.plans import MAX_SHARED_BYTES, BlockPlan, Problem
from kernels_cupy.wide_plans import wide_plans
from lab.methods.base import LayerHeads
from lab.profiles.plans import PLAN_NAME, PlanRow, PlanTable

SMALL = Problem(LayerHeads(16, 32, 128, 128, "float32"), 4, 16)
LARGE = replace(SMALL, rows=64, log_rows=64)


def table(*rows: tuple[Problem, int, str]) -> PlanTable:
    return PlanTable(PlanRow(place_of(problem, batch), name, 1.0, name, 1.0) for problem, batch, name in rows)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    key_heads, group = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    dim, dtype = draw(st.sampled_from([64, 128])), draw(st.sampled_from(["float32", "bfloat16"]))
    heads = LayerHeads(key_heads, key_heads * group, dim, dim, dtype)
    return Problem(heads, draw(st.integers(1, 64)), draw(st.integers(0, 64)), draw(st.booleans()))


@given(st.data(), problems(), st.integers(1, 600))
def test_every_measured_plan_is_chosen_at_its_place(data: st.DataObject, problem: Problem, batch: int) -> None:
    plans = candidates(problem)
    assert len({plan.name for plan in plans}) == len(plans), "a name is one plan"
    assert [plan.name for plan in plans if not PLAN_NAME.fullmatch(plan.name)] == [], "add the kernel to PLAN_KERNELS"
    if plans:
        plan = data.draw(st.sampled_from(plans))
        assert choose_plan(problem, batch, table((problem, batch, plan.name))) == plan


@given(problems(), problems(), st.integers(1, 600), st.sampled_from([64, 100, 163, 227]))
def test_a_choice_is_a_candidate_that_fits_wherever_one_does(
    problem: Problem, measured: Problem, batch: int, shared_kib: int
) -> None:
    fitting = candidates(problem, shared_kib * 1024)
    for plan in candidates(measured)[-1:]:
        chosen = choose_plan(problem, batch, table((measured, 64, plan.name)), shared_bytes=shared_kib * 1024)
        assert chosen in fitting or (not any(isinstance(each, BlockPlan) for each in fitting))


def test_the_nearest_place_lends_its_plan() -> None:
    rows = table((SMALL, 2, "block-h1-s1"), (SMALL, 256, "stream-w4-t4-s1-r12"))
    assert choose_plan(SMALL, 3, rows).name == "block-h1-s1"
    assert choose_plan(SMALL, 100, rows).name == "stream-w4-t4-s1-r12"


def test_places_whose_plan_cannot_run_here_are_passed_over() -> None:
    three = replace(SMALL, heads=LayerHeads(16, 48, 128, 128, "float32"))
    rows = table((three, 32, "block-h3-s1"), (three, 64, "no-such-plan"), (SMALL, 512, "stream-w4-t4-s1-r12"))
    assert choose_plan(SMALL, 48, rows).name == "stream-w4-t4-s1-r12"
    assert choose_plan(SMALL, 48, rows, shared_bytes=50_000).name.startswith("block"), "it needs more shared memory"


def test_products_of_warpgroups_are_chosen_where_the_gpu_has_them() -> None:
    wide = replace(SMALL, rows=32)
    rows = table((wide, 64, "wide-h1-s1-r2"))
    assert choose_plan(wide, 64, rows).name == "wide-h1-s1-r2"
    assert choose_plan(wide, 64, rows, warpgroups=False) == modelled_plan(wide, 64)
    assert not any(plan.file == "wide.cu" for plan in candidates(wide, warpgroups=False))


def test_a_gpu_runs_the_plans_that_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, block = wide_plans(replace(SMALL, rows=32))[0], modelled_plan(SMALL, 8)
    for shared_bytes, warpgroups, expected in (
        (MAX_SHARED_BYTES, True, (True, True)),
        (MAX_SHARED_BYTES, False, (False, True)),
        (block.shared_bytes, True, (False, True)),
        (1024, True, (False, False)),
    ):
        monkeypatch.setattr(choice, "shared_bytes_per_cta", lambda found=shared_bytes: found)
        monkeypatch.setattr(choice, "has_warpgroups", lambda found=warpgroups: found)
        assert (runs_here(wide), runs_here(block)) == expected


@pytest.mark.parametrize("batch", [1, 8, 64, 512])
def test_without_rows_of_the_size_the_cost_model_chooses_a_block_plan(batch: int) -> None:
    rows = table((SMALL, 32, "stream-w4-t4-s1-r12"))
    for other in (LARGE, replace(SMALL, rows=5), replace(SMALL, log_rows=0)):
        assert choose_plan(other, batch, rows) == choose_plan(other, batch) == modelled_plan(other, batch)
    assert isinstance(choose_plan(SMALL, batch), BlockPlan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value_heads", [2, 4, 6, 8, 16])
def test_modelled_plans_fit_the_multiprocessor(value_heads: int, dtype: str) -> None:
    heads = LayerHeads(2, value_heads, 128, 128, dtype)
    for rows in (1, 8, 16, 40, 64):
        for batch in (1, 32, 512):
            plan = modelled_plan(Problem(heads, rows, 16), batch)
            assert plan.shared_bytes <= MAX_SHARED_BYTES
            assert (value_heads // 2) % plan.heads_per_cta == 0
            assert plan.ctas_per_request >= 2
