"""The table of methods that were compared seed by seed."""

from __future__ import annotations

from collections.abc import Mapping
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
    """One method, tree, budget and load: its ratios to storeall as text, in the order of `titles`."""

    seeds: int
    method: str
    tree: str
    budget: str
    load: str
    ratios: tuple[str, ...]
    titles: tuple[str, ...] = tuple(TITLES.values())


def replication_rows(run: Run) -> list[PairedRow]:
    """The rows of run.json's paired comparison; none when the run has one seed."""
    rows: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for record in run.entries("replications"):
        for entry in record.get("paired", []):
            where = tuple(value for name, value in entry.items() if name not in ("metric", "ratio", "low", "high"))
            rows.setdefault(where, {})[str(entry["metric"])] = entry
    result = []
    for found in rows.values():
        entry = next(iter(found.values()))
        load = entry.get("max_concurrency") if entry.get("request_rate") is None else entry["request_rate"]
        result.append(
            PairedRow(
                int(entry["num_seeds"]),
                str(entry["state_method"]),
                str(entry["tree"]),
                plain(float(entry["gpu_memory_utilization"])),
                DASH if load is None else plain(float(load)),
                tuple(_text(found.get(metric)) for metric in TITLES),
            )
        )
    return result


def _text(entry: Mapping[str, Any] | None) -> str:
    return DASH if entry is None else f"{entry['ratio']:.3f} ({entry['low']:.3f} to {entry['high']:.3f})"
