"""Hashes of the kernels' sources, and the shipped profiles: a record must fit the code or say why it need not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kernels_cupy
from kernels_cupy import attention, chained
from kernels_cupy.choice import choose_plan
from kernels_cupy.compiler import LAUNCHED, SOURCE_DIR, kernel_hash
from kernels_cupy.counters import cells as counted_cells
from kernels_cupy.drift import BF16_GROUPS, DECAYS, FP32_RECORDS, GROUPS, bf16_failures
from kernels_cupy.drift import failures as drift_failures
from kernels_cupy.gate import QUICK_SIZES, cases
from kernels_cupy.sanitize import TOOLS
from kernels_cupy.sanitize import cases as sanitized_cases
from kernels_cupy.steps import CUDA_METHODS
from lab.bench.sources import source_files, source_hash, staleness
from lab.profiles.folders import SHIPPED, is_profile, read_device
from lab.profiles.kernels import interpolation_errors, load_profile
from lab.profiles.plans import PLANS_FILE, read_plans

AGAIN = "run python -m kernels_cupy.{} on a GPU again"
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
@pytest.mark.parametrize("name", ["gate", "gate_sm80", "drift", "counters"])
def test_records_are_those_of_the_present_kernels(folder: Path, name: str) -> None:
    assert record_of(folder, name)["kernel_hash"] == kernel_hash(), AGAIN.format(name)


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_the_gate_ran_the_cases_that_it_has_now(folder: Path) -> None:
    """Its cases have every plan of the profile's grid, see tests/kernels/test_gate_cases.py."""
    found = Counter(
        tuple((name, value) for name, value in entry.items() if name not in ("trees", "errors", "failed"))
        for entry in record_of(folder, "gate")["cases"]
    )
    wanted = Counter(tuple(case.record().items()) for case in cases(trees=9))
    assert found == wanted, AGAIN.format("gate")


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_kernels_for_older_gpus_passed_the_quick_gate(folder: Path) -> None:
    record = record_of(folder, "gate_sm80")
    assert record["device"].endswith("compiled for compute_80")
    assert [case for case in record["cases"] if case["failed"]] == []
    plans = {str(case["plan"]) for case in record["cases"]}
    assert not [plan for plan in plans if plan.startswith("wide")], "products of warpgroups are Hopper's"
    sizes = {(case["rows"], case["max_path"]) for case in record["cases"] if case["key_heads"] == 2}
    assert set(QUICK_SIZES) <= sizes, AGAIN.format("gate --quick --ptx 80")


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_the_counters_are_of_the_plans_that_the_profile_has(folder: Path) -> None:
    found = {
        (cell["state_dtype"], cell["tree"], cell["batch"]): cell["plan"]
        for cell in record_of(folder, "counters")["cells"]
    }
    plans = read_plans(folder / PLANS_FILE)
    wanted = {
        (cell.state_dtype, cell.tree, cell.batch): choose_plan(cell.shape.problem, cell.batch, plans).name
        for cell in counted_cells()
    }
    assert found == wanted, AGAIN.format("counters")


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_the_closed_loop_ran_every_group_to_its_end_and_failed_in_none(folder: Path) -> None:
    """Judged again from the errors, by the rule of today."""
    rows = record_of(folder, "drift")["rows"]
    found, plain = Counter[tuple[object, ...]](), {}
    for row in rows:
        loop, errors = (row["group"], row["decay"], row["state_dtype"]), row["state_error"]
        first = plain.setdefault(loop, errors)  # of the plain recurrence, or of storeall
        fp32 = row["state_dtype"] == "float32"
        failed = drift_failures(row["method"], errors) if fp32 else bf16_failures(row["method"], errors, first)
        assert failed == row["failed"]
        found[(*loop, row["method"], row["steps"][-1], *failed)] += 1
    wanted = Counter(
        (group, decay, dtype, method, steps)
        for dtype, steps, groups in (("float32", 10_000, GROUPS), ("bfloat16", 2_000, BF16_GROUPS))
        for group, (_, methods) in groups.items()
        for decay in DECAYS
        for method in (*methods, *([FP32_RECORDS] if dtype == "bfloat16" else []))
    )
    assert found == wanted, AGAIN.format("drift")


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_every_sanitizer_ran_the_sessions_that_there_are_and_found_nothing(folder: Path) -> None:
    first, *lines = (folder / "sanitizer.txt").read_text(encoding="utf-8").splitlines()
    assert first.endswith(f"kernels {kernel_hash()}"), AGAIN.format("sanitize")
    sessions = len(sanitized_cases())
    wanted = {
        name: f"{sessions} sessions, 0 {'hazards' if name == 'racecheck' else 'errors'}" for name in TOOLS
    }  # fmt: skip
    assert dict(line.split(maxsplit=1) for line in lines) == wanted, AGAIN.format("sanitize")


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_chained_launches_of_the_gate_differ_in_no_bit(folder: Path) -> None:
    record = record_of(folder, "gate").get("chained")
    assert record, AGAIN.format("gate")
    if record:
        assert [entry for entry in record if entry["differs"]] == []
        found = Counter(tuple(x for x in entry.items() if x[0] not in ("plan", "differs")) for entry in record)
        assert found == Counter(tuple(case.record().items()) for case in chained.cases()), AGAIN.format("gate")


def record_of(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_every_cuda_source_belongs_to_a_record() -> None:
    """The state methods' record hashes its files, that of attention the text of its one source."""
    hashed = {Path(name).name for name in LAUNCHED if name.startswith("src/")}
    assert {path.name for path in SOURCE_DIR.iterdir()} == hashed | {attention.SOURCE}


@pytest.mark.skipif(not PROFILES, reason="no kernel profile is shipped")
@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_the_gate_of_a_shipped_profile_is_green_and_saw_enough_trees(folder: Path) -> None:
    record = record_of(folder, "gate")
    assert [case for case in record["cases"] if case["failed"]] == []
    assert {name.split()[0] for name in record["summary"]} == set(CUDA_METHODS)
    assert min(group["fewest_trees"] for group in record["summary"].values()) >= 200
    for name, group in record["summary"].items():
        if name.endswith("float32") and not name.startswith("replayssm"):
            assert max(group.get("u", 0), group["state"]) <= 1e-5, name
