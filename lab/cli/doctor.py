"""`treewy doctor`: what this machine can run, and what is missing."""

from __future__ import annotations

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
)


def command(as_json: bool = JSON_OPTION) -> None:
    """What this machine can run: cores, packages, GPU; what is missing and how to get it."""
    import os
    import platform
    import shutil
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {"python": platform.python_version(), "cores": str(len(os.sched_getaffinity(0)))}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    found["browser"] = "found" if browser else "not found (only the report's browser tests need one)"
    gpu = _gpu()
    found["gpu"] = gpu or "none visible"
    found["simulate, plan, ledger"] = "ready"
    if gpu is None or found["cupy-cuda13x"] == "not installed":
        found["GPU kernels"] = "not available: need an NVIDIA GPU with its driver and pip install 'treewy-lab[gpu]'"
    else:
        found["GPU kernels"] = "ready"
    if as_json:
        print_json(found)
        return
    print_table("", ("what", "state"), list(found.items()), left=2)


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
