"""What bounds a verification: hardware counters of its launch, and its time, clock and power when it runs for long.

`python -m kernels_cupy.counters --out counters.json` measures `treelog` at the main cells, on heads 16/32. Counters are
those of Nsight Compute (`ncu` on PATH), which is started on this module once more: one launch of each cell, with the
clocks left alone and caches flushed before each pass. Then every cell's chained step is replayed for `--seconds`, and
NVML says which clock the multiprocessors had and what the GPU drew in the second half.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kernels_cupy import commandline, timer
from kernels_cupy.choice import plan_here
from kernels_cupy.compiler import kernel_hash, load_cupy
from kernels_cupy.device import check_gpu, clocks, device_record, power, trim_pool
from kernels_cupy.gate import record_text
from kernels_cupy.passes import pass_layers
from kernels_cupy.steps import Shape, Step
from lab.errors import MissingError
from lab.files import replace_text
from lab.methods.base import LayerHeads
from lab.methods.protocol import STATE_DTYPES
from lab.trees import parse_tree

#: Trees and batches of both state types.
CELLS = (
    ("chain:0", 256), ("chain:3", 256), ("chain:7", 256), ("binary:15", 256), ("binary:31", 256), ("binary:63", 256),
    ("binary:31", 32), ("binary:63", 32), ("binary:15", 8), ("chain:0", 1),
)  # fmt: skip
#: Seconds between two readings of clock and power.
EVERY_S = 0.02
#: What is kept of ncu's counters, in percent of a peak; `resident_warps` is a number per scheduler.
COUNTERS = {
    "dram": "dram__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "resident_warps": "smsp__warps_active.avg.per_cycle_active",
}
#: Warps that wait, by reason, per instruction issued; those which are `selected` do not wait.
WAIT = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"
KEPT_WAITS = 5
#: Names of the kernels that verify, as a regular expression.
VERIFICATIONS = "^verify"
NO_NVML = (
    "NVML gave no clock or no power of this GPU; install its bindings with: pip install nvidia-ml-py, and let this "
    "process see the device"
)
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")


@dataclass(frozen=True, slots=True)
class Cell:
    """A state type, tree and batch of `treelog`."""

    state_dtype: str
    tree: str
    batch: int

    @property
    def shape(self) -> Shape:
        return Shape("treelog", LayerHeads(16, 32, 128, 128, self.state_dtype), self.batch, parse_tree(self.tree))


def cells() -> list[Cell]:
    return [Cell(dtype, tree, batch) for dtype in STATE_DTYPES for tree, batch in CELLS]


def launch_each() -> None:
    """What `ncu` looks at: a step of one layer of each cell, between the marks that switch its counters on and off."""
    cp = load_cupy()
    for cell in cells():
        step = Step(cell.shape, 1)
        step.phases["step"]()
        cp.cuda.Device().synchronize()
        cp.cuda.profiler.start()
        step.phases["step"]()
        cp.cuda.Device().synchronize()
        cp.cuda.profiler.stop()
        step.release()


def counters() -> list[dict[str, Any]]:
    """Counters of each cell's launch, in percent of what the GPU can do, and shares of the reasons why warps wait.

    Raises `MissingError` without `ncu`, and with its words when it does not give them.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise MissingError("ncu is not on PATH; it comes with the CUDA toolkit (Nsight Compute)")
    command = [
        tool, "--clock-control", "none", "--profile-from-start", "off", "--kernel-name", f"regex:{VERIFICATIONS}",
        *(word for section in SECTIONS for word in ("--section", section)), "--metrics", ",".join(COUNTERS.values()),
        "--csv", "--page", "raw", "--print-units", "base",
        sys.executable, "-m", "kernels_cupy.counters", "--launches",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=os.environ | {"LC_ALL": "C"}, check=False
    )
    wanted = len(cells())
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        worst = [line for line in said if "ERROR" in line] or said or ["nothing"]
        raise MissingError(f"ncu ended with {done.returncode} and said: {worst[-1]}")
    try:
        found = readings(done.stdout)
    except KeyError as error:
        raise MissingError(f"ncu gave no counter {error}; one of Nsight Compute 2025.3 is known to") from None
    if len(found) != wanted:
        raise MissingError(
            f"ncu gave counters of {len(found)} launches, {wanted} are needed; does it let you read counters?"
        )
    return found


