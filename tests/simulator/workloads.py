"""Small workloads and traces for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from simulator.requests import RequestBlock
from simulator.settings import WorkloadSettings
from simulator.workload import request_blocks


def workload(**fields: Any) -> WorkloadSettings:
    """A workload of fixed lengths and eight clients, unless the fields say otherwise."""
    if "trace" not in fields:
        fields.setdefault("lengths", "fixed:10/20")
    if fields.get("arrivals", "closed-loop") == "closed-loop":
        fields.setdefault("max_concurrency", 8)
    return WorkloadSettings(**fields)


def whole(settings_: WorkloadSettings, seed: int = 0, block: int = 4096) -> RequestBlock:
    """All requests of a workload in one block."""
    blocks = list(request_blocks(settings_, seed, block))
    columns = zip(*(block[:3] for block in blocks), strict=True)
    return RequestBlock(*(np.concatenate(column) for column in columns))


def csv_file(folder: Path, text: str, name: str = "requests.csv") -> str:
    """A trace file with that text; its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)
