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
from dataclasses import dataclass
from typing import Any

import altair as alt

from lab.units import GIB
from reports.data import Cell, Group
from reports.ledgers import LedgerEntry, ledger_titles, limit_rows
from reports.metrics import LOAD_METRICS, Metric, metric_note
from reports.palette import METHOD_DASHES, STEP_TERMS, method_colours
from reports.text import LOAD_TITLES, counted, load_phrase, plain

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
PANEL_HEIGHT = 190
INK, FAINT, GRID = "#333942", "#6b7280", "#e6e8eb"
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


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: its heading and specification."""

    title: str
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that belong together. `control` is the parameter that chooses what is shown; `lines` are a legend's
    titles and colours.
    """

    key: str
    title: str
    note: str
    panels: tuple[Panel, ...]
    control: str
    lines: tuple[tuple[str, str], ...] = ()


def figures(group: Group, ledgers: Sequence[LedgerEntry]) -> list[Figure]:
    """All figures of a group that it has data for."""
    usable = [cell for cell in group.cells if cell.usable]
    found: list[Figure] = []
    if usable:
        limits = limit_rows(ledgers, group)
        found += [_load_figure(group, usable, metric, limits) for metric in LOAD_METRICS]
        if len(group.all_trees) > 1:
            found.append(_width_figure(group, usable))
        found.append(_step_figure(group, usable))
    if ledgers:
        found.append(_ledger_figure(ledgers))
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
            **{f"{term}_ms": _finite(_term_ms(cell, term)) for term in STEP_TERMS},
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
        spans[tree] = _span(values, metric.log)
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
        panels.append(Panel(f"{group.budget_name} {plain(budget)}", _finish(alt.layer(*layers), group)))
    return Figure(metric.key, metric.title, metric_note(metric, group), tuple(panels), "tree")


def _width_figure(group: Group, cells: list[Cell]) -> Figure:
    """What wider trees do: to throughput, or in an open loop to TPOT at rates that something sustains."""
    field, title, unit = "output_throughput", "Output throughput", "tokens/s"
    if group.open_loop:
        field, title, unit = "mean_tpot_ms", "Mean TPOT", "ms"
        cells = [cell for cell in cells if not cell.saturated] or cells
    rows = json.dumps({cell.tree: counted(cell.num_rows, "row") for cell in group.cells})
    axis = _x_axis("draft tree", labelExpr=f"width > 220 ? [datum.label, {rows}[datum.label]] : datum.label")
    panels = []
    for load in _some(sorted({group.load(cell) for cell in cells})):
        _, top = _span([getattr(cell, field) for cell in cells if group.load(cell) == load], log=False)
        x = alt.X("tree:N", scale=alt.Scale(domain=group.all_trees), axis=axis)
        y = alt.Y(f"{field}:Q", scale=alt.Scale(domain=[0, top]), axis=_y_axis(unit))
        kept = " && datum.pace === 'keeps up'" if group.open_loop and not all(c.saturated for c in cells) else ""
        layers = _lines(group, f"datum.load === {load!r} && datum.budget === budget{kept}", x, y)
        panels.append(Panel(load_phrase(group.load_field, load), _finish(alt.layer(*layers), group)))
    note = "Wider trees accept more tokens a step but make every step dearer. Each panel has its own scale."
    note += " What does not keep up is left out." if group.open_loop else ""
    return Figure("width", f"{title} against tree width", note, tuple(panels), "budget")


