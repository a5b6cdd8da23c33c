"""Profiles: what operators cost on a GPU, and what the GPU is."""

from __future__ import annotations

from lab.profiles.grids import Lookup
from lab.profiles.operators import OperatorTables, UncoveredShapeError, load_tables
from lab.profiles.system import GPU_NAMES, GpuSystem, load_system

__all__ = [
    "GPU_NAMES",
    "GpuSystem",
    "Lookup",
    "OperatorTables",
    "UncoveredShapeError",
    "load_system",
    "load_tables",
]
