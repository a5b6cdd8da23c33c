"""Which tables a result came from: a digest of a GPU's operator tables."""

from __future__ import annotations

import hashlib
from functools import cache

from lab.data import data_path
from lab.profiles.system import check_gpu


@cache
def tables_digest(gpu: str) -> str:
    """First 16 hexadecimal digits of a SHA-256 over the names and contents of the GPU's operator tables."""
    folder = data_path("ops", f"{check_gpu(gpu)}_sxm")
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
