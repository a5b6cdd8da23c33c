"""The answers of a report in words: what is best at which load, why, where the knee lies, how sure that is.

Each function takes a group of cells and returns plain sentences; nothing is claimed that the cells do not say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reports.answers import BASELINE, TIE, Best, all_best, knees, shares
from reports.data import Cell, Group
from reports.text import (
    counted,
    listing,
    load_phrase,
    milliseconds,
    number,
    percent,
    plain,
    quotient,
    ratio,
    significant,
)

BUDGET = "gpu_memory_utilization"


def lead(group: Group) -> str:
    """The answer in a few sentences."""
    points = all_best(group)
    if not points:
        return "No cell finished a request: there is nothing to compare."
    if len(group.methods) == 1:
        return _one_method(group, points)
    if not any(best.baseline for best in points):
        return _without_baseline(points)
    gains = [best for best in points if best.beats_baseline]
    if not gains:
        return (
            f"Output throughput does not decide: no method is ahead of {BASELINE} by more than 2 % at any of the "
            f"{counted(len(points), 'point')} of load and memory budget. Choose by memory and latency."
        )
    return " ".join(text for text in (_peak_gain(group, gains), _gain_begins(group, points)) if text)


def findings(group: Group, modelled: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The reasons behind the answer as (heading, text), most important first; empty ones are left out.

    `modelled` names the parts of a step whose cost is modelled, not measured.
    """
    points = all_best(group)
    compared = [best for best in points if best.beats_baseline]
    peak = max(compared, key=lambda best: best.gain, default=None)
    found: list[tuple[str, str]] = []
    if len(group.methods) > 1 and len(group.loads) > 1:
        found.append(("By load", _by_load(group, points)))
    if peak is not None and peak.baseline is not None:
        found.append(("Why", _why(group, peak, peak.baseline)))
        found.append(("Latency", _latency(peak.top, peak.baseline)))
    found.append(("Knee", _knee(group, points)))
    found.append(("Tree width", _tree_width(group, points, peak)))
    found.append(("Memory", _memory(group)))
    found.append(("Rejected", _rejected(group)))
    found.append(("Confidence", _confidence(group, modelled)))
    return [(heading, text) for heading, text in found if text]


def _one_method(group: Group, points: list[Best]) -> str:
    best = max(points, key=lambda each: each.top.output_throughput)
    text = (
        f"{best.top.state_method}{_with_tree(best.top)} reaches {significant(best.top.output_throughput)} output "
        f"tokens/s at {_point(group, best)}."
    )
    if len(group.cells) == 1:
        return f"One cell was run: {text} There is nothing to compare it with."
    return f"Only {best.top.state_method} was run: {text}"


def _without_baseline(points: list[Best]) -> str:
    leader, count = shares(points)[0]
    where = "all" if count == len(points) else f"{count} of"
    return (
        f"{leader} is best, or within 2 % of the best, at {where} {counted(len(points), 'point')} of load and "
        f"memory budget. {BASELINE} was not run, so there are no ratios to it."
    )


def _peak_gain(group: Group, gains: list[Best]) -> str:
    """The largest gain, and who leads wherever storeall is beaten."""
    peak = max(gains, key=lambda best: best.gain)
    tied = [cell.state_method for cell in peak.winners[1:]]
    text = (
        f"{peak.top.state_method}{_with_tree(peak.top)} gains most: {ratio(peak.gain)} the output tokens/s of "
        f"{BASELINE} at {_point(group, peak)}{f' ({listing(tied)} within 2 %)' if tied else ''}."
    )
    if len(gains) > 1:
        leader, count = shares(gains)[0]
        name = "It" if leader == peak.top.state_method else leader
        where = "all" if count == len(gains) else f"{count} of the"
        text += (
            f" {name} is best, or within 2 % of the best, at {where} {len(gains)} points of load and memory budget "
            f"where {BASELINE} is more than 2 % behind."
        )
    return text


def _gain_begins(group: Group, points: list[Best]) -> str:
    """From which load on storeall is beaten; memory budgets with the same load are named together."""
    if group.load_field == "none":
        return ""
    starts: dict[str, list[str]] = {}
    for budget in group.budgets:
        mine = [best for best in points if best.budget == budget]
        ahead = [best.load for best in mine if best.beats_baseline]
        steady = bool(ahead) and all(best.beats_baseline for best in mine if best.load >= ahead[0])
        text = "at no load"
        if ahead:
            first = load_phrase(group.load_field, ahead[0])
            loads = listing([plain(load) for load in ahead])
            text = f"from {first} on" if steady else f"at a load of {loads} only"
        starts.setdefault(text, []).append(plain(budget))
    clauses = [
        f"{text} at {BUDGET + ' ' if position == 0 else ''}{listing(budgets)}"
        for position, (text, budgets) in enumerate(starts.items())
    ]
    quiet = sum(1 for best in points if not best.beats_baseline)
    tail = (
        f" At the other {counted(quiet, 'point')} no method is ahead of {BASELINE} by more than 2 %." if quiet else ""
    )
    return f"That is {', '.join(clauses)}.{tail}"


