"""The reasons behind the answer in words: where storeall falls behind, why, where requests wait, what trees do.

Each function takes a group of cells and returns plain sentences; nothing is claimed that the cells do not say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reports.accuracy import CLEAR_TEXT, TIE, TIE_TEXT
from reports.answers import BASELINE, Best, Mark, all_best, headline, knees, largest_gain
from reports.data import Cell, Group
from reports.lead import point, with_tree
from reports.text import (
    counted,
    latencies,
    listing,
    load_phrase,
    number,
    percent,
    plain,
    quotient,
    ratio,
    significant,
)


def findings(group: Group, modelled: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The reasons behind the answer as (heading, text), most important first; empty ones are left out.

    `modelled` names the parts of a step whose cost is modelled, not measured.
    """
    points = all_best(group)
    head = headline(group, points)
    explained = head if head is not None and head.beats_baseline else largest_gain(points)
    found: list[tuple[str, str]] = []
    if len(group.methods) > 1 and len(group.loads) > 1:
        found.append(("By load", _by_load(group, points)))
    if explained is not None and explained.baseline is not None:
        found.append(("Why", _why(group, explained, explained.baseline)))
        found.append(("Latency", _latency(group, explained, explained.baseline)))
    found.append(("Knee", _knee(group)))
    found.append(("Tree width", _tree_width(group, head)))
    found.append(("Memory", _memory(group)))
    found.append(("Not finished", _dead(group)))
    found.append(("Step costs", _step_costs(group, modelled)))
    return [(heading, text) for heading, text in found if text]


def _by_load(group: Group, points: Sequence[Best]) -> str:
    """One line per memory budget: from which load on storeall is clearly behind."""
    if not any(best.baseline for best in points):
        return ""
    lines = []
    for budget in group.budgets:
        mine = [best for best in points if best.budget == budget]
        clear = [best.load for best in mine if best.clear]
        if not clear:
            text = "at no load"
        elif all(best.clear for best in mine if best.load >= clear[0]):
            text = load_phrase(group.load_field, clear[0])
            text = f"from {text} on" if clear[0] < mine[-1].load else f"at {text}"
        else:
            text = f"at a load of {listing([plain(load) for load in clear])} only"
        lines.append(f"{plain(budget)}: {text}")
    if group.open_loop:
        opening = f"{BASELINE} does not keep up, or its mean TPOT is more than {CLEAR_TEXT} longer than the best"
    else:
        opening = f"{BASELINE} yields less than the best by more than {CLEAR_TEXT}"
    return "\n".join([f"{opening}, by {group.budget_name}:", *lines])


def _why(group: Group, best: Best, base: Cell) -> str:
    """Limit, batch, step and acceptance at one point, against storeall's best tree there."""
    top = best.top
    parts = [_fallen(base) if group.open_loop else _batch(top, base)]
    step = quotient(top.mean_step_ms, base.mean_step_ms)
    if math.isfinite(step):
        more = quotient(top.mean_running, base.mean_running) > 1 + TIE and not group.open_loop
        length = "longer" if step > 1 + TIE else "shorter" if step < 1 - TIE else "as long"
        cause = ", for it carries more requests" if more and step > 1 + TIE else ""
        steps = f"{number(top.mean_step_ms, 1)} ms against {number(base.mean_step_ms, 1)} ms"
        parts.append(f"The mean step of {top.state_method} is {length}{cause}: {steps}.")
    if abs(quotient(top.step_tokens, base.step_tokens) - 1) > TIE:
        parts.append(
            f"A step yields {number(top.step_tokens, 2)} tokens per request{with_tree(top)}, "
            f"{number(base.step_tokens, 2)}{with_tree(base)} of {BASELINE}."
        )
    told = " ".join(part for part in parts if part)
    return f"At {point(group, best)}, {told[0].lower()}{told[1:]}" if told else ""


