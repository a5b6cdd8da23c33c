"""Vega-Lite specifications of a group's charts, made with Altair: small panels that fill the width they get.

Every panel reads named data that the page holds once (`cells`, `limits`, `ledgers`) and three parameters that the
page's controls set: `tree`, `budget` (gpu_memory_utilization) and `hidden` (methods switched off). A panel draws one
memory budget or one load, so that a line never mixes two; methods that draft nothing appear with every tree. All
panels of a figure have one scale of y, unless said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from reports.bars import ledger_figure, step_figure, step_terms, term_ms
from reports.chartparts import Figure, Panel, finish, some, span, x_axis
from reports.data import Cell, Group
from reports.ledgers import LedgerEntry, limit_rows
from reports.metrics import LOAD_METRICS, Metric, metric_note
from reports.palette import METHOD_DASHES, STEP_TERMS, method_colours
from reports.text import LOAD_TITLES, counted, load_phrase, plain

#: Fields of the data set `cells` that are numbers.
NUMBERS = (
    "output_throughput",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "blocks_gib",
    "reserved_records_gib",
    "committed_gib",
    "mean_running",
    "mean_step_ms",
    "step_tokens",
)


def figures(group: Group, ledgers: Sequence[LedgerEntry]) -> list[Figure]:
    """All figures of a group that it has data for."""
    usable = [cell for cell in group.cells if cell.usable]
    found: list[Figure] = []
    if usable:
        limits = limit_rows(ledgers, group)
        found += [_load_figure(group, usable, metric, limits) for metric in LOAD_METRICS]
        if len(group.all_trees) > 1:
            found.append(_width_figure(group, usable))
        if step_terms(usable):
            found.append(step_figure(group, usable))
    if ledgers:
        found.append(ledger_figure(ledgers))
    return found


def cell_rows(group: Group) -> list[dict[str, Any]]:
    """Rows of the data set `cells`; numbers that are not finite become null."""
    return [
        {
            "state_method": cell.state_method,
            "tree": cell.tree,
            "rows": cell.num_rows,
            "budget": cell.gpu_memory_utilization,
            "load": group.load(cell),
            "limit": cell.limit,
            "hollow": cell.saturated if group.open_loop else cell.memory_bound,
            "pace": "saturated" if cell.saturated else "keeps up",
            "steps": "partly extrapolated" if cell.extrapolated else "within the tables",
            **{field: _finite(getattr(cell, field)) for field in NUMBERS},
            **{f"{term}_ms": _finite(term_ms(cell, term)) for term in STEP_TERMS},
        }
        for cell in group.cells
        if cell.usable
    ]


def _load_figure(group: Group, cells: list[Cell], metric: Metric, limits: Sequence[dict[str, Any]]) -> Figure:
    spans = {}
    for tree in group.trees:
        values = [getattr(cell, metric.field) for cell in cells if cell.tree == tree or cell.num_rows == 1]
        if metric.key == "peak-kv":
            values += [row["limit_gib"] for row in limits if row["tree"] == tree or not row["drafted"]]
        spans[tree] = span(values, metric.log)
    axis = _y_axis(metric.unit, spans if metric.log else None)
    y = alt.Y(f"{metric.field}:Q", scale=_scale(spans, metric.log), axis=axis)
    panels = []
    for budget in group.budgets:
        here = f"datum.budget === {budget!r}"
        condition = f"{here} && (datum.tree === tree || datum.rows === 1)"
        shown = f"{condition} && datum.{metric.field} > 0" if metric.log else condition
        layers = _lines(group, shown, _load_axis(group), y)
        if metric.key == "peak-kv":
            layers.insert(0, _limit_rules(group, f"{here} && (datum.tree === tree || !datum.drafted)"))
        panels.append(Panel(f"{group.budget_name} {plain(budget)}", finish(alt.layer(*layers), group)))
    return Figure(metric.key, metric.title, metric_note(metric, group), tuple(panels), "tree")


def _width_figure(group: Group, cells: list[Cell]) -> Figure:
    """What wider trees do: to throughput, or in an open loop to TPOT at rates that something sustains."""
    field, title, unit = "output_throughput", "Output throughput", "tokens/s"
    if group.open_loop:
        field, title, unit = "mean_tpot_ms", "Mean TPOT", "ms"
        cells = [cell for cell in cells if not cell.saturated] or cells
    rows = json.dumps({cell.tree: counted(cell.num_rows, "row") for cell in group.cells})
    axis = x_axis("draft tree", labelExpr=f"width > 220 ? [datum.label, {rows}[datum.label]] : datum.label")
    panels = []
    for load in some(sorted({group.load(cell) for cell in cells})):
        _, top = span([getattr(cell, field) for cell in cells if group.load(cell) == load], log=False)
        x = alt.X("tree:N", scale=alt.Scale(domain=group.all_trees), axis=axis)
        y = alt.Y(f"{field}:Q", scale=alt.Scale(domain=[0, top]), axis=_y_axis(unit))
        kept = " && datum.pace === 'keeps up'" if group.open_loop and not all(c.saturated for c in cells) else ""
        layers = _lines(group, f"datum.load === {load!r} && datum.budget === budget{kept}", x, y)
        panels.append(Panel(load_phrase(group.load_field, load), finish(alt.layer(*layers), group)))
    note = "Wider trees accept more tokens a step but make every step dearer. Each panel has its own scale."
    note += " What does not keep up is left out." if group.open_loop else ""
    return Figure("width", f"{title} against tree width", note, tuple(panels), "budget")


def _lines(group: Group, condition: str, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """A line per method with a point per cell; hollow points are memory bound, in an open loop saturated."""
    colours = method_colours(group.methods)
    colour = alt.Scale(domain=list(colours), range=list(colours.values()))
    dash = alt.Scale(domain=list(colours), range=[METHOD_DASHES.get(name, [2, 1]) for name in colours])
    shown = f"{condition} && indexof(hidden, datum.state_method) < 0"
    base = alt.Chart(alt.NamedData("cells")).transform_filter(shown).encode(x=x, y=y)
    key = ["state_method", "tree", "budget", "load"]
    hover = alt.selection_point(name="hover", on="pointerover", clear="pointerout", fields=key, empty=False)
    hollow = alt.when("datum.hollow").then(alt.value("white"))
    lines = base.mark_line(clip=True, strokeWidth=1.8, strokeJoin="round").encode(
        color=alt.Color("state_method:N", scale=colour, legend=None),
        strokeDash=alt.StrokeDash("state_method:N", scale=dash, legend=None),
    )
    points = base.mark_point(strokeWidth=1.6, opacity=1).encode(
        stroke=alt.Stroke("state_method:N", scale=colour, legend=None),
        fill=hollow.otherwise(alt.Fill("state_method:N", scale=colour, legend=None)),
        size=alt.when(hover).then(alt.value(110)).otherwise(alt.value(34)),
    )
    # Unseen marks that are easy to hit: with `nearest` instead, tooltips lose their text fields (Vega-Lite 6.4).
    targets = base.mark_point(filled=True, size=320, opacity=0).encode(tooltip=_tooltip(group))
    return [lines, points, targets.add_params(hover)]


def _limit_rules(group: Group, condition: str) -> alt.Chart:
    """All that each method can commit, as dotted lines."""
    colours = method_colours(group.methods)
    colour = alt.Scale(domain=list(colours), range=list(colours.values()))
    shown = f"{condition} && indexof(hidden, datum.state_method) < 0"
    base = alt.Chart(alt.NamedData("limits")).transform_filter(shown)
    rules: alt.Chart = base.mark_rule(clip=True, strokeDash=[1, 3], strokeWidth=1.5).encode(
        y="limit_gib:Q", color=alt.Color("state_method:N", scale=colour, legend=None)
    )
    return rules


def _tooltip(group: Group) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("state_method:N", title="state method"),
        alt.Tooltip("tree:N", title="draft tree"),
        alt.Tooltip("budget:Q", title=group.budget_name),
        alt.Tooltip("load:Q", title=LOAD_TITLES[group.load_field], format=",~g"),
        alt.Tooltip("output_throughput:Q", title="output, tokens/s", format=",.0f"),
        alt.Tooltip("p99_ttft_ms:Q", title="p99 TTFT, ms", format=",.0f"),
        alt.Tooltip("mean_tpot_ms:Q", title="mean TPOT, ms", format=",.1f"),
        alt.Tooltip("blocks_gib:Q", title="blocks at the peak, GiB", format=",.1f"),
        alt.Tooltip("reserved_records_gib:Q", title="records reserved, GiB", format=",.1f"),
        alt.Tooltip("mean_running:Q", title="running, mean", format=",.1f"),
        alt.Tooltip("step_tokens:Q", title="tokens a step", format=",.2f"),
        alt.Tooltip("limit:N", title="limit"),
        *([alt.Tooltip("pace:N", title="at this rate")] if group.open_loop else []),
        alt.Tooltip("steps:N", title="step costs"),
    ]


def _load_axis(group: Group) -> alt.X:
    loads = group.loads
    title = LOAD_TITLES[group.load_field]
    if group.load_field == "none":
        return alt.X("load:O", axis=x_axis(title, labels=False, ticks=False))
    log = group.load_field == "max_concurrency" and loads[0] > 0
    if log:
        pad = 1.2 if len(loads) > 1 else 2.0
        scale = alt.Scale(type="log", base=2, domain=[loads[0] / pad, loads[-1] * pad], nice=False)
    else:
        span = (loads[-1] - loads[0]) or loads[-1] or 1.0
        scale = alt.Scale(domain=[max(0.0, loads[0] - 0.06 * span), loads[-1] + 0.06 * span], nice=False)
    fits = f"width > 220 || indexof({_spread(loads, log)}, datum.value) >= 0"
    axis = x_axis(title, values=loads, format="~g", labelOverlap="greedy", labelExpr=f"{fits} ? datum.label : ''")
    return alt.X("load:Q", scale=scale, axis=axis)


def _spread(loads: list[float], log: bool) -> list[float]:
    """The loads that a narrow panel labels: from the highest down, those far enough from the one before."""
    places = [math.log2(load) if log else load for load in loads]
    gap = 0.17 * (places[-1] - places[0])
    kept: list[int] = []
    for index in reversed(range(len(loads))):
        if not kept or places[kept[-1]] - places[index] >= gap:
            kept.append(index)
    return [loads[index] for index in kept]


def _scale(spans: dict[str, tuple[float, float]], log: bool) -> alt.Scale:
    """A scale that fits the chosen tree and is the same in all panels."""
    low = alt.ExprRef(f"{json.dumps({tree: span[0] for tree, span in spans.items()})}[tree]")
    high = alt.ExprRef(f"{json.dumps({tree: span[1] for tree, span in spans.items()})}[tree]")
    return alt.Scale(type="log" if log else "linear", domainMin=low, domainMax=high, nice=False)


def _decades(spans: dict[str, tuple[float, float]]) -> list[float]:
    """Ticks of a log axis: 1, 3, 10, 30, …"""
    low = math.floor(math.log10(min(span[0] for span in spans.values())))
    high = math.ceil(math.log10(max(span[1] for span in spans.values())))
    return [digit * 10.0**power for power in range(low, high + 1) for digit in (1, 3)]


def _y_axis(unit: str, log_spans: dict[str, tuple[float, float]] | None = None) -> alt.Axis:
    """A y axis with its unit above it; `log_spans` are those of a log axis."""
    ticks: dict[str, Any] = {"values": _decades(log_spans)} if log_spans else {"tickCount": 5}
    return alt.Axis(
        title=unit,
        titleAngle=0,
        titleAlign="left",
        titleAnchor="end",
        titleX=-34,
        titleY=-10,
        grid=True,
        domain=False,
        ticks=False,
        format=",~f",
        **ticks,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
