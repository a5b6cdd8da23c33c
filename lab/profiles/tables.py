"""CSV tables with fixed columns, as a profile holds them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from lab.errors import UsageError


def table_lines(path: Path, columns: tuple[str, ...], kind: str) -> csv.DictReader[str]:
    """The lines of the `kind` of table at `path`, by column; raises `UsageError` for another file or none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no UTF-8 text ({error}); put a copy back, or measure again") from error
    lines = csv.DictReader(io.StringIO(text))
    if tuple(lines.fieldnames or ()) != columns:
        raise UsageError(f"{path} has other columns than {kind}: {', '.join(columns)}")
    return lines
