"""The tables of a report as rows of ready text: best configurations, knees, ratios, ledgers, cells, sources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.units import GIB, MIB
from reports.answers import BASELINE, TIE, Knee, best_at, knees
from reports.data import Cell, Group, Run
from reports.ledgers import LedgerEntry
from reports.text import (
    DASH,
    counted,
    listing,
    number,
    percent,
    plain,
    quotient,
    ratio,
    significant,
)  # fmt: skip

#: Columns of the ratio table; every ratio is above 1 where the method is better than storeall.
RATIO_COLUMNS = ("output throughput", "peak KV reduction", "p99 TTFT gain", "mean TPOT gain", "batch ratio")


#: Parts of an engine step in words.
TERM_TITLES: dict[str, str] = {
    "rows": "projections, experts and norms",
    "head": "output head",
    "state": "recurrent state (GDN)",
    "attention": "attention of decoding requests",
    "prefill_attention": "attention of prompts",
    "prefill_state": "recurrent layers of prompts",
    "draft": "drafting",
}


@dataclass(frozen=True, slots=True)
class BestEntry:
    """The best configuration at one point: method and tree, methods tied with it, throughput, ratio to storeall."""

    method: str
    tree: str
    tied: str
    throughput: str
    gain: str
    mark: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio as text, with `better`, `worse` or `tie`."""

    text: str
    mark: str


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One method at one load against storeall with the same tree and budget; `span`: rows of this load, or 0."""

    load: str
    span: int
    method: str
    throughput: str
    ratios: tuple[Ratio, ...]
    memory_bound: str


@dataclass(frozen=True, slots=True)
class RatioBody:
    """The ratio rows of one budget and tree; `note` says why there are none."""

    budget: float
    tree: str
    rows: tuple[RatioRow, ...]
    note: str


def best_rows(group: Group) -> list[tuple[str, list[BestEntry | None]]]:
    """Per load: the best configuration at each memory budget."""
    return [
        (_load_text(group, load), [_best_entry(group, budget, load) for budget in group.budgets])
        for load in group.loads
    ]


def knee_rows(group: Group) -> list[tuple[Knee, list[str]]]:
    """Per method and tree: the lowest memory-bound load at each budget; `> 256` where none that was run is."""
    rows = []
    for knee in knees(group):
        texts = []
        for budget in group.budgets:
            if budget not in knee.loads:
                texts.append("not run")
                continue
            load = knee.loads[budget]
            texts.append(_load_text(group, load) if load is not None else _beyond(group, knee.highest[budget]))
        rows.append((knee, texts))
    return rows


def ratio_bodies(group: Group) -> list[RatioBody]:
    """One body of ratio rows per memory budget and tree."""
    bodies = []
    for budget in group.budgets:
        for tree in group.trees:
            rows = tuple(row for load in group.loads for row in _ratio_rows(group, budget, tree, load))
            note = "" if rows else _why_no_ratios(group, budget, tree)
            bodies.append(RatioBody(budget, tree, rows, note))
    return bodies


def ledger_table(entries: Sequence[LedgerEntry]) -> list[tuple[LedgerEntry, list[str]]]:
    """Per ledger: pool, blocks, block size, blocks per request, KV tokens, concurrency, source."""
    return [
        (
            entry,
            [
                number(entry.pool_bytes / GIB, 2),
                number(entry.num_gpu_blocks),
                number(entry.block_size_tokens),
                number(entry.bytes_per_block / MIB, 2),
                number(entry.blocks_per_request, 0 if float(entry.blocks_per_request).is_integer() else 1),
                number(entry.kv_cache_tokens),
                number(entry.max_concurrency, 2),
                entry.gpu_blocks_source,
            ],
        )
        for entry in entries
    ]


def cell_table(group: Group) -> list[tuple[Cell, list[str]]]:
    """Every cell with its main figures."""
    return [
        (
            cell,
            [
                plain(cell.gpu_memory_utilization),
                _load_text(group, group.load(cell)),
                number(cell.completed),
                number(cell.rejected),
                significant(cell.output_throughput),
                significant(cell.p99_ttft_ms),
                number(cell.mean_tpot_ms, 1),
                number(cell.acceptance_length, 2),
                number(cell.peak_running),
                number(cell.peak_kv_gib, 1),
                number(cell.num_preemptions),
                "yes" if cell.memory_bound else "no",
                percent(cell.extrapolated_steps),
            ],
        )
        for cell in group.cells
    ]


def extrapolation_rows(run: Run) -> list[tuple[str, str, str, str, str]]:
    """Per method and tree with steps outside the tables: cells that hold such steps, their mean and largest share."""
    members: dict[tuple[str, str], list[Cell]] = {}
    for group in run.groups:
        for method in group.methods:
            for tree in group.all_trees:
                found = [c for c in group.cells if (c.state_method, c.tree) == (method, tree)]
                if found:
                    members.setdefault((method, tree), []).extend(found)
    rows = []
    for (method, tree), cells in members.items():
        shares = [c.extrapolated_steps for c in cells if math.isfinite(c.extrapolated_steps)]
        beyond = sum(1 for c in cells if c.extrapolated)
        if not beyond:
            continue
        mean = percent(sum(shares) / len(shares)) if shares else DASH
        rows.append(
            (
                method,
                tree,
                f"{number(beyond)} of {number(len(cells))}",
                mean,
                percent(max(shares, default=None)),
            )
        )
    return rows


def skipped_rows(run: Run) -> list[tuple[str, str, str, str, str, str]]:
    """Combinations that were not run, those with the same method, tree and reason in one row."""
    merged: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for entry in run.entries("skipped"):
        key = tuple(str(entry.get(name, DASH)) for name in ("state_method", "tree", "reason"))
        merged.setdefault((key[0], key[1], key[2]), []).append(entry)
    return [
        (
            method,
            tree,
            _values(entries, "gpu_memory_utilization"),
            _values(entries, "max_concurrency")
            if _has(entries, "max_concurrency")
            else _values(entries, "request_rate"),
            number(len(entries)),
            reason,
        )
        for (method, tree, reason), entries in merged.items()
    ]


def step_cost_rows(run: Run) -> list[tuple[str, str, str, str, str]]:
    """Per part of a step and source: part, methods or `all`, models, source word, detail."""
    models = {str(entry.get("model", "")) for entry in run.entries("step_cost")}
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for entry in run.entries("step_cost"):
        source, _, rest = str(entry.get("source", DASH)).partition(":")
        model = str(entry.get("model", "")) if len(models) > 1 else ""
        method = str(entry.get("state_method", "all"))
        detail = (
            str(entry.get("detail") or rest).strip().replace(f"of the phases of {method}", "of the method's phases")
        )
        names = merged.setdefault((_term(entry), model, source.strip(), detail), [])
        if method not in names:
            names.append(method)
    titles = list(TERM_TITLES.values())
    order = sorted(merged, key=lambda key: titles.index(key[0]) if key[0] in titles else len(titles))
    return [(key[0], ", ".join(merged[key]), *key[1:]) for key in order]


def modelled_terms(run: Run) -> list[str]:
    """Parts of a step whose cost is modelled for some method, in words."""
    entries = run.entries("step_cost")
    return list(dict.fromkeys(_term(e) for e in entries if str(e.get("source", "")).startswith("modelled")))


def facts(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested mapping as (name, value) rows without empty ones; floats to four digits, lists on one line."""
    rows: list[tuple[str, str]] = []
    for key, value in mapping.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            rows += facts(value, f"{name}: ")
        elif value is not None:
            rows.append((name, _value(value)))
    return rows


