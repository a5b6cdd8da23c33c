"""The answer of a report in a few sentences: what is best where it matters most, and what was not compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reports.accuracy import TIE_TEXT
from reports.answers import BASELINE, Best, all_best, headline, highest_rate, largest_gain
from reports.data import Cell, Group, Run, sort_methods
from reports.sources import skipped
from reports.text import counted, latencies, listing, load_phrase, plain, ratio, significant

WITHIN = f"within {TIE_TEXT}"
#: Longest reason that the answer quotes, in characters; the table of what was not run holds all.
MAX_REASON = 48


def lead(group: Group) -> str:
    """The answer: the largest memory budget at the highest load first, then the largest gain of all points."""
    points = all_best(group)
    head = headline(group, points)
    if not any(cell.usable for cell in group.cells):
        return "No cell finished a request: there is nothing to compare."
    if head is None:
        return f"No configuration keeps up with {_lowest_load(group)}. Try lower rates."
    opening = _at_rate(group, head) if group.open_loop else _at_load(group, head)
    if len(group.cells) == 1:
        return f"One cell was run: {opening} There is nothing to compare it with."
    if len(group.methods) == 1:
        return f"Only {head.top.state_method} was run: {opening}"
    if not any(best.baseline for best in points):
        return f"{_capital(opening)} {BASELINE} was not run, so there are no ratios to it."
    return f"{_capital(opening)} {_overall(group, points, head)}".strip()


def caveats(run: Run, group: Group) -> list[str]:
    """What the comparison leaves out or bends: combinations that were not run, lowered running limits."""
    return [text for text in (_not_run(run, group), _lowered(group), _outside(group), _engine(group)) if text]


def _engine(group: Group) -> str:
    """A word when the engine is not the one whose published runs the model was compared with."""
    if group.cells[0].engine != "sglang":
        return ""
    return (
        "The engine is SGLang by its own rules; the published runs below are vLLM's, and no run of SGLang was compared."
    )


def _outside(group: Group) -> str:
    """A word when most steps of the configuration that the answer names lie outside the measured tables."""
    head = headline(group, all_best(group))
    if head is None or head.top.extrapolated_steps <= 0.5:
        return ""
    return (
        f"{100 * head.top.extrapolated_steps:.0f}\N{NO-BREAK SPACE}% of the steps behind the first figure lie outside "
        "the measured tables, where the last measured rate is held."
    )


def with_tree(cell: Cell) -> str:
    return f" with tree {cell.tree}" if cell.num_rows > 1 else ""


def point(group: Group, best: Best) -> str:
    return f"{load_phrase(group.load_field, best.load)}, {group.budget_name} {plain(best.budget)}"


def _at_load(group: Group, head: Best) -> str:
    """Closed loop: the highest output throughput at the headline's point."""
    top, base = head.top, head.baseline
    others = listing([cell.state_method for cell in head.winners[1:]])
    text = (
        f"at {group.budget_name} {plain(head.budget)} and {load_phrase(group.load_field, head.load)}, "
        f"{top.state_method}{with_tree(top)} reaches {significant(top.output_throughput)} output tokens/s"
    )
    if len(group.methods) == 1:
        return f"{text}."
    text += ", the most of what was run"
    if base is not None and top.state_method != BASELINE:
        text += f" and {ratio(head.gain)} those of {BASELINE}"
    return f"{text}{f' ({others} {WITHIN})' if others else ''}."


def _at_rate(group: Group, head: Best) -> str:
    """Open loop: the shortest time per token at the highest rate that is kept up with."""
    top, base = head.top, head.baseline
    alone = len(group.methods) == 1
    text = (
        f"at {group.budget_name} {plain(head.budget)}, {top.state_method}{with_tree(top)} has "
        f"{'a' if alone else 'the shortest'} mean TPOT{' of' if alone else ','} {latencies(top.mean_tpot_ms)[0]}"
        f"{'' if alone else ','} at {load_phrase(group.load_field, head.load)}"
    )
    if len(group.loads) > 1:
        text += f", the highest rate {'run' if head.load == group.loads[-1] else 'that anything run here sustains'}"
    brackets = [f"{listing([cell.state_method for cell in head.winners[1:]])} {WITHIN}"] if head.winners[1:] else []
    if base is not None and not head.has(BASELINE):
        brackets.append(f"{BASELINE} {_against_rate(group, head, base)}")
    return f"{text}{' (' + '; '.join(brackets) + ')' if brackets else ''}."


