"""Records on disk: buffers become Parquet parts as they fill, parts become one file at the end.

Nothing is held whole in memory, and a file appears under its name only when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

#: Rows of one Parquet row group: fixed, so that equal records give equal bytes.
ROW_GROUP = 1 << 16


class PartWriter:
    """A sink for `simulator.engine.Engine` that writes every buffer as a Parquet part in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._counts: dict[str, int] = {}

    def __call__(self, kind: str, records: Any) -> None:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        names = records.dtype.names
        columns = {name: np.ascontiguousarray(records[name]) for name in names} if names else {kind: records}
        pl.DataFrame(columns).write_parquet(self.folder / f"{kind}-{number:06d}.parquet", statistics=False)

    def parts(self, kind: str) -> list[Path]:
        """Parts of one kind, in the order they were written."""
        return part_files(self.folder, kind)


def part_files(folder: Path, kind: str) -> list[Path]:
    """Parts of one kind in a folder, in order."""
    return sorted(folder.glob(f"{kind}-*.parquet"))


def merge_parts(cells: Sequence[tuple[int, Sequence[Path]]], target: Path, seeds: Sequence[int] | None = None) -> None:
    """Write the parts of all cells, in order, as one Parquet file: the column `cell` first, then `seed` if given."""
    frames = []
    for number, (cell, parts) in enumerate(cells):
        if parts:
            first = [pl.lit(cell, dtype=pl.Int32).alias("cell")]
            first += [] if seeds is None else [pl.lit(seeds[number], dtype=pl.Int64).alias("seed")]
            frames.append(pl.scan_parquet(list(parts)).select(*first, pl.all()))
    temporary = target.with_name(target.name + ".tmp")
    if frames:
        pl.concat(frames).sink_parquet(temporary, row_group_size=ROW_GROUP, maintain_order=True)
    else:
        pl.DataFrame({"cell": pl.Series([], dtype=pl.Int32)}).write_parquet(temporary)
    os.replace(temporary, target)