def union_table(entries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str], list[list[str]]]:
    """Mappings of one kind as what all share, and a table of the rest: column names and rows."""
    keys = list(dict.fromkeys(key for entry in entries for key in entry))
    shared = {key: entries[0].get(key) for key in keys if all(e.get(key) == entries[0].get(key) for e in entries)}
    varying = [key for key in keys if key not in shared]
    rows = [[_value(entry.get(key)) for key in varying] for entry in entries]
    return shared, [key.replace("_", " ") for key in varying], rows


def workloads(run: Run) -> list[dict[str, Any]]:
    """The workloads' descriptions without the fields that the sweep varies."""
    swept = {
        f for f in ("max_concurrency", "request_rate", "burstiness") if len({getattr(c, f) for c in run.cells}) > 1
    }
    return [{key: value for key, value in entry.items() if key not in swept} for entry in run.entries("workload")]


def _term(entry: Mapping[str, Any]) -> str:
    term = str(entry.get("term", DASH))
    return TERM_TITLES.get(term, term.replace("_", " "))


def _best_entry(group: Group, budget: float, load: float) -> BestEntry | None:
    best = best_at(group, budget, load)
    if best is None:
        return None
    tied = [cell.state_method for cell in best.winners[1:]]
    return BestEntry(
        best.top.state_method,
        best.top.tree,
        f"tie: {', '.join(tied)}" if tied else "",
        significant(best.top.output_throughput),
        ratio(best.gain),
        _mark(best.gain),
    )


