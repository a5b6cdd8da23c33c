"""The rows of `plans.csv`: which way to cut a verification was the fastest, at every place where all were timed.

`treewy bench --tune` writes the file; a shipped one lies beside the profile of its GPU. Ways are known by name alone
here, of the form `PLAN_NAME`; `kernels_cupy` has them. A place that was not measured takes the way of a near one, see
`PlanTable.nearest`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.errors import UsageError
from lab.methods.protocol import STATE_DTYPES
from lab.profiles.folders import GPU_NAMES, SHIPPED, operator_tables
from lab.profiles.tables import table_lines

PLANS_FILE = "plans.csv"
#: Upper ends of the classes of tree rows and log rows; kernels of one class are compiled nearly alike.
ROW_CLASSES = (1, 2, 4, 8, 16, 32, 64)
LOG_CLASSES = (0, 16, 32, 64)
#: Head widths that the kernels are written for.
HEAD_DIMS = (64, 128)
#: Kernels that a name may start with; a new one is added here. `-` and a letter with a number follow, for each choice.
PLAN_KERNELS = ("block", "stream", "wide", "lanes")
PLAN_NAME = re.compile(rf"(?:{'|'.join(PLAN_KERNELS)})(?:-[a-z]\d*)+")


class SizeClass(NamedTuple):
    """What a place must share with another one to lend it a plan; rows are upper ends."""

    head_dim: int
    state_dtype: str
    rows: int
    log_rows: int


@dataclass(frozen=True, slots=True)
class Place:
    """One verification: heads of a rank, requests, tree rows, rows that its log can hold and how it keeps them."""

    key_heads: int
    value_heads: int
    head_dim: int
    state_dtype: str
    log_bf16: bool
    batch: int
    rows: int
    log_rows: int

    @property
    def size_class(self) -> SizeClass:
        rows = next((end for end in ROW_CLASSES if self.rows <= end), ROW_CLASSES[-1])
        log_rows = next((end for end in LOG_CLASSES if self.log_rows <= end), LOG_CLASSES[-1])
        return SizeClass(self.head_dim, self.state_dtype, rows, log_rows)

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    def __str__(self) -> str:
        log = f"log of {self.log_rows}{' bf16' if self.log_bf16 else ''} rows" if self.log_rows else "no log"
        heads = f"heads {self.key_heads}/{self.value_heads} of {self.head_dim}"
        return f"{heads}, {self.state_dtype}, batch {self.batch}, {self.rows} rows, {log}"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The fastest plan at a place and the next one, with their medians in microseconds per layer and step.

    Where a place has one plan only, it is its own runner-up.
    """

    place: Place
    plan: str
    latency_us: float
    runner_up: str
    runner_up_us: float


PLACE_COLUMNS = tuple(field.name for field in fields(Place))
COLUMNS = (*PLACE_COLUMNS, *(field.name for field in fields(PlanRow) if field.name != "place"))


class PlanTable:
    """Measured plans by place; raises `UsageError` when a place comes twice."""

    def __init__(self, rows: Iterable[PlanRow]) -> None:
        self.rows = tuple(rows)
        self._by_class: dict[SizeClass, list[PlanRow]] = {}
        seen: set[Place] = set()
        for row in self.rows:
            if row.place in seen:
                raise UsageError(f"{PLANS_FILE} holds a place twice: {row.place}; remove one of the rows")
            seen.add(row.place)
            self._by_class.setdefault(row.place.size_class, []).append(row)

    def nearest(self, place: Place) -> list[PlanRow]:
        """Rows of the place's size class, the nearest first.

        Logs kept in the same type come before all others. Then counts the ratio of the work, batch times value heads;
        between equal ones the same group of heads, then the sizes nearest to the place's own.
        """

        def distance(row: PlanRow) -> tuple[object, ...]:
            other = row.place
            work = abs(math.log(other.batch * other.value_heads) - math.log(place.batch * place.value_heads))
            return (
                other != place, other.log_bf16 != place.log_bf16, work, other.group != place.group,
                abs(other.rows - place.rows), abs(other.log_rows - place.log_rows), other.batch, other.rows,
                other.log_rows, other.key_heads,
            )  # fmt: skip

        return sorted(self._by_class.get(place.size_class, ()), key=distance)


def shipped_tables() -> dict[str, Path]:
    """The plan tables that the package ships, by the name of their GPU."""
    paths = {gpu: SHIPPED / gpu / PLANS_FILE for gpu in GPU_NAMES}
    return {gpu: path for gpu, path in paths.items() if path.is_file()}


