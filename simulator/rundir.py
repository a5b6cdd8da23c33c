"""Run directories: what may be replaced, what belongs to an unfinished sweep, and how a finished one gets its name."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.errors import UsageError

#: All that a run directory may hold.
RUN_FILES = (
    "run.json",
    "summary.csv",
    "replications.csv",
    "paired.csv",
    "requests.parquet",
    "steps.parquet",
    "report.html",
)
#: Marks the folder of an unfinished sweep as ours; the process that works there holds a lock on it.
_LOCK = ".treewy-lock"


def check_target(out: Path, name: str) -> None:
    """Raise `UsageError` unless `out` is free, or an earlier run of the same name, which may be replaced."""
    if out.is_symlink():
        raise UsageError(f"--out {out} is a link; give the folder itself")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        record = json.loads((out / "run.json").read_text(encoding="utf-8"))
        earlier, foreign = record["name"], sorted(path.name for path in out.iterdir() if path.name not in RUN_FILES)
        ours = "treewy_version" in record
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"--out {out} exists and is not a run directory; give a new folder") from None
    if not ours or foreign:
        holds = f"; it holds {foreign[0]}" if foreign else ""
        raise UsageError(f"--out {out} exists and is not a run directory{holds}; give a new folder")
    if earlier != name:
        raise UsageError(f"--out {out} holds the run '{earlier}', not '{name}'; give a new folder or remove it")


@contextmanager
def unfinished(out: Path, resume: bool) -> Iterator[Path]:
    """The folder beside `out` where a sweep keeps finished cells, locked; it goes when the block ends without error.

    Raises `UsageError` when a folder of that name is not ours or another process works there. An interruption leaves
    the folder to `resume`; any other error removes it unless cells had finished.
    """
    partial = out.with_name(out.name + ".partial")
    if partial.exists() and not (partial / _LOCK).is_file():
        raise UsageError(f"{partial} is in the way: it is not the folder of an unfinished sweep; move it or use --out")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another process is writing {out}; wait for it or give another --out") from None
        if not resume:
            _clear(partial)
        try:
            yield partial
        except BaseException:
            if not any(partial.glob("*/result.json")):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(partial, ignore_errors=True)


def publish(staging: Path, out: Path) -> None:
    """Move a finished folder to its name; an earlier run is moved aside first, so that one of the two is there."""
    old = staging.with_name("replaced")
    if out.exists():
        os.replace(out, old)
    os.replace(staging, out)


def _clear(partial: Path) -> None:
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
