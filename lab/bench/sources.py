"""Hashes of the sources that a measurement depends on, so that a record can be told from what the code is now.

For `cuda` these are the CUDA sources, their launchers, the shipped tables of plans and what lays out a measurement, for
`cpu` the Numba kernels and their sessions. Tests compare a shipped profile's hash with these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kernels_cupy.compiler import source_bytes
from kernels_cupy.compiler import source_hash as cuda_hash
from lab.profiles.plans import shipped_tables

#: Backend -> the package that holds its kernels, and the file types that count.
PACKAGES = {"cuda": ("kernels_cupy", (".py", ".cu", ".cuh")), "cpu": ("lab.cpu", (".py",))}


def source_files(backend: str) -> dict[str, str]:
    """SHA-256 of every source of a backend by its path in the package, and of a table of plans by its GPU; sorted."""
    package, suffixes = PACKAGES[backend]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package {package} has no files")
    root = Path(spec.origin).parent
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.suffix in suffixes}
    if backend == "cuda":
        paths |= {f"{gpu}/{path.name}": path for gpu, path in shipped_tables().items()}
    return {name: hashlib.sha256(source_bytes(path)).hexdigest() for name, path in sorted(paths.items())}


def source_hash(backend: str) -> str:
    """One hash of all sources of a backend; for `cuda` the one that every record of the kernels carries."""
    if backend == "cuda":
        return cuda_hash()
    text = "".join(f"{name} {digest}\n" for name, digest in source_files(backend).items())
    return hashlib.sha256(text.encode()).hexdigest()


def staleness(device: Mapping[str, Any]) -> str | None:
    """What has changed since a `device.json` was written, in words; None when it matches the sources."""
    backend = str(device.get("backend", "cuda"))
    if backend not in PACKAGES:
        return f"device.json names backend {backend!r}; known are {', '.join(PACKAGES)}"
    now, then = source_files(backend), device.get("sources")
    if device.get("source_hash") == source_hash(backend):
        return None
    changed: list[str] = []
    if isinstance(then, Mapping):
        changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    return "the sources have changed" + (f": {', '.join(changed)}" if changed else "")
