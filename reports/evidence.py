"""What the record of a GPU run says: correctness, drift and step times of the kernels, for `docs/validation.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lab
from lab.errors import UsageError
from lab.profiles.folders import ROWS_FILE
from lab.profiles.rows import read_rows

H200 = Path(lab.__file__).parent / "profiles" / "h200"
#: Methods and trees of the table of step times: heads 16/32, fp32 state, microseconds per layer.
STEPS = (
    ("recurrent", "chain:0"),
    ("deltalog", "chain:0"),
    ("storeall", "chain:3"),
    ("replayssm", "chain:3"),
    ("treewy", "chain:3"),
    ("treelog", "chain:3"),
    ("storeall", "binary:15"),
    ("bole", "binary:15"),
    ("treewy", "binary:15"),
    ("treelog", "binary:15"),
    ("treelog", "binary:31"),
    ("treelog", "binary:63"),
)
STEP_BATCHES = (1, 8, 32, 128, 256)
#: The gate's record of kernels compiled as for a GPU of compute capability 8.0.
OLDER_GPU = "gate_sm80"


def device(folder: Path = H200) -> dict[str, Any]:
    """The device record of a profile."""
    return _record(folder, "device")


def _record(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} is missing; give a folder with a profile and its records") from None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON text: {error}; write it again") from None
    return record


def gate(folder: Path = H200) -> list[dict[str, Any]]:
    """Cases, trees and worst errors of the correctness gate, by method and state dtype."""
    return [{"name": name, **worst} for name, worst in _record(folder, "gate")["summary"].items()]


def chained(folder: Path = H200) -> str:
    """What the gate found of chained launches, in a sentence; nothing where it ran none."""
    found = _record(folder, "gate").get("chained")
    if not found:
        return ""
    red = [entry for entry in found if entry["differs"]]
    if not red:
        return (
            f"Chained launches wrote what the same launches write one after another, bit for bit, in all {len(found)} "
            "cases that were compared."
        )
    places = "; ".join(
        f"{entry['method']} {entry['tree']}, batch {entry['batch']}, heads {entry['heads']}, {entry['state_dtype']}"
        for entry in red
    )
    return (
        f"**Chained launches differ from the same launches one after another in {len(red)} of {len(found)} cases** "
        f"({places})."
    )


def for_older_gpus(folder: Path = H200) -> str:
    """What the gate found of kernels without Hopper's instructions, in a sentence; nothing where that was not run."""
    if not (folder / f"{OLDER_GPU}.json").is_file():
        return ""
    record = _record(folder, OLDER_GPU)
    if not record["cases"]:
        return ""
    red = sum(bool(case["failed"]) for case in record["cases"])
    trees = sum(case["trees"] for case in record["cases"])
    return (
        f"{record['device']} (`gate --quick --ptx 80`): {len(record['cases'])} cases with {trees:,} trees, "
        f"{red or 'none'} red."
    )


def counters(folder: Path = H200) -> dict[str, Any]:
    """Counters, clock and power of the main cells (`kernels_cupy.counters`); empty where they were not taken."""
    return _record(folder, "counters") if (folder / "counters.json").is_file() else {}


def drift(folder: Path = H200) -> list[dict[str, Any]]:
    """State error over a closed loop of 10,000 steps, by decay, tree and method, with the ratio to plain fp32."""
    rows = [row for row in _loops(folder) if row["state_dtype"] == "float32"]
    return [{**row, "error": dict(zip(row["steps"], row["state_error"], strict=True))} for row in rows]


def bf16_drift(folder: Path = H200) -> list[dict[str, Any]]:
    """The same of bf16 states over 2,000 steps, with the ratio to storeall."""
    return [row for row in _loops(folder) if row["state_dtype"] == "bfloat16"]


def _loops(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _record(folder, "drift")["rows"]
    return rows


def decays(folder: Path = H200) -> dict[str, list[float]]:
    """Slowest and fastest decay of a step by name of the closed loops' regimes."""
    found: dict[str, list[float]] = _record(folder, "drift")["decays"]
    return found


def sanitizer(folder: Path = H200) -> str:
    """The log summary of compute-sanitizer."""
    return (folder / "sanitizer.txt").read_text(encoding="utf-8").strip()


def step_times(folder: Path = H200) -> list[dict[str, Any]]:
    """Median step times of `STEPS` at `STEP_BATCHES`, and the percentage of copy bandwidth at the last."""
    times = {
        (row.method, row.tree, row.batch): row
        for row in read_rows(folder / ROWS_FILE)
        if (row.phase, row.timer, row.key_heads, row.value_heads, row.state_dtype)
        == ("step", "graph", 16, 32, "float32")
    }
    return [
        {
            "method": method,
            "tree": tree,
            "rows": times[method, tree, STEP_BATCHES[0]].rows,
            "us": [times[method, tree, batch].latency_us_p50 for batch in STEP_BATCHES],
            "percent": times[method, tree, STEP_BATCHES[-1]].pct_copy_bandwidth,
        }
        for method, tree in STEPS
    ]


def alone(folder: Path = H200) -> dict[str, dict[str, tuple[float, float]]]:
    """Lowest and highest % of copy bandwidth of a phase alone at batch 256, heads 16/32, any tree, by state type."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in read_rows(folder / ROWS_FILE):
        wanted = (row.batch, row.key_heads, row.value_heads) == (256, 16, 32)
        if wanted and (row.method, row.phase) in (("bole", "commit"), ("treelog", "flush")):
            if row.pct_copy_bandwidth is not None:
                found.setdefault(row.phase, {}).setdefault(row.state_dtype, []).append(row.pct_copy_bandwidth)
    return {
        phase: {dtype: (min(values), max(values)) for dtype, values in by_dtype.items()}
        for phase, by_dtype in found.items()
    }


def spread(folder: Path = H200) -> dict[str, Any]:
    """Distance of the 20th and 80th percentile over the median: of the median and the worst row, and which that is."""
    rows = read_rows(folder / ROWS_FILE)
    timed = [
        ((row.latency_us_p80 - row.latency_us_p20) / row.latency_us_p50, row)
        for row in rows
        if row.latency_us_p50 and row.latency_us_p20 and row.latency_us_p80
    ]
    timed.sort(key=lambda pair: pair[0])
    worst, row = timed[-1]
    return {
        "median": timed[len(timed) // 2][0],
        "worst": worst,
        "worst_row": f"{row.phase} of {row.method}, {row.tree}, batch {row.batch}, {row.latency_us_p50:.1f} µs",
        "rows": len(rows),
        "samples": min(row.samples for row in rows),
    }
