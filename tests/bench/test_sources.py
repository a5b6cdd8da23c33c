"""Hashes of the kernels' sources, and the shipped profiles: a record must fit the code or say why it need not."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kernels_cupy
from kernels_cupy import attention
from kernels_cupy.choice import candidates, choose_plan
from kernels_cupy.compiler import LAUNCHED, SOURCE_DIR, kernel_hash
from kernels_cupy.covering import variant_of
from kernels_cupy.gate import Case
from kernels_cupy.gate import problem_of as gate_problem
from kernels_cupy.sanitize import TOOLS
from kernels_cupy.sanitize import cases as sanitized_cases
from kernels_cupy.steps import CUDA_METHODS
from lab.bench.cuda_backend import problem_of
from lab.bench.points import default_axes
from lab.bench.sources import source_files, source_hash, staleness
from lab.methods import SERIAL_METHODS
from lab.profiles.folders import SHIPPED, is_profile, read_device
from lab.profiles.kernels import interpolation_errors, load_profile
from lab.profiles.plans import table_of

PROFILES = sorted(folder for folder in SHIPPED.iterdir() if is_profile(folder))


def test_all_cuda_sources_and_their_launchers_count() -> None:
    files = source_files("cuda")
    root = Path(kernels_cupy.__file__).parent
    cuda = {path.relative_to(root).as_posix() for path in root.rglob("*.cu*")}
    assert cuda
    assert cuda <= set(files)
    assert {"closed_form.py", "serial.py", "compiler.py"} <= set(files)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_record_of_the_present_sources_is_not_stale(backend: str) -> None:
    record = {"backend": backend, "source_hash": source_hash(backend), "sources": source_files(backend)}
    assert staleness(record) is None
    assert source_hash(backend) == source_hash(backend)


def test_a_changed_file_is_named() -> None:
    sources = source_files("cuda") | {"serial.py": "another", "gone.py": "x"}
    assert staleness({"source_hash": "another", "sources": sources}) == (
        "the sources have changed: gone.py, serial.py"
    )  # fmt: skip
    assert staleness({"source_hash": "another"}) == "the sources have changed"
    assert "names backend 'tpu'" in str(staleness({"backend": "tpu"}))


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_a_shipped_profile_fits_the_sources_or_says_why_not(folder: Path) -> None:
    device = read_device(folder)
    changed = staleness(device)
    assert changed is None or device.get("stale_reason"), (
        f"{folder.name}: {changed}; measure again, or set stale_reason in its device.json"
    )


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_a_shipped_profile_can_be_read_and_has_an_interpolation_error(folder: Path) -> None:
    profile = load_profile(folder)
    assert all(row.latency_us_p50 is not None for row in profile.rows), "a shipped profile has no red rows"
    errors = interpolation_errors(profile)
    assert {error.axis for error in errors} == {"batch", "rows"}
    print(*errors, sep="\n")


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_records_of_correctness_are_those_of_the_present_kernels(folder: Path) -> None:
    for name in ("gate.json", "drift.json"):
        record = json.loads((folder / name).read_text(encoding="utf-8"))
        assert record["kernel_hash"] == kernel_hash(), f"{name}: run python -m kernels_cupy.{name[:-5]} on a GPU again"
    gated = {launch for entry in gate_cases_of(folder) if (launch := launch_of_entry(entry))}
    launched = {
        variant_of(choose_plan(problem_of(point), point.batch, table))[:2]
        for point in default_axes("cuda", False, CUDA_METHODS).points()
        if point.method not in SERIAL_METHODS
        for table in (table_of("NVIDIA H200"), None)
    }
    assert launched - gated == set(), (
        "gate.json lacks machine code that a point launches: run python -m kernels_cupy.gate on a GPU again"
    )
    text = (folder / "sanitizer.txt").read_text(encoding="utf-8")
    assert kernel_hash() in text
    said, remarks = {}, set[str]()
    for line in text.splitlines()[1:]:
        name = line.split()[0]
        if name.endswith(":"):
            remarks.add(name[:-1])
        else:
            said[name] = line
    assert sorted(said) == sorted(TOOLS)
    for name, line in said.items():
        sessions = re.search(r"(\d+) sessions", line)
        assert sessions is not None
        assert int(sessions[1]) >= len(sanitized_cases())
        clean = re.search(r"\b0 (errors|hazards)", line) is not None
        assert clean or (name == "racecheck" and name in remarks), f"{line}; mend it, or say in the record what it is"


def gate_cases_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "gate.json").read_text(encoding="utf-8"))["cases"]  # type: ignore[no-any-return]


def launch_of_entry(entry: dict[str, Any]) -> tuple[object, ...] | None:
    """The machine code that a case of a record ran; None for methods without a verification in closed form."""
    if entry["plan"] is None:
        return None
    given = {name: entry[name] for name in (field.name for field in fields(Case)) if name != "plan"}
    plans = {plan.name: plan for plan in candidates(gate_problem(Case(**given)))}
    return variant_of(plans[entry["plan"]])[:2]


def test_every_cuda_source_belongs_to_a_record() -> None:
    """The state methods' record hashes its files, that of attention the text of its one source."""
    hashed = {Path(name).name for name in LAUNCHED if name.startswith("src/")}
    assert {path.name for path in SOURCE_DIR.iterdir()} == hashed | {attention.SOURCE}


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_the_gate_of_a_shipped_profile_is_green_and_saw_enough_trees(folder: Path) -> None:
    record = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
    assert [case for case in record["cases"] if case["failed"]] == []
    assert {name.split()[0] for name in record["summary"]} == set(CUDA_METHODS)
    assert min(group["fewest_trees"] for group in record["summary"].values()) >= 200
    for name, group in record["summary"].items():
        if name.endswith("float32") and not name.startswith("replayssm"):
            assert max(group.get("u", 0), group["state"]) <= 1e-5, name
