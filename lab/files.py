"""Files that appear complete or not at all, and places that are tested before the work for them is done."""

from __future__ import annotations

import os
from pathlib import Path

from lab.errors import UsageError


def replace_text(path: Path, text: str) -> None:
    """Write a UTF-8 text beside `path` and put it in its place; whoever looks finds the old file or the new one."""
    temporary = _temporary(path)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def check_writable(path: Path) -> None:
    """Raise `UsageError` unless a file can be written at `path`; what is there stays as it is."""
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); give a file that can be") from None
    if is_new:
        path.unlink()


def check_replaceable(path: Path) -> None:
    """Raise `UsageError` unless `replace_text` can put a file at `path`."""
    check_writable(path)
    check_writable(_temporary(path))
