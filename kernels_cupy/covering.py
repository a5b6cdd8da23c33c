"""Which plans the gate and the sanitizers run, of the kernels that have more of them than can be run on everything.

A *variant* is what tells plans apart: source, macros, and the arguments that say how the work is cut
(`VerifyPlan.cut`; how many CTAs are halved does not count). A *trait* is one value of a macro or such an argument,
together with the size of the tree, the log and the type of the state.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kernels_cupy.choice import candidates
from kernels_cupy.lanes_plans import LanesPlan
from kernels_cupy.plans import LONG_PATH, Problem, StreamPlan, VerifyPlan
from kernels_cupy.wide_plans import WidePlan
from lab.methods.base import LayerHeads
from lab.profiles.plans import PlanTable, read_plans, shipped_tables

#: Sources with so many plans -> macros that a trait goes together with.
SIZES = {
    StreamPlan.file: ("GROUPS", "STATE_BF16", "LOG_BLOCKS"),
    LanesPlan.file: ("ROWS", "STATE_BF16", "LOG_BLOCKS"),
    WidePlan.file: ("ROWS", "STATE_BF16", "LOG_BLOCKS"),
}

MachineCode = tuple[str, tuple[tuple[str, int], ...]]
VariantKey = tuple[MachineCode, tuple[int, ...]]


def machine_code(plan: VerifyPlan) -> MachineCode:
    """What tells compiled kernels apart: source and macros."""
    return plan.file, tuple(sorted(plan.macros.items()))


def variant_of(plan: VerifyPlan) -> VariantKey:
    """What tells the launches of two plans apart, beside sizes that are arguments."""
    return machine_code(plan), plan.cut


def traits_of(plan: VerifyPlan) -> list[tuple[object, ...]]:
    """Every macro and argument of the cut, each with the sizes; in an order that is the same in every process."""
    sizes = tuple(plan.macros[name] for name in SIZES[plan.file])
    values = {**plan.macros, **{f"cut {i}": value for i, value in enumerate(plan.cut)}}
    return [(plan.file, *sizes, name, value) for name, value in values.items()]


def shipped_plans(tables: Iterable[PlanTable] | None = None) -> Iterator[VerifyPlan]:
    """The plans that shipped tables name, for the problems of their places: with short paths, and with long ones.

    Also with a log in fp32 where the place's is in bf16: `treewy` has no places of its own where no other method keeps
    such a log, and takes the plans of these.
    """
    for table in map(read_plans, shipped_tables().values()) if tables is None else tables:
        for row in table.rows:
            place = row.place
            dim = place.head_dim
            heads = LayerHeads(place.key_heads, place.value_heads, dim, dim, place.state_dtype)
            paths = (0, LONG_PATH) if place.rows > LONG_PATH else (0,)
            for path, log_bf16 in itertools.product(paths, (True, False) if place.log_bf16 else (False,)):
                problem = Problem(heads, place.rows, place.log_rows, log_bf16, path)
                yield from (plan for plan in candidates(problem) if plan.name == row.plan)


def select(
    problems: Sequence[Problem], at_least: Mapping[str, int], tables: Iterable[PlanTable] | None = None
) -> list[list[VerifyPlan]]:
    """Plans of the sources that `at_least` names, for each problem; none of a source that does not take it.

    For each source these are over all problems the shipped ones, dealt out evenly to problems that have the same
    variants; one for each trait that those lack, in the problem that has the fewest plans; and the least used until
    each problem has `at_least` so many.
    """
    shipped = {variant_of(plan) for plan in shipped_plans(tables)}
    found: list[list[VerifyPlan]] = [[] for _ in problems]
    for file, few in at_least.items():
        offered = [[plan for plan in candidates(problem) if plan.file == file] for problem in problems]
        for plans, chosen in zip(found, _select(offered, few, shipped), strict=True):
            plans += chosen
    return found


def _select(offered: list[list[VerifyPlan]], at_least: int, shipped: set[VariantKey]) -> list[list[VerifyPlan]]:
    """`select` for the plans of one source that are offered to each problem."""
    chosen: list[list[VerifyPlan]] = [[] for _ in offered]
    seen: set[tuple[object, ...]] = set()
    used = Counter[VariantKey]()

    def choose(problem: int, plan: VerifyPlan) -> None:
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
    with_trait: dict[tuple[object, ...], list[tuple[int, VerifyPlan]]] = {}
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


def covering(plans: Sequence[VerifyPlan], tables: Iterable[PlanTable] | None = None) -> list[VerifyPlan]:
    """Some of the plans, source by source: one for each set of macros that ships; where none does, all traits."""
    shipped = dict.fromkeys(map(machine_code, shipped_plans(tables)))
    by_file: dict[str, list[VerifyPlan]] = {}
    for plan in plans:
        by_file.setdefault(plan.file, []).append(plan)
    found: list[VerifyPlan] = []
    for group in by_file.values():
        by_code = {machine_code(plan): plan for plan in reversed(group)}
        found += [by_code[code] for code in shipped if code in by_code] or _of_all_traits(group)
    return found


def _of_all_traits(plans: Sequence[VerifyPlan]) -> list[VerifyPlan]:
    kept: list[VerifyPlan] = []
    missing = {trait for plan in plans for trait in traits_of(plan)}
    while missing:
        best = max(plans, key=lambda plan: len(missing.intersection(traits_of(plan))))
        kept.append(best)
        missing.difference_update(traits_of(best))
    return kept