def _batch(top: Cell, base: Cell) -> str:
    """Closed loop: how many requests run at once, and whether memory is the reason."""
    batch = quotient(top.mean_running, base.mean_running)
    if not batch > 1 + TIE:
        return (
            f"memory is not the reason, {significant(top.mean_running)} requests run at once on average, with "
            f"{BASELINE} {significant(base.mean_running)}."
        )
    cause = "runs fewer requests at once" if base.limit == "none" else f"is limited by {base.limit}"
    held = [quotient(cell.peak_kv_gib, cell.peak_running) for cell in (base, top)]
    holds = ""
    if all(math.isfinite(value) for value in held):
        holds = (
            f" A running request of {BASELINE} holds {significant(held[0], 2)} GiB at the peak, with "
            f"{top.state_method} {significant(held[1], 2)} GiB, records included."
        )
    return (
        f"{BASELINE} {cause}: {significant(base.mean_running)} requests run at once on average, with "
        f"{top.state_method} {significant(top.mean_running)} ({ratio(batch)}).{holds}"
    )


def _fallen(base: Cell) -> str:
    """Open loop: what keeps storeall from keeping up."""
    if not base.saturated:
        return ""
    return f"{BASELINE} does not keep up; what keeps its requests waiting is {base.limit}."


def _latency(group: Group, best: Best, base: Cell) -> str:
    if best.by_latency and base.saturated:
        return ""  # the queue of a saturated service grows with the run: its latencies say nothing
    top = best.top
    first = latencies(top.p99_ttft_ms, base.p99_ttft_ms)
    later = latencies(top.mean_tpot_ms, base.mean_tpot_ms)
    return (
        f"At the same point p99 TTFT is {first[0]} with {top.state_method}, {first[1]} with {BASELINE}. "
        f"Mean TPOT is {later[0]} and {later[1]}."
    )


def _knee(group: Group) -> str:
    """What every method does at the largest memory budget with the narrowest tree; methods that agree in one clause."""
    if group.load_field == "none":
        return ""
    budget, clauses = group.budgets[0], dict[str, list[str]]()
    for knee in knees(group):
        if knee.tree in (group.trees[0], *group.undrafted) and budget in knee.marks:
            clauses.setdefault(_reach(group, knee.marks[budget]), []).append(knee.state_method)
    if not clauses:
        return ""
    told = "; ".join(f"{listing(names)} {text}" for text, names in clauses.items())
    what = "Highest rate that was run and is sustained" if group.open_loop else "Load at which requests begin to wait"
    return f"{what}, tree {group.trees[0]}, {group.budget_name} {plain(budget)}: {told}."


def _reach(group: Group, mark: Mark) -> str:
    """`256 (memory)`, `not up to 256`; open loop `12 (then memory)`, `all`."""
    if not group.open_loop:
        return f"not up to {plain(mark.highest)}" if mark.load is None else f"{plain(mark.load)} ({mark.limit})"
    if mark.load is None:
        return f"none, not even {plain(mark.lowest)} ({mark.limit})"
    return f"{plain(mark.load)}, the highest run" if mark.limit == "none" else f"{plain(mark.load)} (then {mark.limit})"


def _tree_width(group: Group, where: Best | None) -> str:
    """What wider trees do to the best method that was run with several, at the headline's point."""
    if where is None:
        return ""
    by_method: dict[str, list[Cell]] = {}
    for cell in group.at(where.budget, where.load):
        if cell.usable and cell.num_rows > 1:
            by_method.setdefault(cell.state_method, []).append(cell)
    several = [cells for cells in by_method.values() if len(cells) > 1]
    if not several:
        return ""
    fastest = min(several, key=lambda each: min(_cost(group, cell) for cell in each))
    cells = sorted(fastest, key=lambda cell: cell.num_rows)
    shown = "; ".join(f"tree {cell.tree} {_speed(group, cell)}" for cell in cells)
    wide, all_points = _wide_tree_points(group, cells[0].state_method, cells[0].tree)
    verdict = "at no point" if wide == 0 else f"at {wide} of {counted(all_points, 'point')}"
    gain = f"{TIE_TEXT} {'shorter mean TPOT' if group.open_loop else 'more throughput'}"
    return (
        f"{cells[0].state_method} at {point(group, where)}: {shown}. A tree wider than {cells[0].tree} gives it more "
        f"than {gain} {verdict} of load and memory budget."
    )


