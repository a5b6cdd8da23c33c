"""Where kernel profiles live, and what a GPU's name means.

A profile is a folder with `kernels.csv` and `device.json`. The package ships some beside this file, by the names of
GPUs. `treewy bench --profile NAME` writes one's own under `$XDG_DATA_HOME/treewy-lab/profiles/NAME` (without that
variable `~/.local/share`); a NAME with a slash is the folder itself. `--gpu` takes any of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lab.errors import UsageError
from lab.profiles.rows import KernelRow, read_rows

#: GPUs whose operator tables are shipped, by the name a scenario uses.
GPU_NAMES = ("h200", "b200", "h100")
#: Folder of the profiles that the package ships.
SHIPPED = Path(__file__).parent
ROWS_FILE = "kernels.csv"
DEVICE_FILE = "device.json"
#: Version of device.json that this code writes and reads, and the backends that write it.
SCHEMA_VERSION = 1
BACKENDS = ("cuda", "cpu")


def user_profiles() -> Path:
    """Folder of the user's own profiles; it need not exist."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "treewy-lab" / "profiles"


def is_profile(folder: Path) -> bool:
    return not missing_files(folder)


def target_folder(name: str) -> Path:
    """The folder that `--profile NAME` writes; raises `UsageError` for a name that cannot be one."""
    if os.sep in name:
        return Path(name)
    if name.lower() in GPU_NAMES:
        raise UsageError(
            f"--profile {name} is the name of a shipped GPU; give another name, or a folder such as ./{name}"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(f"--profile is {name!r}; allowed are letters, digits, '.', '_' and '-', or a folder's path")
    return user_profiles() / name


def find_profile(gpu: str) -> Path | None:
    """The profile folder of a GPU's name, a user profile's name or a folder's path; None when there is none."""
    if gpu.lower() in GPU_NAMES:
        folder = SHIPPED / gpu.lower()
        return folder if is_profile(folder) else None
    candidates = [Path(gpu)] if os.sep in gpu else [user_profiles() / gpu]
    return next((folder for folder in candidates if is_profile(folder)), None)


def all_profiles() -> Iterator[tuple[str, Path]]:
    """Names and folders of the shipped profiles, then of the user's."""
    for root in (SHIPPED, user_profiles()):
        if root.is_dir():
            yield from ((folder.name, folder) for folder in sorted(root.iterdir()) if is_profile(folder))


def incomplete_profiles() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Folders among the user's profiles that are none, and what they lack."""
    root = user_profiles()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and (missing := missing_files(folder)):
            yield folder, missing


def missing_files(folder: Path) -> tuple[str, ...]:
    """Which files a folder lacks to be a profile."""
    return tuple(name for name in (ROWS_FILE, DEVICE_FILE) if not (folder / name).is_file())


def read_device(folder: Path) -> dict[str, Any]:
    """The mapping in `device.json`; raises `UsageError` naming the field when it cannot be used."""
    path = folder / DEVICE_FILE
    try:
        device = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # no text, or no JSON
        raise UsageError(
            f"{path} is damaged ({error}); put a copy back, or remove {folder} and measure again"
        ) from error
    if not isinstance(device, dict):
        raise UsageError(f"{path} must be a mapping, as treewy bench writes it")
    for name, (is_good, wanted) in _DEVICE_FIELDS.items():
        if not is_good(device.get(name)):
            found = repr(device[name])[:60] if name in device else "missing"
            raise UsageError(f"{path}: {name} is {found}; {wanted} is needed")
    return device


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(line, str) for line in value))


#: Fields of device.json that are read again: a check (of None where the field is missing), and what is needed.
_DEVICE_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schema_version": (lambda value: value is not True and value == SCHEMA_VERSION, f"{SCHEMA_VERSION}"),
    "name": (_is_text, "the device's name"),
    "backend": (lambda value: value in BACKENDS, " or ".join(BACKENDS)),
    "source_hash": (_is_text, "the hash of the kernels' sources"),
    "copy_bandwidth_bytes_per_s": (_is_positive, "a positive number"),
    "red": (_is_texts, "a list of sentences"),
    "skipped": (_is_texts, "a list of sentences"),
    "points_left_out": (lambda value: value is None or (type(value) is int and value >= 0), "a whole number from 0"),
    "stale_reason": (lambda value: value is None or isinstance(value, str), "a sentence or null"),
    "operator_tables": (lambda value: value is None or value in GPU_NAMES, f"null or one of {', '.join(GPU_NAMES)}"),
    "date": (lambda value: value is None or isinstance(value, str), "a date such as 2026-11-29"),
    "runs": (
        lambda value: value is None or (isinstance(value, list) and all(isinstance(run, dict) for run in value)),
        "a list with a mapping for every run",
    ),
}


class ProfileFiles(NamedTuple):
    """What the two files of a profile say, and a hash of both."""

    device: dict[str, Any]
    rows: tuple[KernelRow, ...]
    hash: str


def read_profile(folder: Path) -> ProfileFiles:
    """Both files of a profile, read again when they change; `UsageError` naming file and field for unusable ones."""
    stamps = tuple((folder / name).stat().st_mtime_ns for name in (ROWS_FILE, DEVICE_FILE))
    return _read(folder.resolve(), stamps)


@cache
def _read(folder: Path, stamps: tuple[int, ...]) -> ProfileFiles:
    device, rows = read_device(folder), read_rows(folder / ROWS_FILE)
    digest = hashlib.sha256()
    for name in (ROWS_FILE, DEVICE_FILE):
        digest.update((folder / name).read_bytes())
    return ProfileFiles(device, rows, digest.hexdigest())


def check_gpu(gpu: str) -> str:
    """The GPU whose operator tables serve `gpu`, in lower case: its own, or those that its profile names.

    Raises `UsageError` naming what is allowed.
    """
    if gpu.lower() in GPU_NAMES:
        return gpu.lower()
    folder = find_profile(gpu)
    if folder is None:
        raise UsageError(
            f"gpu is '{gpu}'; allowed are {', '.join(GPU_NAMES)}, and the name or folder of a profile that "
            "treewy bench --profile has written"
        )
    device = read_profile(folder).device
    tables = operator_tables(device)
    if tables is None:
        raise UsageError(
            f"profile {gpu} names no operator tables for the rest of a model; name {', '.join(GPU_NAMES)} (nothing is "
            f"timed again): treewy bench --backend {device['backend']} --profile {gpu} --resume --operator-tables "
            f"{GPU_NAMES[0]}"
        )
    return tables


def operator_tables(device: Mapping[str, Any]) -> str | None:
    """The shipped GPU that prices the rest of a model: what `device.json` says, else what the device's name tells."""
    named = device.get("operator_tables")
    if named is not None:
        return str(named) if named in GPU_NAMES else None
    return next((gpu for gpu in GPU_NAMES if gpu in str(device["name"]).lower()), None)
