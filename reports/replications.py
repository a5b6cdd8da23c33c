"""The table of methods that were compared seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.data import Run
from reports.text import DASH, plain

TITLES = {
    "output_throughput": "output throughput",
    "mean_ttft_ms": "mean TTFT",
    "p99_ttft_ms": "p99 TTFT",
    "mean_tpot_ms": "mean TPOT",
    "mean_e2el_ms": "mean E2EL",
}


@dataclass(frozen=True, slots=True)
class PairedRow:
    """One method under one setting: its ratios to storeall as text, in the order of `titles`.

    `setting` are the values of what the compared cells differ in besides the method, by the names in `columns`.
    """

    seeds: int
    method: str
    columns: tuple[str, ...]
    setting: tuple[str, ...]
    ratios: tuple[str, ...]
    titles: tuple[str, ...] = tuple(TITLES.values())


def replication_rows(run: Run) -> list[PairedRow]:
    """The rows of run.json's paired comparison; none when the run has one seed."""
    rows: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for record in run.entries("replications"):
        for entry in record.get("paired", []):
            where = tuple(value for name, value in entry.items() if name not in ("metric", "ratio", "low", "high"))
            rows.setdefault(where, {})[str(entry["metric"])] = entry
    firsts = [next(iter(found.values())) for found in rows.values()]
    columns = _varying(firsts)
    return [
        PairedRow(
            int(entry["num_seeds"]),
            str(entry["state_method"]),
            tuple(columns),
            tuple(_value(entry.get(name)) for name in columns),
            tuple(_text(found.get(metric)) for metric in TITLES),
        )
        for entry, found in zip(firsts, rows.values(), strict=True)
    ]


def _varying(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Columns that tell the rows apart, and the tree and load in any case."""
    told = ("state_method", "metric", "num_seeds", "ratio", "low", "high")
    names = dict.fromkeys(name for entry in entries for name in entry if name not in told)
    return [
        name
        for name in names
        if len({str(entry.get(name)) for entry in entries}) > 1
        or name == "tree"
        or (name in ("max_concurrency", "request_rate") and any(entry.get(name) is not None for entry in entries))
    ]


def _value(value: Any) -> str:
    if value is None:
        return DASH
    return plain(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _text(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return DASH
    interval = DASH if entry["low"] is None else f"{entry['low']:.3f} to {entry['high']:.3f}"
    return f"{entry['ratio']:.3f} ({interval})"
