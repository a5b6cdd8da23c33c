"""CSV tables with fixed columns, as a profile holds them."""

from __future__ import annotations

import csv
import io
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


def table_lines(path: Path, columns: tuple[str, ...], kind: str, text: str | None = None) -> csv.DictReader[str]:
    """The lines of the `kind` of table at `path`, by column; raises `UsageError` for another file or none.

    `text` is what was read from there already.
    """
    lines = csv.DictReader(io.StringIO(profile_text(path) if text is None else text))
    if tuple(lines.fieldnames or ()) != columns:
        raise UsageError(f"{path} has other columns than {kind}: {', '.join(columns)}")
    return lines
