"""Shipped data: model shapes, request traces, operator tables, acceptance tables.

NOTICE gives each file's origin, licence and changes. `models/*.json` hold shapes under Hugging Face key
names, `traces/` arrival times and token counts, `ops/<gpu>/` measured operator times, `acceptance/` the
acceptance of draft tokens, and `draft_trees.json` published trees as lists of rank paths.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl


def data_path(*parts: str) -> Path:
    """The path of a shipped file or folder, given by its parts below `lab/data`.

    Raises FileNotFoundError when the package ships no such file.
    """
    path = Path(str(files(__name__))).joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"the package ships no data file {'/'.join(parts)!r}")
    return path


def read_csv(*parts: str) -> pl.DataFrame:
    """A shipped CSV file, gzip-compressed or not, as a data frame; columns carry their units."""
    import polars as pl

    return pl.read_csv(data_path(*parts), infer_schema_length=None)


@cache
def model_names() -> tuple[str, ...]:
    """Names of the shipped model shapes, sorted."""
    return tuple(sorted(path.stem for path in data_path("models").glob("*.json")))