def _beyond(group: Group, highest: float) -> str:
    return "not reached" if group.load_field == "none" else f"> {plain(highest)}"


def _ratio_rows(group: Group, budget: float, tree: str, load: float) -> list[RatioRow]:
    base = group.find(BASELINE, tree, budget, load)
    if base is None or not base.usable:
        return []
    found = [group.find(method, tree, budget, load) for method in group.methods if method != BASELINE]
    others = [cell for cell in found if cell is not None and cell.usable]
    return [
        RatioRow(
            _load_text(group, load),
            len(others) if position == 0 else 0,
            cell.state_method,
            significant(cell.output_throughput),
            tuple(Ratio(ratio(value), _mark(value)) for value in _ratios(cell, base)),
            _bound(cell, base),
        )
        for position, cell in enumerate(others)
    ]


def _ratios(cell: Cell, base: Cell) -> tuple[float, ...]:
    return (
        quotient(cell.output_throughput, base.output_throughput),
        quotient(base.peak_kv_gib, cell.peak_kv_gib),
        quotient(base.p99_ttft_ms, cell.p99_ttft_ms),
        quotient(base.mean_tpot_ms, cell.mean_tpot_ms),
        quotient(cell.peak_running, base.peak_running),
    )


def _bound(cell: Cell, base: Cell) -> str:
    bound = [each.state_method for each in (base, cell) if each.memory_bound]
    return listing(bound) if bound else "none"


def _why_no_ratios(group: Group, budget: float, tree: str) -> str:
    cells = [c for c in group.cells if (c.gpu_memory_utilization, c.tree) == (budget, tree)]
    if not cells:
        return "No cell was run here."
    names = {cell.state_method for cell in cells}
    if BASELINE not in names:
        return f"{BASELINE} was not run here, so there is nothing to compare with."
    if names == {BASELINE}:
        return f"Only {BASELINE} was run here."
    return "No cell here finished a request."


def _mark(value: float) -> str:
    if not math.isfinite(value):
        return "tie"
    return "better" if value > 1 + TIE else "worse" if value < 1 - TIE else "tie"


def _load_text(group: Group, load: float) -> str:
    return "trace" if group.load_field == "none" else plain(load)


def _has(entries: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(entry.get(key) is not None for entry in entries)


def _values(entries: Sequence[Mapping[str, Any]], key: str) -> str:
    values = dict.fromkeys(entry.get(key) for entry in entries)
    texts = [_value(value) for value in values if value is not None]
    return ", ".join(texts) or DASH


def _value(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return number(value) if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return DASH if not math.isfinite(value) else f"{value:.4g}" if abs(value) < 1e4 else number(value)
    if isinstance(value, (list, tuple)):
        shown = [_value(item) for item in value[:16]]
        more = [f"and {counted(len(value) - 16, 'more value')}"] if len(value) > 16 else []
        return ", ".join(shown + more) or DASH
    return str(value)
