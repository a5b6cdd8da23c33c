"""A scenario simulated with two kernel profiles: the one of its GPU, and an earlier one, all else being equal.

An earlier profile names the same operator tables and holds no attention, so that it takes the shipped GPU's; memory,
workload and seeds are the scenario's. Of a sweep the point that its report opens with is taken: the largest memory
budget and the highest load.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lab.errors import UsageError
from lab.methods import LayerHeads
from lab.profiles.grids import Floats
from lab.profiles.kernels import GpuKernels, gpu_kernels
from lab.shapes import load_shape
from lab.trees import parse_tree
from reports.palette import STEP_TERMS
from simulator.replications import BASELINE, half_width, paired_ratio
from simulator.scenario import expand, replace_fields
from simulator.sweep import run_sweep

TREES = ("1,1,1", "2,2,2")
METHOD = "treelog"


@dataclass(frozen=True)
class Run:
    """One method on one tree with one profile.

    `rows`: its summary rows, one per seed. `steps`: `duration_us` and `decoding` of every step of all seeds.
    """

    rows: Sequence[Mapping[str, Any]]
    steps: pl.DataFrame
    kernels: GpuKernels
    earlier: bool

    @property
    def tree(self) -> str:
        return str(self.rows[0]["tree"])

    @property
    def method(self) -> str:
        return str(self.rows[0]["state_method"])

    def mean(self, name: str) -> float:
        return float(np.mean([row[name] for row in self.rows]))

    def spread(self, name: str) -> float:
        """Half the width of the 95 % interval of a mean over seeds."""
        return half_width(np.array([row[name] for row in self.rows], dtype=np.float64))

    @cached_property
    def decoding(self) -> float:
        """Requests that a step verifies drafts of, on average over steps."""
        return float(self.steps["decoding"].cast(pl.Float64).sum()) / len(self.steps)

    def kernel_us(self, requests: Sequence[float] | Floats) -> Floats:
        """Time of one layer's step of the method, convolution excluded, for numbers of requests from 1."""
        row = self.rows[0]
        heads = LayerHeads.of(load_shape(row["model"]), row["state_dtype"], row["tensor_parallel_size"])
        times = self.kernels.profile.step(self.method, heads, parse_tree(self.tree), requests)
        if times is None:
            raise UsageError(
                f"profile {self.kernels.profile.folder} holds no step of {self.method} with {row['state_dtype']} "
                "states; name one that does as the scenario's gpu or as the earlier profile"
            )
        return self.kernels.time_factor * times.latency_us

    @cached_property
    def kernel_share(self) -> float:
        """Share of all steps' time that the step kernels of all layers take; the tables' own times, uncalibrated."""
        counts = self.steps.filter(pl.col("decoding") > 0).group_by("decoding").len().sort("decoding")
        times = self.kernel_us(counts["decoding"].cast(pl.Float64).to_numpy())
        layers = load_shape(self.rows[0]["model"]).num_linear_layers
        return layers * float(times @ counts["len"].to_numpy()) / float(self.steps["duration_us"].sum())


@dataclass(frozen=True)
class Consequence:
    """The runs of one tree: the method and storeall, each with its GPU's profile and with the earlier one."""

    ours: Run
    ours_earlier: Run
    base: Run
    base_earlier: Run

    def runs(self) -> tuple[Run, ...]:
        """In the order of tables."""
        return self.base_earlier, self.base, self.ours_earlier, self.ours

    @property
    def tree(self) -> str:
        return self.ours.tree

    def comparisons(self) -> Iterator[tuple[str, Run, Run]]:
        """What is held against what, in words."""
        yield f"{METHOD}, this profile over the earlier", self.ours, self.ours_earlier
        yield f"{BASELINE}, this profile over the earlier", self.base, self.base_earlier
        yield f"{METHOD} over {BASELINE}, this profile", self.ours, self.base
        yield f"{METHOD} over {BASELINE}, the earlier", self.ours_earlier, self.base_earlier

    @property
    def kernel_us(self) -> tuple[float, float]:
        """One layer's step of the method at the mean step of the earlier run: earlier, this profile."""
        requests = [max(self.ours_earlier.decoding, 1.0)]
        return float(self.ours_earlier.kernel_us(requests)[0]), float(self.ours.kernel_us(requests)[0])

    @property
    def throughput(self) -> float:
        """Output throughput over that with the earlier kernels."""
        return paired(self.ours, self.ours_earlier, "output_throughput")["ratio"]

    @property
    def ceiling(self) -> float:
        """Steps per second over those with the earlier kernels if the method's step kernels took no time at all."""
        return 1 / (1 - self.ours_earlier.kernel_share)

    def largest_terms(self) -> list[tuple[str, float]]:
        """Titles and shares of what a step's time goes to with this profile, states excluded, the largest first."""
        found = [(title, self.ours.mean(f"{term}_share")) for term, (title, _) in STEP_TERMS.items() if term != "state"]
        return sorted(found, key=lambda pair: -pair[1])


