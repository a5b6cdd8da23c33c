"""Measured verify attention: the rows of a draft tree against a cached context, by batch, context and rows.

A profile may hold `attention.csv` beside `kernels.csv`, and `attention_device.json` for the GPU that it was measured
on and the block sizes that its kernel pads rows to. Look-ups are linear in batch, context and padded rows: a time is a
fixed part and one in proportion. Beyond the last batch and context they hold its rate, and say so in a mask.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lab.errors import UsageError
from lab.profiles import folders
from lab.profiles.attentionrows import AttentionRow, parse_rows
from lab.profiles.folders import check_gpu, find_profile
from lab.profiles.grids import Bools, Floats, Grid, Lookup
from lab.profiles.kernels import SCALED_FROM
from lab.profiles.system import load_system
from lab.profiles.tables import profile_text

ROWS_FILE = "attention.csv"
DEVICE_FILE = "attention_device.json"


class HeadsKey(NamedTuple):
    """Heads of one rank and the type of the KV cache."""

    q_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str

    @property
    def group(self) -> float:
        return self.q_heads / self.kv_heads


class AttentionTimes(NamedTuple):
    """Microseconds of one layer, True where a time was extrapolated, and what stands in for what (or '')."""

    latency_us: Floats
    extrapolated: Bools
    stand_in: str


def padded_rows(query_rows: float, blocks: Sequence[int]) -> float:
    """Query rows that a kernel works on: those of the smallest block that holds them, or of several of the largest."""
    fitting = [block for block in blocks if block >= query_rows]
    return float(min(fitting) if fitting else max(blocks) * math.ceil(query_rows / max(blocks)))


@dataclass(frozen=True)
class HeadsTimes:
    """Times of one kind of heads: a grid of batch by context for every measured number of rows, which ascend.

    Between two of them a time is linear in the rows that the kernel pads to (they differ little within one block size).
    """

    group: float
    rows: tuple[int, ...]
    grids: tuple[Grid, ...]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, group: float, points: Mapping[tuple[int, int, int], float], blocks: Sequence[int]) -> HeadsTimes:
        rows = tuple(sorted({rows for _, _, rows in points}))
        grids = []
        for number in rows:
            of_rows = {point[:2]: latency for point, latency in points.items() if point[2] == number}
            batches, contexts = zip(*of_rows, strict=True)
            grids.append(Grid.from_points(batches, contexts, list(of_rows.values())))
        return cls(group, rows, tuple(grids), tuple(blocks))

    def at(self, batch: ArrayLike, context: ArrayLike, rows: float) -> Lookup:
        """Times at broadcast batches and contexts; rows outside the measured ones hold the ends and are flagged."""
        inside = min(max(rows, self.rows[0]), self.rows[-1])
        upper = next(i for i, number in enumerate(self.rows) if number >= inside)
        high = self.grids[upper].at(batch, context)
        flagged = high.extrapolated | (inside != rows)
        if self.rows[upper] == inside:
            return Lookup(high.latency_us, flagged)
        low = self.grids[upper - 1].at(batch, context)
        first, wanted, last = (self._place(x) for x in (self.rows[upper - 1], inside, self.rows[upper]))
        weight = (wanted - first) / (last - first)
        return Lookup((1 - weight) * low.latency_us + weight * high.latency_us, flagged | low.extrapolated)

    def _place(self, rows: float) -> float:
        query_rows = rows * self.group
        return padded_rows(query_rows, self.blocks) + 1e-3 * query_rows


@dataclass(frozen=True)
class AttentionProfile:
    """Measured rows of one device."""

    folder: Path
    device: dict[str, Any]
    rows: tuple[AttentionRow, ...]
    hash: str

    @property
    def device_name(self) -> str:
        return str(self.device["name"])

    @cached_property
    def points(self) -> dict[HeadsKey, dict[tuple[int, int, int], float]]:
        """Times by (batch, context, rows) of every measured kind of heads."""
        found: dict[HeadsKey, dict[tuple[int, int, int], float]] = {}
        for row in self.rows:
            key = HeadsKey(row.q_heads, row.kv_heads, row.head_dim, row.kv_dtype)
            found.setdefault(key, {})[row.batch, row.context_tokens, row.rows] = row.latency_us_p50
        return found

    @cached_property
    def _times(self) -> dict[HeadsKey, HeadsTimes]:
        blocks = self.device["block_rows"]
        return {key: HeadsTimes.of(key.group, points, blocks) for key, points in self.points.items()}

    def nearest(self, heads: HeadsKey) -> HeadsKey | None:
        """The measured heads that serve `heads`; None when their width or type of cache was not measured.

        The nearest number of query heads per KV head; among those, heads that were measured at half as many points as
        others only if there are no others; then the nearest number of KV heads.
        """
        same = [key for key in self.points if (key.head_dim, key.kv_dtype) == (heads.head_dim, heads.kv_dtype)]
        if not same:
            return None

        def apart(key: HeadsKey) -> float:
            return abs(math.log(key.group / heads.group))

        group = [key for key in same if apart(key) == min(map(apart, same))]
        most = max(len(self.points[key]) for key in group)
        dense = [key for key in group if 2 * len(self.points[key]) > most]
        return min(dense, key=lambda key: (abs(math.log(key.kv_heads / heads.kv_heads)), key))

    def points_of(self, heads: HeadsKey) -> tuple[Floats, Floats] | None:
        """Batches and contexts that were measured for `heads`, or for the heads that serve them."""
        key = self.nearest(heads)
        if key is None:
            return None
        batches, contexts, _ = (np.unique(axis).astype(np.float64) for axis in zip(*self.points[key], strict=True))
        return batches * (key.kv_heads / heads.kv_heads), contexts

    def verify(self, heads: HeadsKey, batch: ArrayLike, context: ArrayLike, rows: int) -> AttentionTimes | None:
        """One layer's times for `batch` requests of `context` cached tokens and `rows` rows each.

        None when the width of heads or the type of cache was not measured. KV heads count like requests, so heads with
        the same number of query heads per KV head stand for each other; else the nearest number does, at as many query
        rows per KV head, and is flagged.
        """
        key = self.nearest(heads)
        if key is None:
            return None
        requests = np.asarray(batch, dtype=np.float64) * (heads.kv_heads / key.kv_heads)
        found = self._times[key].at(requests, context, rows * heads.group / key.group)
        note, extrapolated = "", found.extrapolated
        if key[:2] != heads[:2]:
            note = f"heads {key.q_heads}/{key.kv_heads} stand in for {heads.q_heads}/{heads.kv_heads}"
        if key.group != heads.group:
            note += ", at as many query rows per KV head"
            extrapolated = np.ones(extrapolated.shape, dtype=np.bool_)
        return AttentionTimes(found.latency_us, extrapolated, note)


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """The profile that serves a GPU, and the factor on its times (1 for measurements of that GPU itself)."""

    profile: AttentionProfile
    time_factor: float = 1.0

    @property
    def scaled(self) -> bool:
        return self.time_factor != 1.0

    def verify(self, heads: HeadsKey, batch: ArrayLike, context: ArrayLike, rows: int) -> AttentionTimes | None:
        """As the profile's, scaled; every time scaled from another GPU counts as extrapolated."""
        found = self.profile.verify(heads, batch, context, rows)
        if found is None:
            return None
        return AttentionTimes(self.time_factor * found.latency_us, found.extrapolated | self.scaled, found.stand_in)

    def describe(self, stand_in: str = "") -> str:
        """Source of a term: `measured: …` or `extrapolated: …`."""
        name = self.profile.device_name
        text = f"measured: verify attention on {name}"
        if self.scaled:
            text = f"extrapolated: verify attention on {name} scaled by bandwidth (times {self.time_factor:.3f})"
        elif "query rows" in stand_in:
            text = f"extrapolated: verify attention on {name}"
        return text + (f"; {stand_in}" if stand_in else "")


