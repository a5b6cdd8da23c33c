"""`treewy doctor`: what this machine can run, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.cli.output import JSON_OPTION, print_json, print_table

_PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "simpy",
    "pydantic",
    "polars",
    "altair",
    "vl-convert-python",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-ml-py",
)

#: Longest line of what is said about a profile, without the column before it.
LINE = 85


def command(as_json: bool = JSON_OPTION) -> None:
    """What this machine can run: cores, packages, GPU, profiles; what is missing and how to get it."""
    import os
    import platform
    import shutil
    from importlib.metadata import PackageNotFoundError, version
    from textwrap import wrap

    found: dict[str, Any] = {"python": platform.python_version(), "cores": str(len(os.sched_getaffinity(0)))}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    found["browser"] = "found" if browser else "not found (only the report's browser tests need one)"
    found["gpu"] = _gpu() or "none visible"
    found["nvrtc"] = _nvrtc()
    found["simulate, plan, ledger"] = "ready"
    found["bench --backend cpu"] = "ready"
    found["GPU kernels"] = _gpu_kernels()
    profiles = _profiles()
    if as_json:
        print_json({**found, "profiles": profiles})
        return
    rows = list(found.items())
    for profile in profiles:
        lines = [
            line
            for part in _parts(profile)
            for line in wrap(part, LINE, break_long_words=False, break_on_hyphens=False)
        ]
        rows += zip([f"profile {profile['name']}", *[""] * (len(lines) - 1)], lines, strict=True)
    if not profiles:
        rows.append(("profiles", "none; measure one with treewy bench --backend cuda --profile NAME"))
    print_table("", ("what", "state"), rows, left=2)


def _gpu() -> str | None:
    """Name of the first GPU as the driver tells it, or none."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _nvrtc() -> str:
    """The CUDA run-time compiler: what CuPy would use, else the package that compiles without a GPU."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        from cupy.cuda import nvrtc

        return ".".join(map(str, nvrtc.getVersion()))
    except ImportError:
        pass
    except Exception as error:  # a library that does not load fails in its own ways
        return f"does not load ({error}); install CuPy for this driver's CUDA with pip install -e '.[gpu]'"
    try:
        return f"{version('nvidia-cuda-nvrtc')}, compiles the kernels without a GPU"
    except PackageNotFoundError:
        return "not installed; pip install -e '.[dev]' brings it, to compile the kernels without a GPU"


def _gpu_kernels() -> str:
    """Whether the CUDA kernels can be launched, or what they lack."""
    from kernels_cupy.device import check_gpu
    from lab.errors import MissingError

    try:
        check_gpu()
    except MissingError as error:
        return f"not available: {error}"
    return "ready: treewy bench --backend cuda"


def _profiles() -> list[dict[str, Any]]:
    """Every profile: name, folder, device, age, whether the kernels have changed since, interpolation errors, plans.

    Folders of the user's that lack a file, and a place that cannot be read, have an `error` instead; so has a GPU
    without a profile whose table of plans cannot be used.
    """
    from lab.cli.plantables import table_state
    from lab.profiles.folders import all_profiles, incomplete_profiles, is_profile, user_profiles
    from lab.profiles.plans import shipped_tables

    found: list[dict[str, Any]] = []
    try:
        for name, folder in all_profiles():
            found.append(_profile(name, folder))  # what was found stays when the next cannot be read
        for folder, missing in incomplete_profiles():
            error = f"incomplete, it lacks {' and '.join(missing)}; measure it again or remove {folder}"
            found.append({"name": folder.name, "folder": str(folder), "error": error})
    except OSError as error:
        place = user_profiles()
        found.append({"name": "of your own", "folder": str(place), "error": f"{place}: {error.strerror}"})
    for name, path in shipped_tables().items():
        if not is_profile(path.parent) and (state := table_state(path.parent)) and state["errors"]:
            found.append({"name": name, "folder": str(path.parent), "error": " ".join(state["errors"])})
    return found


def _profile(name: str, folder: Path) -> dict[str, Any]:
    from lab.bench.sources import staleness
    from lab.cli.plantables import table_state
    from lab.errors import UsageError
    from lab.profiles.kernels import interpolation_errors, load_profile

    record: dict[str, Any] = {"name": name, "folder": str(folder)}
    try:
        profile = load_profile(folder)
    except UsageError as error:
        return {**record, "error": str(error), "plans": table_state(folder)}
    return {
        **record,
        "device": profile.device_name,
        "rows": len(profile.rows),
        "date": profile.device.get("date"),
        "changed": staleness(profile.device),
        "stale_reason": profile.stale_reason,
        "plans": table_state(folder, profile.device),
        "interpolation": [str(error) for error in interpolation_errors(profile)],
    }


def _parts(profile: dict[str, Any]) -> list[str]:
    """What there is to say about a profile, part by part."""
    plans = profile.get("plans")
    table = [f"table of plans: {plans['places']} places"] if plans and plans["places"] is not None else []
    table += [f"table of plans cannot be used: {error}" for error in (plans["errors"] if plans else ())]
    if "error" in profile:
        return [f"cannot be used: {profile['error']}", *table]
    parts = [f"{profile['device']}, {profile['rows']} rows, {_age(profile['date'])}"]
    reason = profile["stale_reason"]
    if profile["changed"] is None:
        parts.append("matches the sources" + (f", but: {reason}" if reason else ""))
    else:
        parts.append(f"{profile['changed']} ({'kept because: ' + reason if reason else 'measure again'})")
    return parts + table + [f"interpolation {text}" for text in profile["interpolation"]]


def _age(date: str | None) -> str:
    import datetime

    if date is None:
        return "not dated"
    try:
        days = (datetime.datetime.now(datetime.UTC).date() - datetime.date.fromisoformat(date)).days
    except ValueError:
        return f"dated {date!r}, which is no date (YYYY-MM-DD is needed in device.json)"
    if days < 0:
        return f"dated {date}, which is in the future (correct date in device.json, or the clock)"
    return f"measured {date}, {days} days ago"