def paired(run: Run, other: Run, metric: str) -> dict[str, float]:
    """Geometric mean of the ratio over seeds and its 95 % interval, which is the mean itself where no seed differs."""
    found = paired_ratio(run.rows, other.rows, metric)
    centre = math.nan if found is None or found["ratio"] is None else found["ratio"]
    ends = found or {}
    return {name: centre if ends.get(name) is None else float(ends[name] or 0) for name in ("ratio", "low", "high")}


def consequences(raw: Mapping[str, Any], earlier: Path, seeds: int, jobs: int) -> list[Consequence]:
    """Simulate the point of a scenario for all trees, with both methods and both profiles; the same for any `jobs`.

    Raises `UsageError` for a scenario that sweeps other fields, for cells that cannot run, and for a profile that does
    not hold the methods.
    """
    gpu = raw.get("gpu", "h200")
    if not isinstance(gpu, str) or Path(gpu) == earlier:
        raise UsageError(f"gpu is {gpu!r}; name one GPU or profile, and another than the earlier one")
    if seeds < 2:
        raise UsageError(f"seeds is {seeds}; a spread needs 2 or more")
    scenario = replace_fields(
        raw,
        {
            ("gpu",): [gpu, str(earlier)],
            ("speculation", "state_method"): [BASELINE, METHOD],
            ("speculation", "tree"): list(TREES),
            **_largest(raw, "engine", "gpu_memory_utilization"),
            **_largest(raw, "workload", "max_concurrency"),
        },
    )
    cells = expand(scenario)
    if len(cells) != 4 * len(TREES):
        raise UsageError("the scenario sweeps more than memory, load, trees and methods; give other fields one value")
    with tempfile.TemporaryDirectory() as folder:
        out = run_sweep(scenario, cells, Path(folder) / "run", jobs=jobs, seeds=seeds, keep_steps=True)
        skipped = json.loads((out / "run.json").read_text(encoding="utf-8"))["skipped"]
        if skipped:
            raise UsageError(
                f"{len(skipped)} cells cannot run and leave nothing to compare; the first: {skipped[0]['reason']}"
            )
        rows = pl.read_csv(out / "replications.csv", infer_schema_length=None).to_dicts()
        steps = pl.read_parquet(out / "steps.parquet", columns=["cell", "duration_us", "decoding"])
    runs = {}
    for number, cell in enumerate(cells):
        name = (cell.speculation.tree, cell.speculation.state_method, cell.gpu == str(earlier))
        own = [row for row in rows if row["cell"] == number]
        runs[name] = Run(own, steps.filter(pl.col("cell") == number), _kernels(cell.gpu), name[-1])
    return [
        Consequence(*(runs[tree, method, old] for method in (METHOD, BASELINE) for old in (False, True)))
        for tree in TREES
    ]


def _kernels(gpu: str) -> GpuKernels:
    found = gpu_kernels(gpu)
    if found is None:
        raise UsageError(f"no measured kernels serve gpu {gpu}; name one with a profile (treewy doctor lists them)")
    return found


def _largest(raw: Mapping[str, Any], part: str, name: str) -> dict[tuple[str, ...], Any]:
    """The largest value of a field that is swept, by its path; nothing for one that is not."""
    section = raw.get(part)
    value = section.get(name) if isinstance(section, Mapping) else None
    return {(part, name): max(value)} if isinstance(value, list) and value else {}
