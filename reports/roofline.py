"""A roofline of the state methods' steps: arithmetic that a step needs, bytes that it moves, time that it took.

FLOP count the products of the method in exact arithmetic, once, whatever the number of bf16 parts in which the kernels
multiply. Per value head of width d, N tree rows, h rows of the log, r key heads per value head:

    verification  4 N d² (S K and S Q), 2 N² d (solve and outputs), 2 N² d r (the two Grams, triangles only)
    log           4 h N d and 4 h N d r
    commit        2 d² per committed row, d² for the decay of the state
    recurrence    7 d² per row
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert

from lab.bench.points import Point
from lab.methods import METHODS, SERIAL_METHODS
from lab.methods.logs import mean_log_rows
from lab.profiles.rows import KernelRow
from lab.trees import parse_tree
from reports.chartparts import FAINT, FONT, GRID, INK
from reports.kernelcells import Kernel, Steps
from reports.palette import METHOD_COLOURS, method_colours

#: Dense bf16 rate of the H200's tensor cores, FLOP/s (data sheet).
TENSOR_FLOPS = 990e12
FLOP_PER_ROW_OF_RECURRENCE = 7
KERNELS = tuple(
    Kernel.of(kind, rows) for kind, counts in (("chain", (1, 2, 4, 8)), ("tree", (16, 32, 64))) for rows in counts
)
SHAPES = {
    "recurrent": "cross",
    "storeall": "square",
    "replayssm": "triangle-up",
    "treewy": "diamond",
    "bole": "triangle-down",
    "deltalog": "triangle-right",
    "treelog": "circle",
}
METHODS_DRAWN = tuple(SHAPES)
BATCHES = (256, 8)
#: FLOP per byte that the panels show: the whole roof, and the part where the steps are.
WHOLE, NEAR = (0.5, 600.0), (0.5, 60.0)
PANEL_WIDTH, PANEL_HEIGHT = 400, 210
AXIS = "#9aa1ab"


def step_flop(row: KernelRow) -> float:
    """FLOP of a step of one layer for all requests of the row."""
    tree = parse_tree(row.tree)
    point = Point(row.method, row.heads, row.batch, tree, row.tree)
    n, d, committed = tree.num_rows, row.head_dim, point.rows_committed
    shared = row.key_heads / row.value_heads
    if row.method in SERIAL_METHODS:
        per_head: float = FLOP_PER_ROW_OF_RECURRENCE * n * d * d
    else:
        phases = METHODS[row.method].phases(row.heads, tree, committed)
        folds = next((phase.share for phase in phases if phase.name == "flush"), 1.0)  # of the state, per step
        log_rows = mean_log_rows(1 / folds, committed)
        verify = 4 * n * d * d + 2 * n * n * d * (1 + shared) + 4 * log_rows * n * d * (1 + shared)
        per_head = verify + (2 * committed + folds) * d * d
    return row.batch * row.value_heads * per_head


@dataclass(frozen=True, slots=True)
class Spot:
    """A step in the roofline: what it computes and moves, how long it took, and the bandwidth of its roof."""

    method: str
    kernel: Kernel
    batch: int
    flop: float
    bytes_moved: int
    time_us: float
    bytes_per_s: float

    @property
    def flop_per_byte(self) -> float:
        return self.flop / self.bytes_moved

    @property
    def tflops(self) -> float:
        """Achieved TFLOP/s."""
        return self.flop / self.time_us * 1e-6

    @property
    def floor_us(self) -> float:
        """Time that the lower roof asks for."""
        return max(self.bytes_moved / self.bytes_per_s, self.flop / TENSOR_FLOPS) * 1e6

    @property
    def percent(self) -> float:
        """Share of the roof that is reached."""
        return 100 * self.floor_us / self.time_us


def spots(steps: Steps, state_dtype: str, bytes_per_s: float) -> Iterator[Spot]:
    """Steps of all methods on the kernels' trees at `BATCHES`, as far as measured."""
    for batch in BATCHES:
        for method in METHODS_DRAWN:
            for kernel in KERNELS:
                row = steps.at(method, kernel.tree, state_dtype, batch)
                if row and row.latency_us_p50:
                    yield Spot(method, kernel, batch, step_flop(row), row.bytes_moved, row.latency_us_p50, bytes_per_s)


def roofline_svg(found: list[Spot], bytes_per_s: float, state: str) -> str:
    """The picture, a column per batch: the steps under their roofs, how much of the roof they reach, their times."""
    columns = []
    for batch in BATCHES:
        here = [spot for spot in found if spot.batch == batch]
        panels = (_roof_panel(here, bytes_per_s), _share_panel(here), _time_panel(here))
        column = alt.vconcat(*panels, spacing=16)
        columns.append(column.properties(title=f"batch {batch}, {state} state"))
    chart = (
        alt.hconcat(*columns, spacing=30)
        .configure(font=FONT, background="white", padding=8, view=alt.ViewConfig(stroke=None))
        .configure_axis(
            labelFontSize=11, titleFontSize=11, titleFontWeight="normal", labelColor=INK, titleColor=INK,
            gridColor=GRID, domainColor=AXIS, tickColor=AXIS,
        )
        .configure_title(fontSize=13, color=INK, anchor="start", offset=10)
        .configure_legend(orient="bottom", direction="horizontal", titleLimit=0, labelFontSize=12, symbolSize=70)
    )  # fmt: skip
    return str(vl_convert.vegalite_to_svg(chart.to_json())) + "\n"