def table_of(device_name: str) -> PlanTable | None:
    """The shipped table of the GPU that calls itself so; None when it has none."""
    path = shipped_tables().get(operator_tables({"name": device_name}) or "")
    return None if path is None else _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, stamp: int) -> PlanTable:
    return read_plans(path)


def write_plans(rows: Iterable[PlanRow]) -> str:
    """The text of `plans.csv`, in the order of the places."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([*_place_cells(row.place), *_plan_cells(row)] for row in sorted(rows, key=_order))
    return text.getvalue()


def _order(row: PlanRow) -> tuple[int | str, ...]:
    return tuple(_place_cells(row.place))


def _place_cells(place: Place) -> list[int | str]:
    return [int(cell) if isinstance(cell := getattr(place, name), bool) else cell for name in PLACE_COLUMNS]


def _plan_cells(row: PlanRow) -> list[int | str]:
    return [row.plan, f"{row.latency_us:.3f}", row.runner_up, f"{row.runner_up_us:.3f}"]


def read_plans(path: Path) -> PlanTable:
    """The table in a `plans.csv`; raises `UsageError` naming file, line and field for anything else."""
    try:
        table = PlanTable(_row(raw, line) for line, raw in table_lines(path, COLUMNS, PLANS_FILE))
    except UsageError as error:
        raise error if str(path) in str(error) else UsageError(f"{path}: {error}") from None
    if not table.rows:
        raise UsageError(f"{path} holds no plan; run treewy bench --tune again, or remove it")
    return table


def _row(raw: dict[str, str], line: str) -> PlanRow:
    numbers: dict[str, int] = {}
    for name in PLACE_COLUMNS:
        if name != "state_dtype":
            lowest = 0 if name in ("log_bf16", "log_rows") else 1
            if not re.fullmatch(r"[0-9]{1,12}", raw[name] or "") or int(raw[name]) < lowest:
                raise UsageError(f"{line}: {name} is {str(raw[name])[:20]!r}; a whole number from {lowest} is needed")
            numbers[name] = int(raw[name])
    if raw["state_dtype"] not in STATE_DTYPES:
        raise UsageError(f"{line}: state_dtype is {raw['state_dtype']!r}; allowed are {', '.join(STATE_DTYPES)}")
    if numbers["value_heads"] % numbers["key_heads"]:
        raise UsageError(f"{line}: value_heads is {numbers['value_heads']}; a multiple of key_heads is needed")
    if numbers["log_bf16"] > 1:
        raise UsageError(f"{line}: log_bf16 is {numbers['log_bf16']}; 0 or 1 is needed")
    if numbers["head_dim"] not in HEAD_DIMS:
        raise UsageError(f"{line}: head_dim is {numbers['head_dim']}; allowed are {', '.join(map(str, HEAD_DIMS))}")
    for name, classes in (("rows", ROW_CLASSES), ("log_rows", LOG_CLASSES)):
        if numbers[name] > classes[-1]:
            raise UsageError(f"{line}: {name} is {numbers[name]}; at most {classes[-1]} is possible")
    times = dict(_times(raw, line))
    place = Place(
        numbers["key_heads"], numbers["value_heads"], numbers["head_dim"], raw["state_dtype"],
        bool(numbers["log_bf16"]), numbers["batch"], numbers["rows"], numbers["log_rows"],
    )  # fmt: skip
    for name in ("plan", "runner_up"):
        if not PLAN_NAME.fullmatch(raw[name] or ""):
            found = f"is {raw[name]!r}" if raw[name] else "is missing"
            kernels = ", ".join(PLAN_KERNELS)
            raise UsageError(
                f"{line}: {name} {found}; the name of a plan is needed: one of {kernels}, then its choices as in "
                "stream-w4-t2-s1-r16"
            )
    if times["runner_up_us"] < times["latency_us"]:
        raise UsageError(f"{line}: the runner-up takes {times['runner_up_us']:g} us, less than the plan; swap the two")
    return PlanRow(place, raw["plan"], times["latency_us"], raw["runner_up"], times["runner_up_us"])


def _times(raw: dict[str, str], line: str) -> Iterator[tuple[str, float]]:
    for name in ("latency_us", "runner_up_us"):
        try:
            value = float(raw[name])
        except (TypeError, ValueError):
            value = math.nan
        if not 0 < value < math.inf:
            raise UsageError(f"{line}: {name} is {raw[name]!r}; a positive number of microseconds is needed")
        yield name, value