def _by_load(group: Group, points: list[Best]) -> str:
    """One line per memory budget: ranges of load with the same best configuration."""
    lines = []
    for budget in group.budgets:
        ranges: list[list[Best]] = []
        for best in points:
            if best.budget != budget:
                continue
            if ranges and _verdict(ranges[-1][-1]) == _verdict(best):
                ranges[-1].append(best)
            else:
                ranges.append([best])
        if ranges:
            lines.append(f"{BUDGET} {plain(budget)}, load {'; '.join(_range_text(part) for part in ranges)}.")
    return "\n".join(lines)


def _verdict(best: Best) -> tuple[str, str] | None:
    """What a range of loads has in common: method and tree, or None where storeall is as good."""
    return None if best.has(BASELINE) else (best.top.state_method, best.top.tree)


def _range_text(part: list[Best]) -> str:
    """`64 to 256: treelog with tree 1,1,1, 1.10x to 1.60x (treewy within 2 % at 1 of 3 loads)`."""
    loads = plain(part[0].load) if len(part) == 1 else f"{plain(part[0].load)} to {plain(part[-1].load)}"
    if _verdict(part[0]) is None:
        others = _tied_methods(part, BASELINE)
        return f"{loads}: {BASELINE}, {'tied with ' + listing(others) if others else 'ahead of the others'}"
    top = part[0].top
    gains = [best.gain for best in part if math.isfinite(best.gain)]
    text = f"{loads}: {top.state_method}{_with_tree(top)}"
    if gains:
        low, high = ratio(min(gains)), ratio(max(gains))
        text += f", {low}" if low == high else f", {low} to {high}"
    others = _tied_methods(part, top.state_method)
    return f"{text} ({listing(others)} within 2 %)" if others else text


def _tied_methods(part: list[Best], leader: str) -> list[str]:
    """Methods tied with the leader at all loads of a range, or at how many."""
    counts = {name: count for name, count in shares(part) if name != leader}
    return [
        name if count == len(part) else f"{name} at {count} of {counted(len(part), 'load')}"
        for name, count in counts.items()
    ]


def _why(group: Group, peak: Best, base: Cell) -> str:
    """Batch, step and acceptance at the point of the largest gain, against storeall's best tree there."""
    top = peak.top
    batch = quotient(top.mean_running, base.mean_running)
    step = quotient(top.mean_step_ms, base.mean_step_ms)
    accepted = quotient(top.acceptance_length, base.acceptance_length)
    more = batch > 1 + TIE
    parts = [f"At {_point(group, peak)},"]
    if more:
        parts.append(f"{BASELINE} {'is memory bound' if base.memory_bound else 'runs fewer requests at once'}:")
        held = [quotient(cell.peak_kv_gib, cell.peak_running) for cell in (base, top)]
        if all(math.isfinite(value) for value in held):
            parts.append(
                f"at the peak a running request holds {significant(held[0], 2)} GiB, with {top.state_method} "
                f"{significant(held[1], 2)} GiB, so"
            )
        parts.append(
            f"{significant(top.mean_running)} requests run at once on average instead of "
            f"{significant(base.mean_running)} ({ratio(batch)})."
        )
    else:
        parts.append(
            f"memory is not the reason: {significant(top.mean_running)} requests run at once on average, with "
            f"{BASELINE} {significant(base.mean_running)}."
        )
    if math.isfinite(step):
        length = "longer" if step > 1 + TIE else "shorter" if step < 1 - TIE else "as long"
        cause = ", for it carries more requests" if more and step > 1 + TIE else ""
        steps = f"{number(top.mean_step_ms, 1)} ms against {number(base.mean_step_ms, 1)} ms"
        parts.append(f"The mean step is {length}{cause}: {steps}.")
    if abs(accepted - 1) > TIE:
        parts.append(
            f"A step yields {number(top.acceptance_length, 2)} tokens per request{_with_tree(top)}, "
            f"{number(base.acceptance_length, 2)}{_with_tree(base)} of {BASELINE}."
        )
    return " ".join(parts)


def _latency(top: Cell, base: Cell) -> str:
    return (
        f"At the same point p99 TTFT is {milliseconds(top.p99_ttft_ms)}, with {BASELINE} "
        f"{milliseconds(base.p99_ttft_ms)}; mean TPOT is {milliseconds(top.mean_tpot_ms)}, with {BASELINE} "
        f"{milliseconds(base.mean_tpot_ms)}."
    )


