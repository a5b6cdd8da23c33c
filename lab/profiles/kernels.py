"""Measured kernels of the state methods: the look-up that the simulator prices Gated DeltaNet phases with.

A `KernelProfile` answers with the time of phase `step` of a method for any batch and number of rows, linear between the
measured points. What lies outside them is answered and flagged; a method or state type that was not measured has no
answer. Chains and trees are grids of their own, joined at one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.profiles import folders
from lab.profiles.folders import GPU_NAMES, check_gpu, find_profile, is_profile, read_profile
from lab.profiles.grids import Bools, Floats, Grid
from lab.profiles.rows import KernelRow
from lab.profiles.system import load_system
from lab.trees import DraftTree

#: The shipped GPU whose measurements, scaled by memory bandwidth, serve shipped GPUs without a profile of their own.
SCALED_FROM = GPU_NAMES[0]


class GridKey(NamedTuple):
    """One grid of batch by rows."""

    method: str
    key_heads: int
    value_heads: int
    head_dim: int
    state_dtype: str
    chain: bool


class StepTimes(NamedTuple):
    """Microseconds of one layer's step, True where a time was extrapolated, and what stands in for what (or '')."""

    latency_us: Floats
    extrapolated: Bools
    stand_in: str


@dataclass(frozen=True)
class KernelProfile:
    """Measured rows of one device and what `device.json` says about it."""

    folder: Path
    device: dict[str, Any]
    rows: tuple[KernelRow, ...]
    hash: str

    @property
    def device_name(self) -> str:
        return str(self.device["name"])

    @property
    def stale_reason(self) -> str | None:
        """Why the record counts although the kernels have changed since; reports print it."""
        reason = self.device.get("stale_reason")
        return str(reason) if reason else None

    @cached_property
    def points(self) -> dict[GridKey, dict[tuple[int, int], float]]:
        """Step times by (batch, rows) of every grid; graph replays where they were timed, else eager calls.

        Chained steps do not count: they are a row's second time. Two trees of one size count with their mean.
        """
        timed: dict[GridKey, dict[str, dict[tuple[int, int], list[float]]]] = {}
        for row in self.rows:
            if row.phase == "step" and row.timer != "chained" and row.latency_us_p50 is not None:
                for chain in (True, False) if row.rows == 1 else (row.is_chain,):
                    key = GridKey(
                        row.method, row.key_heads, row.value_heads, row.head_dim, row.state_dtype, chain
                    )  # fmt: skip
                    grid = timed.setdefault(key, {}).setdefault(row.timer, {})
                    grid.setdefault((row.batch, row.rows), []).append(row.latency_us_p50)
        chosen = {key: timers.get("graph") or timers["eager"] for key, timers in timed.items()}
        return {
            key: {point: float(np.mean(found)) for point, found in sorted(grid.items())}
            for key, grid in chosen.items()
            if key.chain or any(rows > 1 for _, rows in grid)
        }

    @cached_property
    def _grids(self) -> dict[GridKey, Grid]:
        return {
            key: Grid.from_points([batch for batch, _ in grid], [rows for _, rows in grid], list(grid.values()))
            for key, grid in self.points.items()
        }

    def step(self, method: str, heads: LayerHeads, tree: DraftTree, requests: ArrayLike) -> StepTimes | None:
        """Step times of one layer for numbers of requests; None when the method or state type was not measured.

        Heads that were not measured take the nearest measured ones, at the batch that moves as many bytes of state, and
        are flagged. So is a tree where only chains were measured.
        """
        wanted = np.asarray(requests, dtype=np.float64)
        if heads.key_dim != heads.value_dim:
            return None
        same = [
            key
            for key in self._grids
            if (key.method, key.head_dim, key.state_dtype) == (method, heads.key_dim, heads.state_dtype)
        ]
        if not same:
            return None
        chain = tree.is_chain
        key = min(same, key=lambda key: (key.chain != chain, *_distance(key, heads), key))
        notes = []
        if key.chain != chain:
            notes.append(f"{'chains' if key.chain else 'trees'} stand in for {'chains' if chain else 'trees'}")
        if (key.key_heads, key.value_heads) != (heads.key_heads, heads.value_heads):
            notes.append(f"heads {key.key_heads}/{key.value_heads} stand in, scaled by bytes")
        found = self._grids[key].at(wanted * (heads.value_heads / key.value_heads), tree.num_rows)
        extrapolated = np.ones(wanted.shape, dtype=np.bool_) if notes else found.extrapolated
        return StepTimes(found.latency_us, extrapolated, "; ".join(notes))