def readings(text: str) -> list[dict[str, Any]]:
    """Counters of every launch in ncu's table of raw values."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    return [] if head is None else [reading(row) for row in list(csv.DictReader(lines[head:]))[1:]]  # units come first


def reading(row: Mapping[str, str]) -> dict[str, Any]:
    """What is kept of a launch's counters: percent, but for its time and the warps that a scheduler has at a time."""

    def value(name: str) -> float:
        text = row[name] or ""
        try:
            number = float(text.replace(",", ""))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise MissingError(f"ncu gave {text!r} as {name}; a number is needed")
        return number

    waits = {found[1]: value(name) for name in row if (found := re.fullmatch(WAIT, name))}
    whole = sum(waits.values()) or 1.0
    shares = sorted(
        ((100 * cycles / whole, name) for name, cycles in waits.items() if name != "selected"), reverse=True
    )
    return {
        "launch_us": value("gpu__time_duration.sum") / 1e3,
        **{name: value(metric) for name, metric in COUNTERS.items()},
        "waits": {name: share for share, name in shares[:KEPT_WAITS]},
    }


class Watch:
    """Ends sampling after `seconds` of replays; reads clock and power at first and every `EVERY_S` of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen: list[tuple[float, dict[str, Any]]] = []

    def __call__(self, samples_us: Sequence[float], spent_s: float) -> bool:
        done = spent_s >= self.seconds
        if done or not self._seen or spent_s >= self._seen[-1][0] + EVERY_S:
            self._seen.append((spent_s, clocks() | power()))
        return done

    def late(self) -> list[dict[str, Any]]:
        """What was read in the second half; the end at least."""
        return [state for spent_s, state in self._seen if spent_s >= self.seconds / 2]


def sustained(cell: Cell, seconds: float) -> dict[str, Any]:
    """Times of a chained step per layer at first and in the second half of `seconds`; clock and power in that half."""
    layers = pass_layers(cell.shape)
    step, watch = Step(cell.shape, layers), Watch(seconds)
    try:
        samples = timer.time_graph(step.chained_step, watch)
    finally:
        step.release()
        del step
        trim_pool(0)
    late = [state for state in watch.late() if {"sm_clock_mhz", "power_w"} <= state.keys()]
    if not late:
        raise MissingError(NO_NVML)
    return {
        "first_us": float(np.median(samples[: timer.SAMPLES_AT_A_TIME])) / layers,
        "sustained_us": float(np.median(samples[len(samples) // 2 :])) / layers,
        "sm_clock_mhz": float(np.median([state["sm_clock_mhz"] for state in late])),
        "power_w": float(np.median([state["power_w"] for state in late])),
        "held_down_by": sorted({reason for state in late for reason in state["throttle_reasons"]}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Counters, clock and power of treelog's main cells on this GPU.")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--out", type=commandline.out_file, help="write the record (JSON) here")
    ways.add_argument("--launches", action="store_true", help="launch each cell once, for ncu to look at")
    parser.add_argument("--seconds", type=commandline.seconds, default=1.5, help="seconds of replays per cell (1.5)")
    options = parser.parse_args()
    check_gpu()
    if options.launches:
        launch_each()
        return 0
    if not (clocks() and power()):
        raise MissingError(NO_NVML)
    found = []
    for cell, counted in zip(cells(), counters(), strict=True):
        plan = plan_here(cell.shape.problem, cell.batch).name
        found.append({**asdict(cell), "plan": plan, **counted, **sustained(cell, options.seconds)})
        print(json.dumps(found[-1]), flush=True)
    record = {"device": device_record(), "kernel_hash": kernel_hash(), "seconds": options.seconds, "cells": found}
    replace_text(options.out, record_text(record))
    return 0


if __name__ == "__main__":
    commandline.run(main)
