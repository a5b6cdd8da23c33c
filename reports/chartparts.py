"""What all charts of a report share: panels and figures, axes, sizes and style."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import altair as alt

from reports.data import Group

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
PANEL_HEIGHT = 190
INK, FAINT, GRID = "#333942", "#6b7280", "#e6e8eb"


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


def span(values: list[float], log: bool) -> tuple[float, float]:
    """Lower and upper end of an axis that holds the values; a log axis spans a decade at least."""
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    if not log:
        return 0.0, 1.06 * max(shown) or 1.0
    low, high = min(shown) / 1.3, max(shown) * 1.3
    return low, max(high, 10 * low)


def x_axis(title: str, **more: Any) -> alt.Axis:
    options: dict[str, Any] = {"title": title, "grid": False, "labelAngle": 0, "titlePadding": 6, **more}
    return alt.Axis(**options)


def finish(chart: Any, group: Group | None, height: int = PANEL_HEIGHT) -> dict[str, Any]:
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


def some(loads: list[float], count: int = 3) -> list[float]:
    """Up to three loads: the lowest, the middle one, the highest."""
    if len(loads) <= count:
        return loads
    return [loads[0], loads[len(loads) // 2], loads[-1]]
