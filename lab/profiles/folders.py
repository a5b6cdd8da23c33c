"""Where kernel profiles live, and what a GPU's name means.

A profile is a folder with `kernels.csv` and `device.json`. The package ships some beside this file, by the names of
GPUs. `treewy bench --profile NAME` writes one's own under `$XDG_DATA_HOME/treewy-lab/profiles/NAME` (without that
variable `~/.local/share`); a NAME with a slash is the folder itself. `--gpu` takes any of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.errors import UsageError

#: GPUs whose operator tables are shipped, by the name a scenario uses.
GPU_NAMES = ("h200", "b200", "h100")
#: Folder of the profiles that the package ships.
SHIPPED = Path(__file__).parent
ROWS_FILE = "kernels.csv"
DEVICE_FILE = "device.json"


def user_profiles() -> Path:
    """Folder of the user's own profiles; it need not exist."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "treewy-lab" / "profiles"


def is_profile(folder: Path) -> bool:
    return (folder / ROWS_FILE).is_file() and (folder / DEVICE_FILE).is_file()


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


def read_device(folder: Path) -> dict[str, Any]:
    """The mapping in `device.json`; raises `UsageError` when it cannot be read."""
    path = folder / DEVICE_FILE
    try:
        device = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(device, dict) or not isinstance(device.get("name"), str):
        raise UsageError(f"{path} must be a mapping that gives the device's 'name'")
    return device


def profile_hash(folder: Path) -> str:
    """Hash of what a profile says: both of its files."""
    digest = hashlib.sha256()
    for name in (ROWS_FILE, DEVICE_FILE):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


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
    tables = operator_tables(read_device(folder))
    if tables is None:
        raise UsageError(
            f"profile {folder} names no operator tables for the rest of a model; set operator_tables in "
            f"{DEVICE_FILE} (or treewy bench --operator-tables) to {', '.join(GPU_NAMES)}"
        )
    return tables


def operator_tables(device: Mapping[str, Any]) -> str | None:
    """The shipped GPU that prices the rest of a model: what `device.json` says, else what the device's name tells."""
    named = device.get("operator_tables")
    if named is not None:
        return str(named) if named in GPU_NAMES else None
    return next((gpu for gpu in GPU_NAMES if gpu in str(device["name"]).lower()), None)