def _against_rate(group: Group, head: Best, base: Cell) -> str:
    if not base.saturated:
        return latencies(base.mean_tpot_ms)[0]
    reached = highest_rate(group, head.budget, BASELINE)
    return f"sustains {load_phrase(group.load_field, reached)}" if reached else "does not keep up"


def _overall(group: Group, points: Sequence[Best], head: Best) -> str:
    """The largest gain over storeall at any point, unless the opening has told it."""
    peak = largest_gain(points)
    what = "a mean TPOT shorter" if group.open_loop else "an output throughput higher"
    if peak is None:
        if any(best.beats_baseline for best in points):
            return ""
        return f"At no point has a method {what} than {BASELINE}'s by more than {TIE_TEXT}: choose by memory."
    if peak == head:
        return f"At no other point is the gain over {BASELINE} larger." if len(points) > 1 else ""
    gain = "mean TPOT is shorter by up to" if group.open_loop else "the gain is up to"
    return (
        f"Over all loads and budgets {gain} {ratio(peak.gain)}: {peak.top.state_method}{with_tree(peak.top)} at "
        f"{point(group, peak)}."
    )


def _not_run(run: Run, group: Group) -> str:
    """Methods and trees that the sweep asked for and could not run, with the reason when it is one and short."""
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in _skipped_of(run, group):
        entries.setdefault(str(entry.get("state_method", "?")), []).append(entry)
    clauses = [_not_run_method(group, method, entries[method]) for method in sort_methods(set(entries))]
    return f"Not run: {'; '.join(clauses)}." if clauses else ""


def _not_run_method(group: Group, method: str, entries: list[Mapping[str, Any]]) -> str:
    where: dict[str, set[float]] = {}
    for entry in entries:
        budget = entry.get("gpu_memory_utilization")
        where.setdefault(str(entry.get("tree", "")), set()).update({budget} if isinstance(budget, float) else set())
    budgets = set().union(*where.values())
    trees = [tree for tree in where if tree not in ("", "none", "chain:0")]
    text = method
    if method in group.methods and trees:
        text += f" with tree{'s' if len(trees) > 1 else ''} {listing(trees)}"
    if budgets and not set(group.budgets) <= budgets:
        text += f" at {group.budget_name} {listing([plain(budget) for budget in sorted(budgets, reverse=True)])}"
    reasons = {_clause(method, str(entry.get("reason", ""))) for entry in entries}
    reason = reasons.pop()
    return f"{text} ({reason})" if reason and not reasons and len(reason) <= MAX_REASON else text


def _skipped_of(run: Run, group: Group) -> list[Mapping[str, Any]]:
    """Combinations of a group's model that were not run."""
    models = {cell.model for cell in run.cells}
    mine = group.cells[0].model
    return [e for e in skipped(run) if e.get("model", mine) == mine or e.get("model") not in models]


def _clause(method: str, reason: str) -> str:
    """The first clause of a reason without the method's name."""
    return reason.partition(";")[0].removeprefix(f"state method '{method}' ").strip()


def _lowered(group: Group) -> str:
    """Methods that may run fewer requests at once than max_num_seqs, for lack of room for their records."""
    limits: dict[tuple[int, float, str], dict[str, int]] = {}
    for cell in group.cells:
        if cell.lowered:
            key = cell.max_num_seqs, cell.gpu_memory_utilization, cell.tree
            limits.setdefault(key, {})[cell.state_method] = cell.running_limit
    texts = []
    for (wanted, budget, tree), methods in sorted(limits.items(), key=lambda item: (-item[0][1], item[0][2])):
        shown = listing([f"{name} at most {limit}" for name, limit in methods.items()])
        texts.append((wanted, f"{shown} with tree {tree} at {plain(budget)}"))
    if not texts:
        return ""
    opening = f"Records for {counted(texts[0][0], 'request')} at once"
    names = listing(sort_methods({name for methods in limits.values() for name in methods}))
    lowest = min(limit for methods in limits.values() for limit in methods.values())
    if group.cells[0].engine == "sglang":
        return (
            f"SGLang's state slots, KV pool or defaults let fewer than {texts[0][0]} requests run at "
            f"{counted(len(texts), 'combination')} of tree and budget, down to {lowest}: {names}."
        )
    if len(texts) > 2:
        return (
            f"{opening} do not always fit: {names} run fewer at "
            f"{counted(len(texts), 'combination')} of tree and budget, down to {lowest}."
        )
    return f"{opening} do not fit everywhere: {'; '.join(text for _, text in texts)}."


def _lowest_load(group: Group) -> str:
    return load_phrase(group.load_field, group.loads[0]) + (" or more" if group.load_field == "request_rate" else "")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
