"""Two results side by side, row by row: SAME, FASTER, SLOWER, or AMBIGUOUS where they do not tell.

Benches are compared by `kernels.csv` (medians and their 20th to 80th percentile), runs of the simulator by
`summary.csv` (throughput and latencies, which have no spread).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lab.bench.results import earlier_runs
from lab.errors import UsageError
from lab.profiles.folders import DEVICE_FILE, ROWS_FILE, find_profile, is_profile
from lab.profiles.kernels import load_profile
from lab.profiles.rows import KEY_COLUMNS, KernelRow

SUMMARY_FILE = "summary.csv"
Verdict = Literal["SAME", "FASTER", "SLOWER", "AMBIGUOUS"]

#: The ratio of two times is known too badly to call them the same when its range is wider than this.
WIDEST = 0.2
#: Columns of summary.csv that judge a cell, and whether more is better.
METRICS = {"output_throughput": True, "mean_ttft_ms": False, "mean_tpot_ms": False}
#: Fields of device.json in which two benches should agree.
SAME_FIELDS = ("name", "threads", "source_hash")
#: Copies of one machine that differ by more than this share say that the machine was not the same.
COPY_TOLERANCE = 0.1


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
    """All common rows, the keys that only one side has, and what makes two benches hard to compare."""

    kind: Literal["bench", "run"]
    columns: tuple[str, ...]
    rows: tuple[Compared, ...]
    only_a: tuple[tuple[Any, ...], ...]
    only_b: tuple[tuple[Any, ...], ...]
    warnings: tuple[str, ...] = ()

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def any_worse(self) -> bool:
        """Whether a row is slower in B, or lost its time there to a red gate."""
        return any(row.worse for row in self.rows)


def compare(a: Path, b: Path, tolerance: float = 0.02) -> Comparison:
    """Compare two bench folders, two run directories, the CSV files in them, or profiles by their names.

    `tolerance` is the relative difference that does not matter. Raises `UsageError` for anything else, and when the two
    share no row.
    """
    file_a, file_b = _file(a), _file(b)
    if file_a.name != file_b.name:
        raise UsageError(f"{a} holds {file_a.name} and {b} {file_b.name}; compare two benches or two runs")
    warnings: tuple[str, ...] = ()
    if file_a.name == ROWS_FILE:
        kind: Literal["bench", "run"] = "bench"
        columns = KEY_COLUMNS
        bench_a, bench_b = (load_profile(file.parent) for file in (file_a, file_b))
        warnings = tuple(_differences(bench_a.device, bench_b.device))
        rows_a, rows_b = ({row.key: row for row in bench.rows} for bench in (bench_a, bench_b))
        found = _join(rows_a, rows_b, lambda key, x, y: _compare_rows(key, x, y, tolerance))
    else:
        kind = "run"
        rows_a, rows_b, columns = _cells(file_a, file_b)
        found = _join(rows_a, rows_b, lambda key, x, y: _compare_cells(key, x, y, tolerance))
    compared, only_a, only_b = found
    if not compared:
        raise UsageError(f"{a} and {b} have no row in common: {_apart(columns, only_a, only_b)}")
    return Comparison(kind, columns, compared, only_a, only_b, warnings)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What two `device.json` say against comparing their times."""
    for name in SAME_FIELDS:
        if a.get(name) != b.get(name):
            yield f"{name} differs: {a.get(name)} in A, {b.get(name)} in B"
    name = "copy_bandwidth_bytes_per_s"
    rates = [[run[name] for run in earlier_runs(each) if name in run] or [each[name]] for each in (a, b)]
    if max(map(max, rates)) > (1 + COPY_TOLERANCE) * min(map(min, rates)):
        told = [" and ".join(f"{rate / 1e9:,.1f}" for rate in each) for each in rates]
        yield f"copies ran at {told[0]} GB/s in A, {told[1]} GB/s in B; one machine was not like the other"
    for side, each in (("A", a), ("B", b)):
        loads = [run["load_average"][0] for run in (each, *earlier_runs(each)) if run.get("load_average")]
        if loads and max(loads) > 0.5 * each.get("cores", math.inf):
            yield f"{side} was measured on a busy machine (load {max(loads)} on {each['cores']} cores)"


def _apart(columns: Sequence[str], a: Sequence[tuple[Any, ...]], b: Sequence[tuple[Any, ...]]) -> str:
    """The key columns in which no row of one side meets one of the other, and their values."""
    parts = []
    for place, name in enumerate(columns):
        left, right = (list(dict.fromkeys(str(key[place]) for key in side)) for side in (a, b))
        if not set(left) & set(right):
            parts.append(f"{name} is {', '.join(left)} in A and {', '.join(right)} in B")
    return "; ".join(parts) or "every value of a column occurs in both, but never beside the same others"


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
    """A cell is better or worse when a metric moves, none moves the other way, and none is known on one side only."""
    times: dict[str, float] = {}
    for name, more_is_better in METRICS.items():
        old, new = a[name], b[name]
        if not (math.isnan(old) or math.isnan(new)):
            times[name] = old / new if more_is_better else new / old
    lost = any(math.isnan(a[name]) != math.isnan(b[name]) for name in METRICS)
    better = any(ratio < 1 - tolerance for ratio in times.values())
    worse = any(ratio > 1 + tolerance for ratio in times.values())
    verdict: Verdict = "AMBIGUOUS" if lost or better == worse else "FASTER" if better else "SLOWER"
    if not (better or worse or lost):
        verdict = "SAME"
    note = ", ".join(f"{name} {a[name]:,.1f} -> {b[name]:,.1f}" for name in METRICS)
    return Compared(key, verdict, times.get("output_throughput"), note, worse=verdict == "SLOWER")


def _join(
    a: Mapping[Any, Any], b: Mapping[Any, Any], judge: Callable[[tuple[Any, ...], Any, Any], Compared]
) -> tuple[tuple[Compared, ...], tuple[Any, ...], tuple[Any, ...]]:
    common = tuple(judge(key, a[key], b[key]) for key in a if key in b)
    return common, tuple(key for key in a if key not in b), tuple(key for key in b if key not in a)


def _file(path: Path) -> Path:
    """The CSV file that a folder or a profile's name stands for, or the file itself."""
    folder = path if path.exists() else find_profile(str(path))
    if folder is None:
        raise UsageError(f"{path} does not exist, and no profile has this name; give a bench, a run or a profile")
    if folder.is_file() and folder.name in (ROWS_FILE, SUMMARY_FILE):
        file = folder
    else:
        files = [folder / name for name in (ROWS_FILE, SUMMARY_FILE) if (folder / name).is_file()]
        if not files:
            raise UsageError(f"{path} holds neither {ROWS_FILE} (a bench) nor {SUMMARY_FILE} (a run)")
        file = files[0]
    if file.name == ROWS_FILE and not is_profile(file.parent):
        raise UsageError(f"{file.parent} lacks {DEVICE_FILE}, which says where {ROWS_FILE} was measured; put it back")
    return file


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
    """A metric; a latency may be empty or NaN, where no request had one."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = -1.0
    if 0 < value < math.inf or (math.isnan(value) and name != "output_throughput"):
        return value
    raise UsageError(f"{path}: {name} is {text!r}; a positive number is needed")
