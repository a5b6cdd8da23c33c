"""What bounds a verification: hardware counters of its launch, and its time, clock and power when it runs for long.

`python -m kernels_cupy.counters --out counters.json` measures `treelog` at the main cells, on heads 16/32. Counters are
those of Nsight Compute (`ncu` on PATH), which is started on this module once more, with the clocks left alone and caches
flushed before each pass; one launch of each cell. Then every cell's chained step is replayed for `--seconds`, and NVML
says which clock the multiprocessors had and what the GPU drew in the second half.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_cupy import commandline, timer
from kernels_cupy.choice import plan_here
from kernels_cupy.compiler import kernel_hash, load_cupy
from kernels_cupy.device import check_gpu, clocks, device_record
from kernels_cupy.gate import record_text
from kernels_cupy.steps import Shape, Step
from lab.errors import MissingError
from lab.methods.base import LayerHeads
from lab.methods.protocol import STATE_DTYPES
from lab.trees import parse_tree

#: Trees and batches of both state types.
CELLS = (
    ("chain:0", 256), ("chain:3", 256), ("chain:7", 256), ("binary:15", 256), ("binary:31", 256), ("binary:63", 256),
    ("binary:31", 32), ("binary:63", 32), ("binary:15", 8), ("chain:0", 1),
)  # fmt: skip
#: A pass takes more memory than the L2 cache, and has several layers in any case.
PASS_BYTES, PASS_LAYERS = 200e6, 8
#: Seconds between two readings of clock and power.
EVERY_S = 0.02
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
    """What `ncu` looks at: one step of one layer of each cell, between the marks that switch its counters on and off."""
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
    """Counters of each cell's launch, in percent of what the GPU can do, and shares of the reasons why warps wait."""
    tool = shutil.which("ncu")
    if tool is None:
        raise MissingError("ncu is not on PATH; it comes with the CUDA toolkit (Nsight Compute)")
    command = [
        tool, "--clock-control", "none", "--profile-from-start", "off", "--kernel-name", "regex:^verify_",
        *(word for section in SECTIONS for word in ("--section", section)), "--metrics", "dram__bytes.sum",
        "--csv", "--page", "raw", "--print-units", "base",
        sys.executable, "-m", "kernels_cupy.counters", "--launches",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = readings(done.stdout)
    if done.returncode or len(found) != len(cells()):
        raise MissingError(f"ncu gave counters of {len(found)} launches, {len(cells())} wanted:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def readings(text: str) -> list[dict[str, Any]]:
    """Counters of every launch in ncu's table of raw values."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        return []
    rows = list(csv.DictReader(lines[head:]))[1:]  # the first has the units
    return [reading(row) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description="Counters, clock and power of treelog's main cells on this GPU.")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--out", type=commandline.out_file, help="write the record (JSON) here")
    ways.add_argument("--launches", action="store_true", help="launch each cell once, for ncu to look at")
    options = parser.parse_args()
    check_gpu()
    if options.launches:
        launch_each()
        return 0
    return 0


if __name__ == "__main__":
    commandline.run(main)
