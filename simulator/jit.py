"""Numba's `njit` with a cache on disk that notices every change of the compiled sources.

Numba looks at one file's time stamp only; a function that inlines another file's code would stay stale. So the cache
folder carries a hash of all compiled modules. `NUMBA_CACHE_DIR` has the last word where it is set.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba

_COMPILED = (
    "blockkeys.py",
    "blockpool.py",
    "costtables.py",
    "enginestate.py",
    "prefixcache.py",
    "sampling.py",
    "scheduler.py",
    "step.py",
    "waitqueue.py",
    "sglang/decode.py",
    "sglang/pool.py",
    "sglang/scheduler.py",
)


def _cache_dir() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for name in _COMPILED:
        digest.update((Path(__file__).parent / name).read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "treewy-lab" / "numba" / digest.hexdigest()[:16]


def njit(**options: Any) -> Any:
    """`numba.njit(cache=True, **options)`."""
    return numba.njit(cache=True, **options)


if "NUMBA_CACHE_DIR" not in os.environ:
    setattr(numba.config, "CACHE_DIR", str(_cache_dir()))  # noqa: B010  (the module declares no such name)
