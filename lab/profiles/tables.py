"""CSV tables with fixed columns, as a profile holds them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from lab.errors import UsageError


def profile_text(path: Path) -> str:
    """The text of a file of a profile; raises `UsageError` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no UTF-8 text ({error}); put a copy back, or measure again") from error


def table_lines(
    path: Path, columns: tuple[str, ...], kind: str, text: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of the `kind` of table at `path`: where each stands, and its cells by column.

    Raises `UsageError` for another file or none, and for a line with more or fewer cells than columns. `text` is what
    was read from there already.
    """
    lines = csv.DictReader(io.StringIO(profile_text(path) if text is None else text))
    try:
        if tuple(lines.fieldnames or ()) != columns:
            raise UsageError(f"{path} has other columns than {kind}: {', '.join(columns)}")
        for raw in lines:
            place = f"{path}, line {lines.line_num}"
            if None in raw or None in raw.values():
                raise UsageError(f"{place} has other cells than the {len(columns)} columns of {kind}; mend it")
            yield place, raw
    except csv.Error as error:
        raise UsageError(f"{path}: {error} after line {lines.line_num}; put a copy back, or measure again") from None
