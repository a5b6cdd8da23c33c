"""Measures the state methods on this GPU: the gate first, then every phase on a grid of shapes, into `kernels.csv`.

`python -m kernels_cupy.bench --out DIR [--heads 16x32,16x48] [--state-dtypes float32] [--limit-s 500]`

Times are per layer. A launch sequence covers several layers with memory of their own (more than twice the L2 cache in
all), is captured into a CUDA graph and replayed; what a model does once per step for all layers is shared among the
layers of the sequence. A shape whose gate is red gets no time.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels_cupy import gate
from kernels_cupy.closed_form import VerifyPlan
from kernels_cupy.compiler import load_cupy
from kernels_cupy.device import clocks, device_record
from kernels_cupy.steps import CUDA_METHODS, LOG_METHODS, Shape, Step
from kernels_cupy.timer import copy_bandwidth, time_eager, time_graph
from lab.errors import MissingError
from lab.methods.base import LayerHeads
from lab.trees import DraftTree

HEADS = ("16x32", "16x48", "16x64", "2x8")
BATCHES = (1, 8, 32, 64, 128, 256, 512)
ROWS = (1, 2, 4, 8, 15, 16, 32, 40, 64)
#: Layers of a sequence hold at least this much state together.
COLD_BYTES = 256_000_000
#: Largest layer that is measured.
MAX_LAYER_BYTES = 20_000_000_000
COLUMNS = (
    "method", "phase", "key_heads", "value_heads", "head_dim", "state_dtype", "batch", "rows", "tree", "timer",
    "latency_us_p50", "latency_us_p20", "latency_us_p80", "samples", "bytes_moved", "pct_copy_bandwidth",
    "rel_err_output", "rel_err_state",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds for each timing, and for the whole run."""

    timing_s: float
    end: float

    @property
    def spent(self) -> bool:
        return time.perf_counter() > self.end


