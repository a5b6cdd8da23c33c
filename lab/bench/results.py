"""What a bench leaves behind: a folder with `kernels.csv` and `device.json`, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lab
from lab.bench.backend import Backend
from lab.bench.sources import source_files, source_hash
from lab.errors import UsageError
from lab.profiles.folders import DEVICE_FILE, ROWS_FILE, is_profile, read_device
from lab.profiles.folders import operator_tables as tables_of
from lab.profiles.rows import KernelRow, read_rows, write_rows

SCHEMA_VERSION = 1


@dataclass(slots=True)
class BenchResult:
    """Rows so far, and what the device record says about the run.

    `red` lists rows whose gate was red or whose bandwidth is impossible, `skipped` points that could not run, each
    with its reason; `left_out` counts points that the time limit cut off.
    """

    device: dict[str, Any]
    rows: list[KernelRow] = field(default_factory=list)
    red: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left_out: int = 0

    def record(self) -> dict[str, Any]:
        """The contents of `device.json`."""
        return {**self.device, "red": self.red, "skipped": self.skipped, "points_left_out": self.left_out}


def new_result(
    backend: Backend, settings: dict[str, Any], date: str | None = None, operator_tables: str | None = None
) -> BenchResult:
    """An empty result with the device's record.

    `operator_tables` names the shipped GPU that prices the rest of a model beside this profile; without it the device's
    own name decides.
    """
    device = backend.device()
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "backend": backend.name,
        **device,
        "operator_tables": operator_tables or tables_of(device),
        "treewy_version": lab.__version__,
        "git_hash": git_hash(),
        "source_hash": source_hash(backend.name),
        "sources": source_files(backend.name),
        "stale_reason": None,
        "settings": settings,
    }
    if date is not None:
        record["date"] = date
    return BenchResult(record)


def git_hash() -> str | None:
    """Commit of the checkout that the package runs from, with `+` when files differ; None outside a checkout."""
    root = Path(lab.__file__).resolve().parents[1]
    tool = shutil.which("git")
    if tool is None or not (root / ".git").exists():
        return None
    done = [
        subprocess.run([tool, "-C", str(root), *call], capture_output=True, text=True, check=False)
        for call in (["rev-parse", "HEAD"], ["status", "--porcelain"])
    ]
    if any(each.returncode for each in done):
        return None
    return done[0].stdout.strip() + ("+" if done[1].stdout.strip() else "")


def check_target(folder: Path) -> None:
    """Raise `UsageError` unless `folder` is free, empty, or an earlier bench that may be replaced."""
    if folder.exists() and not (folder.is_dir() and (is_profile(folder) or not any(folder.iterdir()))):
        raise UsageError(f"{folder} exists and holds no bench ({ROWS_FILE}, {DEVICE_FILE}); give a new folder")


def save(result: BenchResult, folder: Path) -> None:
    """Write both files; whoever looks finds the old pair or the new one. Other files of the folder stay."""
    check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f"{folder.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    shutil.rmtree(fresh, ignore_errors=True)
    if folder.exists():
        shutil.copytree(folder, fresh)
    else:
        fresh.mkdir()
    (fresh / ROWS_FILE).write_text(write_rows(result.rows), encoding="utf-8")
    (fresh / DEVICE_FILE).write_text(json.dumps(result.record(), indent=1) + "\n", encoding="utf-8")
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def continue_from(folder: Path, result: BenchResult) -> None:
    """Take over the rows of an earlier bench on the same device with the same sources.

    Raises `UsageError` when the folder holds none, or one that must not be mixed with this run.
    """
    if not is_profile(folder):
        raise UsageError(f"--resume: {folder} holds no bench to continue")
    earlier = read_device(folder)
    for name in ("backend", "name", "source_hash"):
        if earlier.get(name) != result.device[name]:
            raise UsageError(
                f"--resume: {folder} was measured with {name} = {earlier.get(name)!r}, now it is "
                f"{result.device[name]!r}; measure into a new folder"
            )
    result.rows = list(read_rows(folder / ROWS_FILE))
    result.red = list(earlier.get("red", []))
    for name in ("operator_tables", "stale_reason", "date", "git_hash"):
        if name in earlier and not result.device.get(name):
            result.device[name] = earlier[name]
