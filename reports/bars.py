"""Stacked bars: where a step's time goes, and where a GPU's memory goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import altair as alt

from lab.units import GIB
from reports.chartparts import Figure, Panel, finish, some, span, x_axis
from reports.data import Cell, Group
from reports.ledgers import LedgerEntry, ledger_titles
from reports.palette import STEP_TERMS
from reports.text import load_phrase


def step_figure(group: Group, cells: list[Cell]) -> Figure:
    """The mean length of a step as a bar per method and tree, made of its terms."""
    terms = step_terms(cells)
    lines = tuple(STEP_TERMS[term] for term in terms)
    loads = some(sorted({group.load(cell) for cell in cells}))
    shown = [cell for cell in cells if group.load(cell) in loads]
    order = {(c.state_method, c.tree): None for tree in group.all_trees for c in shown if c.tree == tree}
    ranked = sorted(order, key=lambda pair: group.methods.index(pair[0]))
    columns = {f"{term}_ms": STEP_TERMS[term][0] for term in terms}
    panels = []
    for load in loads:
        base = (
            alt.Chart(alt.NamedData("cells"))
            .transform_filter(f"datum.load === {load!r} && datum.budget === budget")
            .transform_fold(list(columns), as_=["term", "ms"])
            .transform_calculate(
                configuration="datum.state_method + ' ' + datum.tree",
                line=f"{json.dumps(columns)}[datum.term]",
                order=f"indexof({json.dumps(list(columns))}, datum.term)",
                share="datum.mean_step_ms > 0 ? datum.ms / datum.mean_step_ms : null",
            )
        )
        here = [cell for cell in shown if group.load(cell) == load]
        present = {(cell.state_method, cell.tree) for cell in here}
        configurations = [f"{method} {tree}" for method, tree in ranked if (method, tree) in present]
        _, top = span([cell.mean_step_ms for cell in here], log=False)
        x = alt.X("ms:Q", stack=True, scale=alt.Scale(domain=[0, top], nice=False), axis=x_axis("ms", grid=True))
        tooltip = [
            alt.Tooltip("state_method:N", title="state method"),
            alt.Tooltip("tree:N", title="draft tree"),
            alt.Tooltip("line:N", title="part of the step"),
            alt.Tooltip("ms:Q", title="mean, ms", format=",.2f"),
            alt.Tooltip("share:Q", title="share of the step", format=".1%"),
            alt.Tooltip("mean_step_ms:Q", title="whole step, ms", format=",.2f"),
            alt.Tooltip("mean_running:Q", title="running, mean", format=",.1f"),
        ]
        chart = _bars(base, x, configurations, lines, tooltip)
        panels.append(Panel(load_phrase(group.load_field, load), chart))
    note = (
        "Mean length of an engine step, over all steps of a cell, and what it is made of. Recurrent states are those "
        "of prompts too; of the host's time only what no GPU time hides is shown. Each panel has its own scale."
    )
    return Figure("steps", "Where a step's time goes", note, tuple(panels), "budget", lines)


def ledger_figure(entries: Sequence[LedgerEntry]) -> Figure:
    lines = tuple(ledger_titles(entries).values())
    configurations = list(dict.fromkeys(entry.label for entry in entries))
    total = max(sum(entry.lines.values()) for entry in entries) / GIB
    x = alt.X(
        "sum(gib):Q",
        scale=alt.Scale(domain=[0, total], nice=False),
        axis=x_axis("GiB of one GPU", grid=True, tickCount=8),
    )
    tooltip = [
        alt.Tooltip("state_method:N", title="state method"),
        alt.Tooltip("tree:N", title="draft tree"),
        alt.Tooltip("line:N", title="line"),
        alt.Tooltip("sum(gib):Q", title="GiB", format=",.2f"),
    ]
    base = alt.Chart(alt.NamedData("ledgers")).transform_filter("datum.budget === budget")
    shown = "The pool is shown as full of requests of max_model_len as it gets; speculative states are"
    if any(entry.slots is not None for entry in entries):
        shown = (
            "The pools are laid out at start-up: recurrent states are the slots of the requests that may run, "
            "prefix-cache states the further slots that they reserve, speculative states"
        )
    note = f"Lines add up to the whole memory of one GPU. {shown} the copies kept for rows that may be rejected."
    spec = _bars(base, x, configurations, lines, tooltip)
    return Figure("ledger", "Memory ledger", note, (Panel("", spec),), "budget", lines)


def _bars(
    base: alt.Chart,
    x: alt.X,
    configurations: list[str],
    lines: Sequence[tuple[str, str]],
    tooltip: list[alt.Tooltip],
) -> dict[str, Any]:
    """A stacked bar per `configuration` of the methods that are switched on, a colour per `line`, in `order`."""
    titles, colours = zip(*lines, strict=True)
    labels = alt.Axis(labelLimit=140, domain=False, ticks=False, labelPadding=6)
    chart = (
        base.mark_bar(stroke="white", strokeWidth=0.6, height={"band": 0.78})
        .transform_filter("indexof(hidden, datum.state_method) < 0")
        .encode(
            x=x,
            y=alt.Y("configuration:N", sort=configurations, title=None, axis=labels),
            color=alt.Color("line:N", scale=alt.Scale(domain=titles, range=colours), legend=None),
            order=alt.Order("order:Q"),
            tooltip=tooltip,
        )
    )
    return finish(chart, None, height=24 * len(configurations) + 8)


def step_terms(cells: Sequence[Cell]) -> list[str]:
    """Terms that take time in some cell, in drawing order."""
    return [term for term in STEP_TERMS if any(term_ms(cell, term) > 0 for cell in cells)]


def term_ms(cell: Cell, term: str) -> float:
    """Mean time of one term of a cell's steps."""
    return float(getattr(cell, f"{term}_share")) * cell.mean_step_ms