def tree_of(rows: int) -> tuple[str, DraftTree]:
    """A chain up to 8 rows, a complete binary tree above: 15 rows are `2,2,2`; 40 rows are `3,3,3`."""
    if rows <= 8:
        return "chain", DraftTree.chain(rows - 1)
    if rows == 40:
        return "3,3,3", DraftTree.from_widths([3, 3, 3])
    return "binary", DraftTree((-1, *((row - 1) // 2 for row in range(1, rows))))


def methods_for(rows: int) -> tuple[str, ...]:
    """Methods that are measured on a tree of that many rows."""
    if rows == 1:
        return tuple(name for name in CUDA_METHODS if name not in ("storeall", "replayssm"))
    chain_only = {"replayssm"} if rows > 8 else set()
    return tuple(name for name in CUDA_METHODS if name not in {"recurrent", "deltalog"} | chain_only)


def shapes(heads: list[str], dtypes: list[str], batches: list[int], rows: list[int]) -> Iterator[tuple[str, Shape]]:
    """The grid, with the name of each tree; the first head shapes first."""
    for pair in heads:
        key_heads, value_heads = map(int, pair.split("x"))
        for dtype in dtypes:
            layer = LayerHeads(key_heads, value_heads, 128, 128, dtype)
            for number in rows:
                name, tree = tree_of(number)
                for method in methods_for(number):
                    for batch in batches:
                        shape = Shape(method, layer, batch, tree)
                        if shape.layer_bytes() <= MAX_LAYER_BYTES:
                            yield name, shape


def gate_case(shape: Shape) -> gate.Case:
    """A small batch of random trees with the method, state type, head grouping and rows of a shape."""
    rows, group = shape.tree.num_rows, shape.heads.value_heads // shape.heads.key_heads
    path = rows if shape.tree.is_chain else min(rows, 12)
    return gate.Case(shape.method, shape.heads.state_dtype, 1, group, 128, rows, path, batch=5, steps=4)


def run_gate(grid: list[tuple[str, Shape]], processes: int) -> dict[gate.Case, dict[str, float]]:
    """Worst errors by case; cases that fail are missing, and said on stderr."""
    wanted = sorted({gate_case(shape) for _, shape in grid}, key=lambda case: case.name)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        records = pool.map(gate.case_record, wanted, chunksize=1)
    errors = {}
    for case, record in zip(wanted, records, strict=True):
        if record["failed"]:
            print(f"gate red: {case.name} {record['failed']} {record['errors']}", file=sys.stderr, flush=True)
        else:
            errors[case] = record["errors"]
    return errors


def measure(
    name: str, shape: Shape, errors: dict[str, float], bandwidth: float, budget: Budget, eager: bool
) -> list[dict[str, Any]]:
    """Rows of `kernels.csv` for one shape."""
    heads = shape.heads
    layers = max(1, min(64, math.ceil(COLD_BYTES / (shape.batch * heads.state_bytes))))
    step = Step(shape, layers)
    found = []
    for phase, launch in step.phases.items():
        # Few requests flush in some steps only: a sample covers several cycles of the log.
        calls = 24 if phase == "step" and shape.method in LOG_METHODS and shape.batch < 64 else 2
        timings = {"graph": time_graph(launch, calls, limit_s=budget.timing_s)}
        if eager and phase == "step":
            timings["eager"] = time_eager(launch, calls, limit_s=budget.timing_s)
        for timer, timing in timings.items():
            moved = shape.bytes_moved(phase)
            share = 100 * moved / (timing.p50_us / layers * 1e-6) / bandwidth
            if share > 100:
                words = f"{shape.method} {phase} {heads} batch {shape.batch} rows {shape.tree.num_rows}"
                print(f"over the copy bandwidth: {words}: {share:.0f} %", file=sys.stderr, flush=True)
            found.append({
                "method": shape.method, "phase": phase, "key_heads": heads.key_heads,
                "value_heads": heads.value_heads, "head_dim": heads.key_dim, "state_dtype": heads.state_dtype,
                "batch": shape.batch, "rows": shape.tree.num_rows, "tree": name, "timer": timer,
                "latency_us_p50": round(timing.p50_us / layers, 3), "latency_us_p20": round(timing.p20_us / layers, 3),
                "latency_us_p80": round(timing.p80_us / layers, 3), "samples": timing.samples,
                "bytes_moved": round(moved), "pct_copy_bandwidth": round(share, 1),
                "rel_err_output": f"{errors['output']:.2e}", "rel_err_state": f"{errors['state']:.2e}",
            })  # fmt: skip
    return found


def compile_all(grid: list[tuple[str, Shape]]) -> None:
    """Fill CuPy's disk cache with the verification variants of the grid and of its gate, several at a time."""
    plans = set()
    for _, shape in grid:
        if shape.method in ("recurrent", "storeall"):
            continue
        capacity = shape.log_limits[0] if shape.method in LOG_METHODS else 0
        rows, bf16 = shape.tree.num_rows, shape.method == "replayssm"
        gate_heads = LayerHeads(1, shape.heads.value_heads // shape.heads.key_heads, 128, 128, shape.heads.state_dtype)
        gate_capacity = capacity if shape.tree.is_chain else {"bole": 0, "treewy": 12}.get(shape.method, 16)
        for heads, batch, log_rows in ((shape.heads, shape.batch, capacity), (gate_heads, 5, gate_capacity)):
            plans.add(tuple(sorted(VerifyPlan.choose(heads, rows, log_rows, batch, bf16).macros.items())))
    gate.compile_plans(plans)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the CUDA kernels of the state methods on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.csv and device.json")
    parser.add_argument("--heads", default=",".join(HEADS), help="key x value heads of a layer, e.g. 16x32,2x8")
    parser.add_argument("--state-dtypes", default="float32,bfloat16")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--timing-s", type=float, default=0.03, help="seconds for each timing (default 0.03)")
    parser.add_argument("--limit-s", type=float, default=3600, help="stop after so many seconds (default 3600)")
    parser.add_argument("--processes", type=int, default=6, help="gate cases that run at a time (default 6)")
    parser.add_argument("--eager", action="store_true", help="time the step without a graph as well")
    options = parser.parse_args()
    try:
        load_cupy()
    except MissingError as error:
        print(f"missing: {error}", file=sys.stderr)
        return 3
    budget = Budget(options.timing_s, time.perf_counter() + options.limit_s)
    numbers = [[int(x) for x in text.split(",")] for text in (options.batches, options.rows)]
    grid = list(shapes(options.heads.split(","), options.state_dtypes.split(","), *numbers))
    options.out.mkdir(parents=True, exist_ok=True)
    compile_all(grid)
    errors = run_gate(grid, options.processes)
    cp = load_cupy()
    bandwidth = copy_bandwidth()
    record = device_record() | {"copy_bandwidth_bytes_per_s": round(bandwidth)}
    print(f"{record['name']}, copy {bandwidth / 1e12:.2f} TB/s, {len(grid)} shapes", file=sys.stderr, flush=True)
    done = 0
    with (options.out / "kernels.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name, shape in grid:
            if budget.spent:
                break
            if (case := gate_case(shape)) in errors:
                writer.writerows(measure(name, shape, errors[case], bandwidth, budget, options.eager))
            done += 1
            if shape.layer_bytes() > 2e9:
                cp.get_default_memory_pool().free_all_blocks()
    after = {f"{key}_after": value for key, value in clocks().items() if "max" not in key}
    record |= after | {"copy_bandwidth_after_bytes_per_s": round(copy_bandwidth())}
    (options.out / "device.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{done} of {len(grid)} shapes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