def _knee(group: Group, points: list[Best]) -> str:
    """Where storeall and the leading methods become memory bound, with the narrowest tree."""
    if group.load_field == "none" or not points:
        return ""
    leaders = {name for name, _ in shares(points)[:2]} | {BASELINE}
    clauses = []
    for knee in knees(group):
        if knee.tree != group.trees[0] or knee.state_method not in leaders:
            continue
        marks = [
            f"{plain(load) if load is not None else f'not up to {plain(knee.highest[budget])}'} ({plain(budget)})"
            for budget, load in knee.loads.items()
        ]
        clauses.append(f"{knee.state_method} {', '.join(marks)}")
    unit = "concurrency" if group.load_field == "max_concurrency" else "request rate"
    return (
        f"Lowest {unit} at which requests wait for memory with tree {group.trees[0]}, {BUDGET} in brackets: "
        f"{'; '.join(clauses)}."
        if clauses
        else ""
    )


def _tree_width(group: Group, points: list[Best], peak: Best | None) -> str:
    """What wider trees do to the fastest method that was run with several, at the point of the largest gain."""
    where = peak or max(points, key=lambda best: (best.load, best.budget), default=None)
    if where is None:
        return ""
    by_method: dict[str, list[Cell]] = {}
    for cell in group.at(where.budget, where.load):
        if cell.usable and cell.num_rows > 1:
            by_method.setdefault(cell.state_method, []).append(cell)
    several = [cells for cells in by_method.values() if len(cells) > 1]
    if not several:
        return ""
    cells = sorted(max(several, key=lambda each: max(c.output_throughput for c in each)), key=lambda c: c.num_rows)
    shown = [
        f"tree {cell.tree} {significant(cell.output_throughput)} tokens/s at {number(cell.acceptance_length, 2)} "
        "tokens a step"
        for cell in cells
    ]
    wide, all_points = _wide_tree_points(group, cells[0].state_method, cells[0].tree)
    verdict = "at no point" if wide == 0 else f"at {wide} of {counted(all_points, 'point')}"
    return (
        f"{cells[0].state_method} at {_point(group, where)}: {'; '.join(shown)}. A tree wider than {cells[0].tree} "
        f"gives it more than 2 % more throughput {verdict} of load and memory budget."
    )


def _wide_tree_points(group: Group, method: str, narrow: str) -> tuple[int, int]:
    """Points at which some wider tree beats the narrow one by more than a tie, and all points with both."""
    wins = total = 0
    for budget in group.budgets:
        for load in group.loads:
            mine = [c for c in group.at(budget, load) if c.state_method == method and c.usable]
            base = [c.output_throughput for c in mine if c.tree == narrow]
            wider = [c.output_throughput for c in mine if c.tree != narrow]
            if base and wider:
                total += 1
                wins += max(wider) > (1 + TIE) * base[0]
    return wins, total


def _memory(group: Group) -> str:
    """Peak KV of storeall over that of other methods where storeall has memory to spare, same tree."""
    spans: dict[str, list[float]] = {}
    for cell in group.cells:
        base = group.find(BASELINE, cell.tree, cell.gpu_memory_utilization, group.load(cell))
        if base is None or base.memory_bound or cell.state_method == BASELINE or cell.tree != group.trees[0]:
            continue
        saved = quotient(base.peak_kv_gib, cell.peak_kv_gib)
        if math.isfinite(saved):
            spans.setdefault(cell.state_method, []).append(saved)
    texts = []
    for method in group.methods:
        if values := spans.get(method):
            low, high = number(min(values), 2), number(max(values), 2)
            texts.append(f"{method} {low}x" if low == high else f"{method} {low}x to {high}x")
    if not texts:
        return ""
    return (
        f"Where {BASELINE} has memory to spare with tree {group.trees[0]}, it holds this much more peak KV memory "
        f"than the method at the same load: {listing(texts)}. There the saving lets no more requests run."
    )


def _rejected(group: Group) -> str:
    rejected = [cell for cell in group.cells if cell.rejected > 0]
    dead = [cell for cell in group.cells if not cell.usable]
    parts = []
    if rejected:
        worst = max(rejected, key=lambda cell: cell.rejected)
        parts.append(
            f"{counted(len(rejected), 'cell')} of {number(len(group.cells))} rejected requests (up to "
            f"{number(worst.rejected)} of {number(worst.num_requests)}); figures count the others only."
        )
    if dead:
        verb = "is" if len(dead) == 1 else "are"
        parts.append(f"{counted(len(dead), 'cell')} finished no request and {verb} not ranked.")
    return " ".join(parts)


def _confidence(group: Group, modelled: Sequence[str]) -> str:
    parts = ["Simulated, not measured on a service."]
    if modelled:
        parts.append(f"Step costs that are modelled, not timed: {listing(list(modelled))}.")
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


def _with_tree(cell: Cell) -> str:
    return f" with tree {cell.tree}" if cell.num_rows > 1 else ""


def _point(group: Group, best: Best) -> str:
    return f"{load_phrase(group.load_field, best.load)}, {BUDGET} {plain(best.budget)}"