def _distance(key: GridKey, heads: LayerHeads) -> tuple[float, float]:
    """How far measured heads are: ratio of state bytes, then of key heads."""
    values, keys = key.value_heads / heads.value_heads, key.key_heads / heads.key_heads
    return abs(float(np.log(values))), abs(float(np.log(keys)))


@dataclass(frozen=True, slots=True)
class GpuKernels:
    """The profile that serves a GPU, and the factor on its times (1 for measurements of that GPU itself)."""

    profile: KernelProfile
    time_factor: float = 1.0

    @property
    def scaled(self) -> bool:
        return self.time_factor != 1.0

    def describe(self, stand_in: str = "") -> str:
        """Source of a term: `measured: …` or `extrapolated: …`."""
        name, reason = self.profile.device_name, self.profile.stale_reason
        text = f"measured: step kernels on {name}"
        if self.scaled:
            text = f"extrapolated: step kernels of {name} scaled by bandwidth (times {self.time_factor:.3f})"
        elif stand_in:
            text = f"extrapolated: step kernels on {name}"
        text += f"; {stand_in}" if stand_in else ""
        return text + (f"; stale record: {reason}" if reason else "")


def gpu_kernels(gpu: str) -> GpuKernels | None:
    """Measured kernels for a GPU's name, a profile's name or a profile's folder; None where nothing was measured.

    A shipped GPU without a profile takes that of the H200, scaled by the ratio of memory bandwidths.
    """
    folder = find_profile(gpu)
    if folder is not None:
        profile = load_profile(folder)
        if not profile.points:
            raise UsageError(
                f"profile {gpu} holds no row of phase step with a time, and others price no step; measure some: treewy "
                f"bench --backend {profile.device['backend']} --profile {gpu} --resume --phase step"
            )
        return GpuKernels(profile)
    name, fallback = check_gpu(gpu), folders.SHIPPED / SCALED_FROM
    if name == SCALED_FROM or not is_profile(fallback):
        return None
    ratio = load_system(SCALED_FROM).memory_bandwidth_bytes_per_s / load_system(name).memory_bandwidth_bytes_per_s
    return GpuKernels(load_profile(fallback), ratio)


def load_profile(folder: Path) -> KernelProfile:
    """The profile in a folder, read again when its files change; `UsageError` for one that cannot be used."""
    found = read_profile(folder)
    return _profile(folder.resolve(), found.hash)


@cache
def _profile(folder: Path, digest: str) -> KernelProfile:
    return KernelProfile(folder, *read_profile(folder))


@dataclass(frozen=True, slots=True)
class InterpolationError:
    """Relative errors of measured points that were left out and interpolated along one axis from their neighbours."""

    axis: str
    points: int
    median: float
    worst: float
    worst_at: str

    def __str__(self) -> str:
        return (
            f"along {self.axis}: median {self.median:.1%}, worst {self.worst:.1%} ({self.worst_at}), "
            f"{self.points} points"
        )


def interpolation_errors(profile: KernelProfile) -> tuple[InterpolationError, ...]:
    """Leave-one-out errors of the grid along batch and along rows; an axis without inner points is left out."""
    found: dict[str, list[tuple[float, str]]] = {"batch": [], "rows": []}
    for key, points in profile.points.items():
        for place, axis in enumerate(found):
            lines: dict[int, list[tuple[int, float]]] = {}
            for point, latency in points.items():
                lines.setdefault(point[1 - place], []).append((point[place], latency))
            for other, line in lines.items():
                for low, middle, high in zip(sorted(line), sorted(line)[1:], sorted(line)[2:], strict=False):
                    guess = np.interp(middle[0], [low[0], high[0]], [low[1], high[1]])
                    batch, rows = (middle[0], other) if axis == "batch" else (other, middle[0])
                    kind = "chain" if key.chain else "tree"
                    where = (
                        f"{key.method} {key.state_dtype} {key.key_heads}/{key.value_heads}, "
                        f"batch {batch}, {kind} of {rows} rows"
                    )
                    found[axis].append((abs(float(guess) / middle[1] - 1), where))
    errors = []
    for axis, values in found.items():
        if values:
            worst, where = max(values)
            errors.append(InterpolationError(axis, len(values), float(np.median([v for v, _ in values])), worst, where))
    return tuple(errors)


def kernels_record(gpu: str) -> dict[str, Any] | None:
    """What a run notes about the profile that serves a GPU: device, sources, hash, staleness; None without one."""
    found = gpu_kernels(gpu)
    if found is None:
        return None
    profile = found.profile
    return {
        "device": profile.device_name,
        "profile_hash": profile.hash,
        "source_hash": profile.device.get("source_hash"),
        "stale_reason": profile.stale_reason,
        "time_factor": found.time_factor,
    }
