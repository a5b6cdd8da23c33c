"""The tables on where a run's figures come from: costs, steps outside the tables, what was not run, settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reports.data import Cell, Run
from reports.text import DASH, counted, number, percent

#: Parts of an engine step in words.
TERM_TITLES: dict[str, str] = {
    "rows": "projections, experts and norms",
    "head": "output head",
    "state": "recurrent state (GDN)",
    "attention": "attention of decoding requests",
    "prefill_attention": "attention of prompts",
    "prefill_state": "recurrent layers of prompts",
    "draft": "drafting",
    "host": "host (CPU)",
}


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


def skipped_rows(run: Run) -> list[tuple[str, ...]]:
    """Combinations that were not run, those with the same model, method, tree and reason in one row.

    Model, method, tree, memory budgets, loads, number of combinations, reason; the model is empty when there is but
    one. A combination counts once, however many seeds or other settings it was asked for with.
    """
    entries = skipped(run)
    several = len({str(entry.get("model")) for entry in entries} | {cell.model for cell in run.cells}) > 1
    merged: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for entry in entries:
        key = tuple(str(entry.get(name, DASH)) for name in ("model", "state_method", "tree", "reason"))
        merged.setdefault(key, []).append(entry)
    return [
        (
            model if several else "",
            method,
            _tree(tree),
            _values(found, "gpu_memory_utilization"),
            _values(found, "max_concurrency") if _has(found, "max_concurrency") else _values(found, "request_rate"),
            number(len(found)),
            reason,
        )
        for (model, method, tree, reason), found in merged.items()
    ]


def skipped(run: Run) -> list[Mapping[str, Any]]:
    """The combinations that were not run, each once."""
    return list({json.dumps(entry, sort_keys=True): entry for entry in run.entries("skipped")}.values())


def settings(run: Run) -> list[tuple[str, str]]:
    """All settings of the first cell, defaults included."""
    return [row for entry in run.entries("first_cell") for row in facts(entry)]


def operator_tables(run: Run) -> str:
    """The digests of the operator tables, by GPU."""
    entries = run.entries("operator_tables")
    return ", ".join(f"{gpu} {digest}" for entry in entries for gpu, digest in entry.items())


def cycled(run: Run) -> list[str]:
    """A sentence per trace that is shorter than the run."""
    texts = []
    for entry in run.entries("workload"):
        rows, wanted = entry.get("trace_rows"), entry.get("num_requests")
        if isinstance(rows, int) and isinstance(wanted, int) and 0 < rows < wanted:
            texts.append(
                f"{entry.get('trace')} has {counted(rows, 'row')} for {counted(wanted, 'request')}: it is read "
                f"{number(wanted / rows, 1)} times over, so lengths repeat."
            )
    return texts


def step_cost_rows(run: Run) -> list[tuple[str, str, str, str, str]]:
    """Per part of a step and source: part, methods, models, source word, detail; `all` where it holds for all.

    The models are left empty when there is but one.
    """
    entries = run.entries("step_cost")
    models = list(dict.fromkeys(str(entry.get("model", "")) for entry in entries))
    merged: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for entry in entries:
        source, _, rest = str(entry.get("source", DASH)).partition(":")
        method = str(entry.get("state_method", "all"))
        detail = (
            str(entry.get("detail") or rest).strip().replace(f"of the phases of {method}", "of the method's phases")
        )
        by_model = merged.setdefault((_term(entry), source.strip(), detail), {})
        names = by_model.setdefault(str(entry.get("model", "")), [])
        if method not in names:
            names.append(method)
    rows = []
    for (term, source, detail), by_model in merged.items():
        alike = len(by_model) == len(models) and all(names == by_model[models[0]] for names in by_model.values())
        shown = {"all" if len(models) > 1 else "": by_model[models[0]]} if alike else by_model
        rows += [(term, ", ".join(names), model, source, detail) for model, names in shown.items()]
    titles = list(TERM_TITLES.values())
    return sorted(rows, key=lambda row: titles.index(row[0]) if row[0] in titles else len(titles))


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


def _has(entries: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(entry.get(key) is not None for entry in entries)


def _values(entries: Sequence[Mapping[str, Any]], key: str) -> str:
    values = dict.fromkeys(entry.get(key) for entry in entries)
    texts = [_value(value) for value in values if value is not None]
    return ", ".join(texts) or DASH


def _tree(tree: str) -> str:
    return "none" if tree == "chain:0" else tree


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
    return _tree(str(value))
