"""Two results side by side, row by row: SAME, FASTER, SLOWER, or AMBIGUOUS where they do not tell.

Benches are compared by `kernels.csv` (medians and their 20th to 80th percentile), runs of the simulator by
`summary.csv` (throughput and latencies, which have no spread).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lab.errors import UsageError
from lab.profiles.folders import ROWS_FILE
from lab.profiles.rows import KEY_COLUMNS, KernelRow, read_rows

SUMMARY_FILE = "summary.csv"
Verdict = Literal["SAME", "FASTER", "SLOWER", "AMBIGUOUS"]

#: The ratio of two times is known too badly to call them the same when its range is wider than this.
WIDEST = 0.2
#: Columns of summary.csv that judge a cell, and whether more is better.
METRICS = {"output_throughput": True, "mean_ttft_ms": False, "mean_tpot_ms": False}


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of both results. `ratio` is time in B over time in A (None without both times)."""

    key: tuple[Any, ...]
    verdict: Verdict
    ratio: float | None
    note: str
    worse: bool = False

    def to_json(self, columns: Sequence[str]) -> dict[str, Any]:
        key = dict(zip(columns, self.key, strict=True))
        return {**key, "verdict": self.verdict, "ratio": self.ratio, "note": self.note}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All common rows, and the keys that only one side has."""

    kind: Literal["bench", "run"]
    columns: tuple[str, ...]
    rows: tuple[Compared, ...]
    only_a: tuple[tuple[Any, ...], ...]
    only_b: tuple[tuple[Any, ...], ...]

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def any_worse(self) -> bool:
        """Whether a row is slower in B, or lost its time there to a red gate."""
        return any(row.worse for row in self.rows)


def compare(a: Path, b: Path, tolerance: float = 0.02) -> Comparison:
    """Compare two bench folders, two run directories, or the CSV files in them.

    `tolerance` is the relative difference that does not matter. Raises `UsageError` for anything else, and when the two
    share no row.
    """
    file_a, file_b = _file(a), _file(b)
    if file_a.name != file_b.name:
        raise UsageError(f"{a} holds {file_a.name} and {b} {file_b.name}; compare two benches or two runs")
    if file_a.name == ROWS_FILE:
        kind: Literal["bench", "run"] = "bench"
        columns = KEY_COLUMNS
        rows_a, rows_b = ({row.key: row for row in read_rows(file)} for file in (file_a, file_b))
        found = _join(rows_a, rows_b, lambda key, x, y: _compare_rows(key, x, y, tolerance))
    else:
        kind = "run"
        cells_a, cells_b, columns = _cells(file_a, file_b)
        found = _join(cells_a, cells_b, lambda key, x, y: _compare_cells(key, x, y, tolerance))
    compared, only_a, only_b = found
    if not compared:
        raise UsageError(f"{a} and {b} have no row in common")
    return Comparison(kind, columns, compared, only_a, only_b)


def verdict_of(a: KernelRow, b: KernelRow, tolerance: float) -> Verdict:
    """Verdict on two rows with times.

    A clear difference: the medians differ by more than the tolerance and the two spreads (p20 to p80) do not overlap.
    The same: the medians differ by no more than the tolerance, and the ratio is known within `WIDEST`.
    """
    times = [value for row in (a, b) for value in (row.latency_us_p20, row.latency_us_p50, row.latency_us_p80)]
    a20, a50, a80, b20, b50, b80 = (float(value) for value in times if value is not None)
    ratio, lowest, highest = b50 / a50, b20 / a80, b80 / a20
    if ratio < 1 - tolerance and highest < 1:
        return "FASTER"
    if ratio > 1 + tolerance and lowest > 1:
        return "SLOWER"
    if abs(ratio - 1) <= tolerance and highest - lowest <= WIDEST:
        return "SAME"
    return "AMBIGUOUS"


def _compare_rows(key: tuple[Any, ...], a: KernelRow, b: KernelRow, tolerance: float) -> Compared:
    if a.latency_us_p50 is None or b.latency_us_p50 is None:
        red = [name for name, row in (("A", a), ("B", b)) if row.latency_us_p50 is None]
        lost = red == ["B"]
        return Compared(key, "AMBIGUOUS", None, f"gate red in {' and '.join(red)}", worse=lost)
    verdict = verdict_of(a, b, tolerance)
    note = f"{a.latency_us_p50:,.1f} -> {b.latency_us_p50:,.1f} us"
    return Compared(key, verdict, b.latency_us_p50 / a.latency_us_p50, note, worse=verdict == "SLOWER")


def _compare_cells(key: tuple[Any, ...], a: Mapping[str, float], b: Mapping[str, float], tolerance: float) -> Compared:
    """A cell is better or worse when a metric moves and none moves the other way."""
    times: dict[str, float] = {}
    for name, more_is_better in METRICS.items():
        old, new = a[name], b[name]
        if math.isfinite(old) and math.isfinite(new) and old > 0 and new > 0:
            times[name] = old / new if more_is_better else new / old
    better = any(ratio < 1 - tolerance for ratio in times.values())
    worse = any(ratio > 1 + tolerance for ratio in times.values())
    verdict: Verdict = "AMBIGUOUS" if better == worse else "FASTER" if better else "SLOWER"
    if times and not better and not worse:
        verdict = "SAME"
    note = ", ".join(f"{name} {a[name]:,.1f} -> {b[name]:,.1f}" for name in METRICS)
    return Compared(key, verdict, times.get("output_throughput"), note, worse=verdict == "SLOWER")


def _join(
    a: Mapping[Any, Any], b: Mapping[Any, Any], judge: Callable[[tuple[Any, ...], Any, Any], Compared]
) -> tuple[tuple[Compared, ...], tuple[Any, ...], tuple[Any, ...]]:
    common = tuple(judge(key, a[key], b[key]) for key in a if key in b)
    return common, tuple(key for key in a if key not in b), tuple(key for key in b if key not in a)


def _file(path: Path) -> Path:
    """The CSV file that a folder holds, or the file itself."""
    if path.is_file() and path.name in (ROWS_FILE, SUMMARY_FILE):
        return path
    for name in (ROWS_FILE, SUMMARY_FILE):
        if (path / name).is_file():
            return path / name
    raise UsageError(f"{path} holds neither {ROWS_FILE} (a bench) nor {SUMMARY_FILE} (a run)")


def _cells(a: Path, b: Path) -> tuple[dict[Any, Any], dict[Any, Any], tuple[str, ...]]:
    """Metrics of both runs by what their cells simulated, and the names of those fields.

    Fields that are the same in every cell of both runs are left out of the key.
    """
    raw_a, raw_b = _read_summary(a), _read_summary(b)
    names = [name for name in raw_a[0] if name in raw_b[0]]
    scenario = names[: names.index("seed") + 1] if "seed" in names else []
    scenario = [name for name in scenario if name != "cell"]
    columns = tuple(name for name in scenario if len({row[name] for row in (*raw_a, *raw_b)}) > 1) or ("model",)
    return _by_key(raw_a, columns, a), _by_key(raw_b, columns, b), columns


def _by_key(rows: Sequence[Mapping[str, str]], columns: Sequence[str], path: Path) -> dict[Any, dict[str, float]]:
    found: dict[Any, dict[str, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in columns)
        if key in found:
            raise UsageError(f"{path} holds two cells that simulate the same: {', '.join(key)}")
        found[key] = {name: _number(row[name], name, path) for name in METRICS}
    return found


def _read_summary(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    missing = [name for name in ("model", *METRICS) if not rows or name not in rows[0]]
    if missing:
        raise UsageError(f"{path} is no summary of a run: it has no rows with {', '.join(missing)}")
    return rows


def _number(text: str, name: str, path: Path) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise UsageError(f"{path}: {name} is {text!r}; a number is needed") from None