def gpu_attention(gpu: str) -> GpuAttention | None:
    """Measured verify attention for a GPU's name, a profile's name or a profile's folder; None where there is none.

    A profile without it takes what serves the shipped GPU that its operator tables are of; a shipped GPU without it
    takes that of the H200, scaled by the ratio of memory bandwidths.
    """
    own = find_profile(gpu)
    if own is not None and _holds(own):
        return GpuAttention(load_attention(own))
    name = check_gpu(gpu)
    for measured in (name, SCALED_FROM):
        if _holds(folder := folders.SHIPPED / measured):
            bandwidths = [load_system(which).memory_bandwidth_bytes_per_s for which in (measured, name)]
            return GpuAttention(load_attention(folder), bandwidths[0] / bandwidths[1])
    return None


def attention_record(gpu: str) -> dict[str, Any] | None:
    """What a run notes about the measured verify attention that serves a GPU; None without."""
    found = gpu_attention(gpu)
    if found is None:
        return None
    return {
        "device": found.profile.device_name,
        "hash": found.profile.hash,
        "kernel_hash": found.profile.device.get("kernel_hash"),
        "time_factor": found.time_factor,
    }


def _holds(folder: Path) -> bool:
    return (folder / ROWS_FILE).is_file() and (folder / DEVICE_FILE).is_file()


def load_attention(folder: Path) -> AttentionProfile:
    """The measurements in a folder, read again when its files change; `UsageError` for what cannot be read."""
    stamps = tuple((folder / name).stat().st_mtime_ns for name in (ROWS_FILE, DEVICE_FILE))
    return _load(folder.resolve(), stamps)


@cache
def _load(folder: Path, stamps: tuple[int, ...]) -> AttentionProfile:
    texts = {name: profile_text(folder / name) for name in (ROWS_FILE, DEVICE_FILE)}
    try:
        device = json.loads(texts[DEVICE_FILE])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {folder / DEVICE_FILE}: {error}; put a copy back, or measure again") from error
    if not isinstance(device, dict) or not isinstance(device.get("name"), str):
        raise UsageError(f"{folder / DEVICE_FILE} must be a mapping that gives the device's 'name' and 'block_rows'")
    blocks = device.get("block_rows")
    if not isinstance(blocks, list) or not blocks or not all(type(rows) is int and rows > 0 for rows in blocks):
        raise UsageError(f"{folder / DEVICE_FILE}: 'block_rows' must be a list of whole numbers from 1, as [16, 32]")
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    return AttentionProfile(folder, device, tuple(parse_rows(texts[ROWS_FILE], folder / ROWS_FILE)), digest)
