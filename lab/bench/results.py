"""What a bench leaves behind: a folder with `kernels.csv` and `device.json`, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lab
from lab.bench.backend import Backend
from lab.bench.sources import source_files, source_hash
from lab.errors import UsageError
from lab.profiles.folders import DEVICE_FILE, ROWS_FILE, SCHEMA_VERSION, is_profile, missing_files, read_profile
from lab.profiles.folders import operator_tables as tables_of
from lab.profiles.rows import KernelRow, write_rows

#: What must not change while a bench goes on: the device, its threads, the kernels; then how hard it is measured.
SAME_DEVICE = ("backend", "name", "threads", "source_hash")
EFFORT = ("relative_spread", "limit_s", "min_samples", "cycle_bytes")
#: Fields of device.json that a run notes of itself, beside its settings.
OF_A_RUN = ("git_hash", "load_average", "copy_bandwidth_bytes_per_s")


@dataclass(slots=True)
class BenchResult:
    """Rows so far, and what the device record says about the run.

    `red` lists rows whose gate was red or whose bandwidth is impossible, `skipped` points that could not run, each
    with its reason; `left_out` counts points that are not measured yet, `measured` those that this run has.
    `settings` are this run's axes, phases and effort, `earlier` the records of runs that it continues.
    """

    device: dict[str, Any]
    rows: list[KernelRow] = field(default_factory=list)
    red: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left_out: int = 0
    measured: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """The contents of `device.json`."""
        found = {"runs": self.runs(), "red": self.red, "skipped": self.skipped, "points_left_out": self.left_out}
        return {**self.device, **found}

    def runs(self) -> list[dict[str, Any]]:
        """One entry for every run that measured something, the oldest first."""
        own = {name: self.device[name] for name in OF_A_RUN if self.device.get(name) is not None}
        this = [{**self.settings, **own, "points": self.measured}] if self.measured else []
        return [*self.earlier, *this]

    def forget(self, point: object) -> None:
        """Take back what earlier runs say against a point that is measured again."""
        for lines in (self.red, self.skipped):
            lines[:] = [line for line in lines if not line.startswith(str(point))]


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
    }
    if date is None:
        return BenchResult(record, settings=settings)
    return BenchResult({**record, "date": date}, settings={**settings, "date": date})


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


def check_target(folder: Path, replace: bool = True) -> None:
    """Raise `UsageError` unless `folder` can be written and is free, empty, or with `replace` an earlier bench."""
    if folder.resolve() == Path.cwd():
        raise UsageError("the bench would take the place of the present folder; give a folder of its own")
    if folder.exists() and not (folder.is_dir() and (is_profile(folder) or not any(folder.iterdir()))):
        raise UsageError(f"{folder} exists and holds no bench ({ROWS_FILE}, {DEVICE_FILE}); give a new folder")
    if is_profile(folder) and not replace:
        raise UsageError(
            f"{folder} holds a bench already; give --resume to add what it lacks, --overwrite to measure it anew, or "
            "another folder"
        )
    with _writing(folder):  # the files are written to a folder beside it first
        fresh = _beside(folder, "new")
        shutil.rmtree(fresh, ignore_errors=True)  # an interrupted save leaves one
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir()
        fresh.rmdir()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.filename}: {error.strerror}); give a folder where files may be written"
        ) from error


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}-{os.getpid()}")


def save(result: BenchResult, folder: Path) -> None:
    """Write both files; whoever looks finds the old pair or the new one. Other files of the folder stay."""
    check_target(folder)
    fresh, old = _beside(folder, "new"), _beside(folder, "old")
    with _writing(folder):
        if folder.exists():
            shutil.copytree(folder, fresh)
        else:
            fresh.mkdir()
        rows = sorted(result.rows, key=lambda row: row.key)
        (fresh / ROWS_FILE).write_text(write_rows(rows), encoding="utf-8")
        (fresh / DEVICE_FILE).write_text(json.dumps(result.record(), indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def earlier_runs(device: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs that a `device.json` tells of; older ones name the settings of one."""
    if "runs" in device:
        return list(device["runs"])
    own = {name: device[name] for name in ("date", *OF_A_RUN) if device.get(name) is not None}
    return [{**device["settings"], **own}] if isinstance(device.get("settings"), dict) else []


def device_to_continue(folder: Path) -> dict[str, Any]:
    """The `device.json` of a bench that --resume names; `UsageError` when there is none, or half of one."""
    missing = missing_files(folder)
    if len(missing) == 1:
        raise UsageError(f"--resume: {folder} lacks {missing[0]}; put it back, or measure into a new folder")
    if missing:
        raise UsageError(f"--resume: {folder} holds no bench to continue; leave --resume away to start one")
    return read_profile(folder).device


def continue_from(folder: Path, result: BenchResult) -> None:
    """Take over the rows of an earlier bench on the same device with the same sources, measured as hard.

    Raises `UsageError` when the folder holds none, or one that must not be mixed with this run.
    """
    device = device_to_continue(folder)
    result.earlier = earlier_runs(device)
    last: Mapping[str, Any] = result.earlier[-1] if result.earlier else {}
    _check_same(folder, SAME_DEVICE, device, result.device, "measure into a new folder")
    if all(name in last and name in result.settings for name in EFFORT):
        _check_same(folder, EFFORT, last, result.settings, "give or leave away --quick as then")
    result.rows = list(read_profile(folder).rows)
    result.red, result.skipped = list(device.get("red") or []), list(device.get("skipped") or [])
    own = dict(result.device)
    result.device.clear()
    result.device |= {name: value for name, value in device.items() if name not in ("runs", "settings")}
    result.device |= {name: value for name, value in own.items() if value is not None and name != "date"}


def _check_same(
    folder: Path, names: Sequence[str], then: Mapping[str, Any], now: Mapping[str, Any], remedy: str
) -> None:
    for name in names:
        if then.get(name) != now.get(name):
            raise UsageError(
                f"--resume: {folder} was measured with {name} = {then.get(name)!r}, now it is {now.get(name)!r}; "
                f"{remedy}"
            )
