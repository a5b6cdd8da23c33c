"""Which plan a verification takes: what was the fastest when all were timed on this GPU, or a cost model's guess.

The table of a GPU (`lab.profiles.plans`) is written by `treewy bench --tune`. Without one, or where it has no row of
the size, a cost model chooses among the plans of `verify.cu`, which needs no instruction newer than those of sm_80.
"""

from __future__ import annotations

from functools import lru_cache

from kernels_cupy.compiler import ARCHITECTURES, gpu_name, has_warpgroups, multiprocessors, shared_bytes_per_cta
from kernels_cupy.lanes_plans import lanes_plans
from kernels_cupy.plans import MAX_SHARED_BYTES, BlockPlan, Problem, VerifyPlan, block_plans, stream_plans
from kernels_cupy.wide_plans import wide_plans
from lab.profiles.plans import Place, PlanTable, table_of


def place_of(problem: Problem, batch: int) -> Place:
    """The problem as a table of plans knows it."""
    heads = problem.heads
    return Place(
        heads.key_heads, heads.value_heads, heads.key_dim, heads.state_dtype, problem.log_bf16, batch, problem.rows,
        problem.log_rows,
    )  # fmt: skip


def candidates(problem: Problem, shared_bytes: int = MAX_SHARED_BYTES, warpgroups: bool = True) -> list[VerifyPlan]:
    """Every plan that can run the problem where a CTA has `shared_bytes` of dynamic shared memory.

    `warpgroups`: whether the GPU has the products of `wide.cu`.
    """
    plans: list[VerifyPlan] = [*block_plans(problem), *stream_plans(problem), *lanes_plans(problem)]
    if warpgroups:
        plans += wide_plans(problem)
    return [plan for plan in plans if plan.requested_bytes <= shared_bytes]


@lru_cache(maxsize=4096)
def choose_plan(
    problem: Problem,
    batch: int,
    table: PlanTable | None = None,
    multiprocessors: int = 132,
    shared_bytes: int = MAX_SHARED_BYTES,
    warpgroups: bool = True,
) -> VerifyPlan:
    """The plan of the nearest measured place that this problem can take, else the cost model's.

    The GPU has `multiprocessors`, and `shared_bytes` for one CTA; `warpgroups` as for `candidates`.
    """
    if table is not None and (nearest := table.nearest(place_of(problem, batch))):
        feasible = {plan.name: plan for plan in candidates(problem, shared_bytes, warpgroups)}
        for row in nearest:
            if row.plan in feasible:
                return feasible[row.plan]
    return modelled_plan(problem, batch, multiprocessors, shared_bytes)


def modelled_plan(
    problem: Problem, batch: int, multiprocessors: int = 132, shared_bytes: int = MAX_SHARED_BYTES
) -> BlockPlan:
    """The plan of `verify.cu` that should end first: preparing a CTA costs about as much as three tiles of a warp.

    More value heads per CTA share keys and Grams, fewer fill a small batch's idle multiprocessors.
    """
    plans = block_plans(problem)
    fits = [plan for plan in plans if plan.requested_bytes <= shared_bytes] or plans[-1:]

    def cost(plan: BlockPlan) -> float:
        waves = -(-batch * plan.ctas_per_request // (multiprocessors * plan.ctas_per_multiprocessor))
        tiles_per_warp = plan.heads_per_cta * problem.heads.key_dim / (16 * plan.warps * plan.value_shares)
        return waves * (2.6 + tiles_per_warp)

    return min(fits, key=cost)


def plan_here(problem: Problem, batch: int) -> VerifyPlan:
    """The choice for the current GPU."""
    table = table_of(gpu_name())
    return choose_plan(problem, batch, table, multiprocessors(), shared_bytes_per_cta(), has_warpgroups())


def runs_here(plan: VerifyPlan) -> bool:
    """Whether the current GPU has the shared memory and the instructions of a plan."""
    return plan.requested_bytes <= shared_bytes_per_cta() and (plan.file not in ARCHITECTURES or has_warpgroups())
