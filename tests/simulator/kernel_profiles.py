"""A synthetic kernel profile on disk: step times that are linear in batch and rows, so that look-ups are known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from lab.profiles.rows import KernelRow, write_rows

BATCHES = (1, 8, 32, 128, 256)
CHAIN_ROWS = (1, 2, 4, 8)
TREE_ROWS = (8, 16, 32)


def step_us(batch: float, rows: float, value_heads: int = 32) -> float:
    """The time that the synthetic profile holds: bilinear in batch and rows, in proportion to heads."""
    return 2.0 + batch * (value_heads / 32) * (0.5 + 0.02 * rows)


def row(method: str, batch: int, rows: int, tree: str, **changed: object) -> KernelRow:
    """A row with a time, or without one where `latency_us_p50` is None; percentiles follow the median."""
    median = changed.get("latency_us_p50", step_us(batch, rows))
    spread = dict.fromkeys(("latency_us_p20", "latency_us_p80"))
    if isinstance(median, float | int):
        spread = {"latency_us_p20": 0.99 * median, "latency_us_p80": 1.01 * median}
    values: dict[str, object] = {
        "phase": "step", "key_heads": 16, "value_heads": 32, "head_dim": 128, "state_dtype": "float32",
        "timer": "graph", "latency_us_p50": median, **spread, "samples": 11, "bytes_moved": 1000,
        "pct_copy_bandwidth": 50.0, "rel_err_output": 1e-3, "rel_err_state": 1e-6,
    } | changed  # fmt: skip
    return KernelRow(method=method, batch=batch, rows=rows, tree=tree, **values)  # type: ignore[arg-type]


def grid_rows(methods: Iterable[str] = ("treelog", "treewy", "storeall")) -> list[KernelRow]:
    """Steps of tree methods on chains and trees, and of plain decoding on one row."""
    found = [row(method, b, n, f"chain:{n - 1}") for method in methods for b in BATCHES for n in CHAIN_ROWS]
    found += [row(method, b, n, f"{n - 1}") for method in methods for b in BATCHES for n in TREE_ROWS]
    return found + [row(method, b, 1, "chain:0") for method in ("recurrent", "deltalog") for b in BATCHES]


def write_profile(folder: Path, rows: Iterable[KernelRow] | None = None, **device: object) -> Path:
    """A profile folder; `device` adds to or replaces fields of device.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.csv").write_text(write_rows(grid_rows() if rows is None else rows), encoding="utf-8")
    record = {
        "schema_version": 1, "name": "NVIDIA H200", "backend": "cuda", "source_hash": "abc", "stale_reason": None,
        "copy_bandwidth_bytes_per_s": 10**12,
    } | device  # fmt: skip
    (folder / "device.json").write_text(json.dumps(record), encoding="utf-8")
    return folder
