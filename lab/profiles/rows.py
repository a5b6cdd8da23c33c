"""The rows of `kernels.csv`: one timed phase of one state method at one point of the grid.

Other programs read this file; its columns are fixed. An empty latency means that the row has no time: its gate was
red, and `rel_err_output` or `rel_err_state` says which error was too large.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from lab.errors import UsageError
from lab.methods import METHODS
from lab.methods.base import LayerHeads
from lab.methods.protocol import STATE_DTYPES
from lab.profiles.tables import table_lines
from lab.trees import parse_tree

PhaseName = Literal["verify", "commit", "flush", "step"]
PHASES: tuple[str, ...] = get_args(PhaseName)
#: How a row was timed: replays of a CUDA graph with one launch after another (`graph`); the same with every layer but
#: the first chained to the layer before, so that it starts while that one ends (`chained`, phase `step` only); calls
#: from Python (`eager`).
TimerName = Literal["graph", "chained", "eager"]
TIMERS: tuple[str, ...] = get_args(TimerName)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One row: the point, the phase, its time per layer, the bytes of the model and the gate's errors.

    Latencies are microseconds of one layer; None where nothing was timed. `bytes_moved` is what the method's law asks
    for, `pct_copy_bandwidth` those bytes per time against a copy measured in the same run (None: no meaning).
    """

    method: str
    phase: str
    key_heads: int
    value_heads: int
    head_dim: int
    state_dtype: str
    batch: int
    rows: int
    tree: str
    timer: str
    latency_us_p50: float | None
    latency_us_p20: float | None
    latency_us_p80: float | None
    samples: int
    bytes_moved: int
    pct_copy_bandwidth: float | None
    rel_err_output: float
    rel_err_state: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies a row; the rest was measured."""
        return tuple(getattr(self, name) for name in KEY_COLUMNS)

    @property
    def heads(self) -> LayerHeads:
        return LayerHeads(self.key_heads, self.value_heads, self.head_dim, self.head_dim, self.state_dtype)

    @property
    def is_chain(self) -> bool:
        """Whether the row's tree is a chain, told by its text: `chain`, `chain:K`, or one child everywhere."""
        return self.rows == 1 or self.tree.startswith("chain") or set(self.tree.split(",")) == {"1"}


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(KernelRow))
KEY_COLUMNS = COLUMNS[: COLUMNS.index("timer") + 1]
_INTEGERS = ("key_heads", "value_heads", "head_dim", "batch", "rows", "samples", "bytes_moved")
_OPTIONAL = ("latency_us_p50", "latency_us_p20", "latency_us_p80", "pct_copy_bandwidth")
_DECIMALS = {"latency_us_p50": 3, "latency_us_p20": 3, "latency_us_p80": 3, "pct_copy_bandwidth": 1}


def write_rows(rows: Iterable[KernelRow]) -> str:
    """The text of `kernels.csv`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(name, getattr(row, name)) for name in COLUMNS] for row in rows)
    return text.getvalue()


def read_rows(path: Path) -> tuple[KernelRow, ...]:
    """The rows of a `kernels.csv`; raises `UsageError` naming file, line and field for anything else."""
    rows = tuple(_row(raw, line) for line, raw in table_lines(path, COLUMNS, "kernels.csv"))
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        if row.key in seen:
            raise UsageError(f"{path} holds a row twice: {', '.join(map(str, row.key))}")
        seen.add(row.key)
    return rows


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in _DECIMALS:
        return f"{value:.{_DECIMALS[name]}f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _row(raw: dict[str, Any], place: str) -> KernelRow:
    values: dict[str, Any] = {}
    for name in COLUMNS:
        cell = raw[name]
        try:
            values[name] = _value(name, cell)
        except (TypeError, ValueError):
            raise UsageError(f"{place}: {name} is {cell!r}; a number is needed") from None
    row = KernelRow(**values)
    for problem in _problems(row):
        raise UsageError(f"{place}: {problem}")
    return row


def _problems(row: KernelRow) -> Iterator[str]:
    """What makes a row unusable, in words."""
    for name, allowed in (
        ("method", tuple(METHODS)), ("phase", PHASES), ("state_dtype", STATE_DTYPES), ("timer", TIMERS),
    ):  # fmt: skip
        if getattr(row, name) not in allowed:
            yield f"{name} is {getattr(row, name)!r}; allowed are {', '.join(allowed)}"
    if row.timer == "chained" and row.phase != "step":
        yield f"timer is 'chained' and phase {row.phase!r}; only phase 'step' is timed chained"
    if min(row.key_heads, row.value_heads, row.head_dim, row.batch, row.rows) < 1:
        yield "heads, head_dim, batch and rows must be at least 1"
    if row.value_heads % row.key_heads:
        yield f"value_heads is {row.value_heads}; a multiple of key_heads ({row.key_heads}) is needed"
    if not row.tree.endswith(".json") and (rows := _tree_rows(row.tree)) != row.rows:
        yield f"rows is {row.rows}, but tree {row.tree!r} " + (f"has {rows}" if rows else "is not understood")
    times = {name: getattr(row, name) for name in ("latency_us_p20", "latency_us_p50", "latency_us_p80")}
    if any(value is not None for value in times.values()):
        for name, value in times.items():
            if value is None or not (math.isfinite(value) and value > 0):
                found = "missing" if value is None else value
                yield f"{name} is {found}; a positive number of microseconds is needed beside the other two"
        if not times["latency_us_p20"] <= times["latency_us_p50"] <= times["latency_us_p80"]:
            yield f"latencies p20, p50, p80 are {', '.join(map(str, times.values()))}; they must ascend"
    if min(row.samples, row.bytes_moved) < 0:
        yield f"samples is {row.samples} and bytes_moved {row.bytes_moved}; neither can be negative"
    percent = row.pct_copy_bandwidth
    if percent is not None and not (math.isfinite(percent) and percent >= 0):
        yield f"pct_copy_bandwidth is {percent}; a number from 0, or nothing, is needed"
    for name in ("rel_err_output", "rel_err_state"):
        if not getattr(row, name) >= 0:
            yield f"{name} is {getattr(row, name)}; a number from 0 (inf for no finite result) is needed"


@cache
def _tree_rows(text: str) -> int:
    """Rows of the tree that a text names; 0 for none. A tree from a JSON file may be told on its own machine only."""
    try:
        return parse_tree(text).num_rows
    except UsageError:
        return 0


def _value(name: str, cell: str | None) -> Any:
    if cell is None:
        raise ValueError(name)
    if name in _INTEGERS:
        return int(cell)
    if name in _OPTIONAL:
        return float(cell) if cell else None
    return float(cell) if name.startswith("rel_err") else cell