def _step_figure(group: Group, cells: list[Cell]) -> Figure:
    """The mean length of a step as a bar per method and tree, made of its terms."""
    titles = {term: title for term, (title, _) in STEP_TERMS.items() if any(_term_ms(cell, term) > 0 for cell in cells)}
    lines = tuple(STEP_TERMS[term] for term in titles)
    loads = _some(sorted({group.load(cell) for cell in cells}))
    shown = [cell for cell in cells if group.load(cell) in loads]
    order = {(c.state_method, c.tree): None for tree in group.all_trees for c in shown if c.tree == tree}
    ranked = sorted(order, key=lambda pair: group.methods.index(pair[0]))
    columns = {f"{term}_ms": title for term, title in titles.items()}
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
        _, top = _span([cell.mean_step_ms for cell in here], log=False)
        x = alt.X("ms:Q", stack=True, scale=alt.Scale(domain=[0, top], nice=False), axis=_x_axis("ms", grid=True))
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


def _ledger_figure(entries: Sequence[LedgerEntry]) -> Figure:
    lines = tuple(ledger_titles(entries).values())
    configurations = list(dict.fromkeys(entry.label for entry in entries))
    total = max(sum(entry.lines.values()) for entry in entries) / GIB
    x = alt.X(
        "sum(gib):Q",
        scale=alt.Scale(domain=[0, total], nice=False),
        axis=_x_axis("GiB of one GPU", grid=True, tickCount=8),
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
    return _finish(chart, None, height=24 * len(configurations) + 8)


def _term_ms(cell: Cell, term: str) -> float:
    """Mean time of one term of a cell's steps."""
    return float(getattr(cell, f"{term}_share")) * cell.mean_step_ms


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
        return alt.X("load:O", axis=_x_axis(title, labels=False, ticks=False))
    log = group.load_field == "max_concurrency" and loads[0] > 0
    if log:
        pad = 1.2 if len(loads) > 1 else 2.0
        scale = alt.Scale(type="log", base=2, domain=[loads[0] / pad, loads[-1] * pad], nice=False)
    else:
        span = (loads[-1] - loads[0]) or loads[-1] or 1.0
        scale = alt.Scale(domain=[max(0.0, loads[0] - 0.06 * span), loads[-1] + 0.06 * span], nice=False)
    fits = f"width > 220 || indexof({_spread(loads, log)}, datum.value) >= 0"
    axis = _x_axis(title, values=loads, format="~g", labelOverlap="greedy", labelExpr=f"{fits} ? datum.label : ''")
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


def _span(values: list[float], log: bool) -> tuple[float, float]:
    """Lower and upper end of an axis that holds the values; a log axis spans a decade at least."""
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    if not log:
        return 0.0, 1.06 * max(shown) or 1.0
    low, high = min(shown) / 1.3, max(shown) * 1.3
    return low, max(high, 10 * low)


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


def _x_axis(title: str, **more: Any) -> alt.Axis:
    options: dict[str, Any] = {"title": title, "grid": False, "labelAngle": 0, "titlePadding": 6, **more}
    return alt.Axis(**options)


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


def _finish(chart: Any, group: Group | None, height: int = PANEL_HEIGHT) -> dict[str, Any]:
    """Add the page's parameters, sizes and style, and validate; the page adds the data."""
    params = [
        alt.param(name="tree", value=group.trees[0] if group else ""),
        alt.param(name="budget", value=group.budgets[0] if group else 0),
        alt.param(name="hidden", value=[]),
    ]
    axis = alt.AxisConfig(
        labelFontSize=11,
        titleFontSize=11,
        titleFontWeight="normal",
        labelColor=INK,
        titleColor=FAINT,
        gridColor=GRID,
        domainColor="#9aa1ab",
        tickColor="#9aa1ab",
    )
    finished = (
        chart.add_params(*params)
        .properties(
            width="container",
            height=height,
            background="white",
            padding=4,
            autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        )
        .configure(font=FONT, axis=axis, view=alt.ViewConfig(stroke=None))
    )
    spec: dict[str, Any] = finished.to_dict()
    spec.pop("$schema", None)
    return spec


def _some(loads: list[float], count: int = 3) -> list[float]:
    """Up to three loads: the lowest, the middle one, the highest."""
    if len(loads) <= count:
        return loads
    return [loads[0], loads[len(loads) // 2], loads[-1]]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