def _roof_panel(found: list[Spot], bytes_per_s: float) -> Any:
    """Achieved FLOP/s by FLOP per byte, and the two roofs."""
    ridge, (low, high) = TENSOR_FLOPS / bytes_per_s, WHOLE
    least = min((spot.tflops for spot in found), default=1.0)
    y = alt.Y(
        "y:Q",
        title="TFLOP/s",
        scale=alt.Scale(type="log", domain=[10 ** math.floor(math.log10(least)), 1500], nice=False),
        axis=alt.Axis(values=[0.01, 0.1, 1, 10, 100, 1000], format="~g"),
    )
    x = _intensity(WHOLE, [1, 10, 100])
    roof = [{"x": at, "y": min(TENSOR_FLOPS, at * bytes_per_s) / 1e12} for at in (low, ridge, high)]
    line = alt.Chart(alt.InlineData(values=roof)).mark_line(color=INK, strokeWidth=1.6, clip=True).encode(x=x, y=y)
    names = [
        {"x": 20, "y": 45 * bytes_per_s / 1e12, "text": f"copy bandwidth {bytes_per_s / 1e12:.2f} TB/s"},
        {"x": 0.8 * ridge, "y": TENSOR_FLOPS / 1e12, "text": f"bf16 tensor cores {TENSOR_FLOPS / 1e12:.0f} TFLOP/s"},
    ]
    text = alt.Chart(alt.InlineData(values=names)).mark_text(align="right", color=FAINT, fontSize=11)
    return _panel(line, text.encode(x=x, y=y, text="text:N"), *_marks(found, "tflops", x, y))


def _share_panel(found: list[Spot]) -> Any:
    """Share of the roof; the points of treelog carry their rows."""
    y = alt.Y("y:Q", title="share of the roof, %", scale=alt.Scale(domain=[0, 100], nice=False))
    x = _intensity(NEAR, [1, 2, 5, 10, 20, 50])
    ours = [spot for spot in found if spot.method == "treelog"]
    rows = [{"x": spot.flop_per_byte, "y": spot.percent, "text": str(spot.kernel.rows)} for spot in ours]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, text="text:N")
    halo = base.mark_text(dy=-11, fontSize=11, stroke="white", strokeWidth=3)
    labels = base.mark_text(dy=-11, fontSize=11, color=INK)
    return _panel(*_marks(found, "percent", x, y), halo, labels)


def _time_panel(found: list[Spot]) -> Any:
    """Time by rows, and the floor of treelog's bytes; storeall leaves the panel at its top."""
    x = alt.X(
        "x:Q",
        title="rows of the tree (dashed: the floor of treelog's bytes)",
        scale=alt.Scale(type="log", base=2, domain=[0.9, 72], nice=False),
        axis=alt.Axis(values=[kernel.rows for kernel in KERNELS], format="~g"),
    )
    times = [spot.time_us for spot in found if spot.method != "storeall"]
    lowest = min((spot.floor_us for spot in found), default=1.0)
    y = alt.Y(
        "y:Q",
        title="µs per layer",
        scale=alt.Scale(type="log", domain=[0.8 * lowest, 2.2 * max(times, default=100.0)], nice=False),
        axis=alt.Axis(values=[a * 10**b for b in range(6) for a in (1, 2, 5)], format="~g"),
    )
    floor = [{"x": spot.kernel.rows, "y": spot.floor_us} for spot in found if spot.method == "treelog"]
    line = alt.Chart(alt.InlineData(values=floor)).mark_line(color=METHOD_COLOURS["treelog"], strokeDash=[4, 3])
    return _panel(line.encode(x=x, y=y), *_marks(found, "time_us", x, y, by_rows=True))


def _panel(*layers: Any) -> Any:
    return alt.layer(*layers).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT)


def _intensity(domain: tuple[float, float], ticks: list[float]) -> alt.X:
    return alt.X(
        "x:Q",
        title="FLOP per byte",
        scale=alt.Scale(type="log", domain=list(domain), nice=False),
        axis=alt.Axis(values=ticks, format="~g"),
    )


def _marks(found: list[Spot], field: str, x: alt.X, y: alt.Y, by_rows: bool = False) -> list[alt.Chart]:
    """A line per method through its trees, narrow to wide, and a point per tree."""
    values = [
        {
            "x": spot.kernel.rows if by_rows else spot.flop_per_byte,
            "y": getattr(spot, field),
            "method": spot.method,
            "rows": spot.kernel.rows,
        }
        for spot in found
    ]
    names = list(METHODS_DRAWN)
    colour = alt.Scale(domain=names, range=list(method_colours(names).values()))
    shape = alt.Shape("method:N", scale=alt.Scale(domain=names, range=list(SHAPES.values())), title=None)
    # Methods of one row are larger: treelog or storeall stands on them.
    alone = alt.when("datum.method === 'deltalog' || datum.method === 'recurrent'").then(alt.value(150))
    base = alt.Chart(alt.InlineData(values=values)).encode(
        x=x, y=y, color=alt.Color("method:N", scale=colour, title=None), order="rows:Q"
    )
    return [
        base.mark_line(strokeWidth=1, clip=True),
        base.mark_point(filled=True, opacity=1, clip=True).encode(shape=shape, size=alone.otherwise(alt.value(44))),
    ]
