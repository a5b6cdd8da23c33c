"""What the record of a GPU run says: correctness, drift and step times of the kernels, for `docs/validation.md`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lab

H200 = Path(lab.__file__).parent / "profiles" / "h200"
#: Rows and methods of the table of step times: heads 16/32, fp32 state, microseconds per layer.
STEP_ROWS = (
    ("recurrent", 1),
    ("deltalog", 1),
    ("storeall", 4),
    ("replayssm", 4),
    ("treewy", 4),
    ("treelog", 4),
    ("storeall", 16),
    ("bole", 16),
    ("treewy", 16),
    ("treelog", 16),
    ("treelog", 32),
    ("treelog", 64),
)
STEP_BATCHES = (1, 8, 32, 128, 256)


def device(folder: Path = H200) -> dict[str, Any]:
    """The device record of a profile."""
    record: dict[str, Any] = json.loads((folder / "device.json").read_text(encoding="utf-8"))
    return record


def gate(folder: Path = H200) -> list[dict[str, Any]]:
    """Cases, trees and worst errors of the correctness gate, by method and state dtype."""
    summary = json.loads((folder / "gate.json").read_text(encoding="utf-8"))["summary"]
    return [{"name": name, **worst} for name, worst in summary.items()]


def drift(folder: Path = H200) -> list[dict[str, Any]]:
    """State error over a closed loop of 10,000 steps, by group and method, with the ratio to plain fp32."""
    rows: list[dict[str, Any]] = json.loads((folder / "drift.json").read_text(encoding="utf-8"))["rows"]
    return [{**row, "error": dict(zip(row["steps"], row["state_error"], strict=True))} for row in rows]


def sanitizer(folder: Path = H200) -> str:
    """The log summary of compute-sanitizer."""
    return (folder / "sanitizer.txt").read_text(encoding="utf-8").strip()


def step_times(folder: Path = H200) -> list[dict[str, Any]]:
    """Median step times of `STEP_ROWS` at `STEP_BATCHES`, and the percentage of copy bandwidth at the last."""
    times: dict[tuple[str, int, int], dict[str, str]] = {}
    with (folder / "kernels.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = (row["key_heads"], row["value_heads"], row["head_dim"], row["state_dtype"])
            if (row["phase"], row["timer"]) == ("step", "graph") and shape == ("16", "32", "128", "float32"):
                times[row["method"], int(row["rows"]), int(row["batch"])] = row
    return [
        {
            "method": method,
            "rows": rows,
            "us": [float(times[method, rows, batch]["latency_us_p50"]) for batch in STEP_BATCHES],
            "percent": float(times[method, rows, STEP_BATCHES[-1]]["pct_copy_bandwidth"]),
        }
        for method, rows in STEP_ROWS
    ]