def _speed(group: Group, cell: Cell) -> str:
    tokens = f"{number(cell.step_tokens, 2)} tokens a step"
    if group.open_loop:
        return f"{'does not keep up' if cell.saturated else latencies(cell.mean_tpot_ms)[0]} at {tokens}"
    return f"{significant(cell.output_throughput)} tokens/s at {tokens}"


def _cost(group: Group, cell: Cell) -> float:
    """What the ranking keeps low: mean TPOT of what keeps up, or the time per token of the whole service."""
    if not group.open_loop:
        return 1 / cell.output_throughput
    return math.inf if cell.saturated or not math.isfinite(cell.mean_tpot_ms) else cell.mean_tpot_ms


def _wide_tree_points(group: Group, method: str, narrow: str) -> tuple[int, int]:
    """Points at which some wider tree beats the narrow one by more than a tie, and all points with both.

    In an open loop points that no tree sustains are left out.
    """
    wins = total = 0
    for budget in group.budgets:
        for load in group.loads:
            mine = [c for c in group.at(budget, load) if c.state_method == method and c.usable]
            base = [_cost(group, c) for c in mine if c.tree == narrow]
            wider = [_cost(group, c) for c in mine if c.tree != narrow]
            if base and wider and math.isfinite(min(*base, *wider)):
                total += 1
                wins += base[0] > (1 + TIE) * min(wider)
    return wins, total


def _memory(group: Group) -> str:
    """Peak blocks of storeall over those of other methods where storeall has memory to spare, and their records."""
    spans: dict[str, list[float]] = {}
    records: dict[str, float] = {}
    for cell in group.cells:
        base = group.find(BASELINE, cell.tree, cell.gpu_memory_utilization, group.load(cell))
        if base is None or base.memory_bound or cell.state_method == BASELINE or cell.tree != group.trees[0]:
            continue
        saved = quotient(base.blocks_gib, cell.blocks_gib)
        if math.isfinite(saved):
            spans.setdefault(cell.state_method, []).append(saved)
            records[cell.state_method] = cell.reserved_records_gib
    texts: dict[str, list[str]] = {}
    for method in group.methods:
        if values := spans.get(method):
            low, high = ratio(min(values)), ratio(max(values))
            texts.setdefault(low if low == high else f"{low} to {high}", []).append(method)
    if not texts:
        return ""
    told = "; ".join(f"{listing(methods)} {text}" for text, methods in texts.items())
    reserved = [f"{method} {significant(records[method], 2)} GiB" for method in records if records[method] > 0]
    beside = f" Beside the pool records are reserved whatever runs: {listing(reserved)}." if reserved else ""
    return (
        f"Where {BASELINE} has memory to spare with tree {group.trees[0]}, it holds this many times the blocks of the "
        f"method at the same load: {told}. There the saving lets no more requests run.{beside}"
    )


def _dead(group: Group) -> str:
    dead = sum(1 for cell in group.cells if not cell.usable)
    return f"{counted(dead, 'cell')} finished no request and {'is' if dead == 1 else 'are'} not ranked." if dead else ""


def _step_costs(group: Group, modelled: Sequence[str]) -> str:
    parts = []
    if modelled:
        parts.append(f"Modelled, not timed: {listing(list(modelled))}.")
    elif any(cell.modelled for cell in group.cells):
        parts.append("Some step costs, such as those of the recurrent state, are modelled, not timed.")
    beyond = [cell for cell in group.cells if cell.extrapolated]
    if beyond:
        worst = max(cell.extrapolated_steps for cell in beyond)
        verb = "holds" if len(beyond) == 1 else "hold"
        parts.append(
            f"{counted(len(beyond), 'cell')} of {number(len(group.cells))} {verb} steps outside the measured tables "
            f"(up to {percent(worst)} of a cell's steps)."
        )
    else:
        parts.append("No step lies outside the measured tables.")
    return " ".join(parts)
