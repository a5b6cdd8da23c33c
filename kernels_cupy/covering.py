"""Which plans the gate and the sanitizers run, where `stream.cu` has more of them than can be run on everything.

A *variant* is what tells plans apart: source, macros, and the arguments that say how the work is cut. A *trait* is one
value of a macro or such an argument, together with the size of the tree, the log and the type of the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kernels_cupy.choice import candidates
from kernels_cupy.plans import Problem, StreamPlan, VerifyPlan
from lab.methods.base import LayerHeads
from lab.profiles.plans import PlanTable, read_plans, shipped_tables

#: Macros that a trait of a stream plan goes together with.
SIZES = ("GROUPS", "STATE_BF16", "LOG_BLOCKS")

VariantKey = tuple[object, ...]


def variant_of(plan: VerifyPlan) -> VariantKey:
    """What tells the launches of two plans apart, beside sizes that are arguments."""
    return (plan.file, tuple(sorted(plan.macros.items())), plan.cut(1))


def few_at_a_time(plan: VerifyPlan) -> VerifyPlan:
    """The plan, but with helpers two requests at a time, so that CTAs go on to others as they do in large batches."""
    return replace(plan, depth=2) if isinstance(plan, StreamPlan) and plan.helpers else plan


def traits_of(plan: StreamPlan) -> list[tuple[object, ...]]:
    """Every macro and argument of the cut, each with the sizes; in an order that is the same in every process."""
    sizes = tuple(plan.macros[name] for name in SIZES)
    values = {**plan.macros, **{f"cut {i}": value for i, value in enumerate(plan.cut(1))}}
    return [(*sizes, name, value) for name, value in values.items()]


def shipped_plans(tables: Iterable[PlanTable] | None = None) -> Iterator[VerifyPlan]:
    """The plans that shipped tables name, for the problems of their places."""
    for table in map(read_plans, shipped_tables().values()) if tables is None else tables:
        for row in table.rows:
            place = row.place
            dim = place.head_dim
            heads = LayerHeads(place.key_heads, place.value_heads, dim, dim, place.state_dtype)
            problem = Problem(heads, place.rows, place.log_rows, place.log_bf16)
            yield from (plan for plan in candidates(problem) if plan.name == row.plan)


def select(
    problems: Sequence[Problem], at_least: int, tables: Iterable[PlanTable] | None = None
) -> list[list[StreamPlan]]:
    """Plans of `stream.cu` for each problem, none where it does not run.

    Over all problems these are the shipped ones, dealt out evenly to problems that have the same variants; one for each
    trait that those lack, in the problem that has the fewest plans; and the least used until each has `at_least`.
    """
    offered = [[plan for plan in candidates(problem) if isinstance(plan, StreamPlan)] for problem in problems]
    shipped = {variant_of(plan) for plan in shipped_plans(tables)}
    chosen: list[list[StreamPlan]] = [[] for _ in problems]
    seen: set[tuple[object, ...]] = set()
    used = Counter[VariantKey]()

    def choose(problem: int, plan: StreamPlan) -> None:
        chosen[problem].append(plan)
        seen.update(traits_of(plan))
        used[variant_of(plan)] += 1

    alike: dict[tuple[VariantKey, ...], list[int]] = {}
    for problem, plans in enumerate(offered):
        alike.setdefault(tuple(map(variant_of, plans)), []).append(problem)
    for variants, members in alike.items():
        for turn, variant in enumerate(dict.fromkeys(variant for variant in variants if variant in shipped)):
            member = members[turn % len(members)]
            choose(member, offered[member][variants.index(variant)])
    with_trait: dict[tuple[object, ...], list[tuple[int, StreamPlan]]] = {}
    for problem, plans in enumerate(offered):
        for plan in plans:
            for trait in traits_of(plan):
                with_trait.setdefault(trait, []).append((problem, plan))
    for trait, places in with_trait.items():
        if trait not in seen:
            choose(*min(places, key=lambda place: len(chosen[place[0]])))
    for problem, plans in enumerate(offered):
        while len(chosen[problem]) < at_least and (rest := [plan for plan in plans if plan not in chosen[problem]]):
            choose(problem, min(rest, key=lambda plan: used[variant_of(plan)]))
    return chosen


def covering(plans: Sequence[StreamPlan], tables: Iterable[PlanTable] | None = None) -> list[StreamPlan]:
    """Some of the plans: one for each set of macros that ships; where none does, enough for every trait."""
    by_macros = {variant_of(plan)[:2]: plan for plan in reversed(plans)}
    shipped = dict.fromkeys(variant_of(plan)[:2] for plan in shipped_plans(tables))
    if kept := [by_macros[macros] for macros in shipped if macros in by_macros]:
        return kept
    missing = {trait for plan in plans for trait in traits_of(plan)}
    while missing:
        best = max(plans, key=lambda plan: len(missing.intersection(traits_of(plan))))
        kept.append(best)
        missing.difference_update(traits_of(best))
    return kept
