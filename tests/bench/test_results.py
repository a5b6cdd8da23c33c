"""Bench folders: written whole, replaced only when they are benches, continued only on equal terms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernel_profiles import row

from lab.bench.cpu_backend import CpuBackend
from lab.bench.results import BenchResult, check_target, continue_from, git_hash, new_result, save
from lab.errors import UsageError
from lab.profiles.folders import is_profile, read_device
from lab.profiles.rows import read_rows

EFFORT = {"relative_spread": 0.01, "limit_s": 0.2, "min_samples": 9, "cycle_bytes": 1}


def result(**changed: Any) -> BenchResult:
    device = {
        "schema_version": 1, "name": "GPU", "backend": "cuda", "source_hash": "abc", "stale_reason": None,
        "copy_bandwidth_bytes_per_s": 10**12, **changed,
    }  # fmt: skip
    settings = {**EFFORT, "methods": ["treelog"], "date": changed.get("date")}
    return BenchResult(
        device, [row("treelog", 1, 1, "chain:0")], red=["one"], skipped=["two"], left_out=3, measured=1,
        settings=settings,
    )  # fmt: skip


def test_a_result_is_a_profile_folder(tmp_path: Path) -> None:
    save(result(), tmp_path / "a" / "out")
    assert is_profile(tmp_path / "a" / "out")
    assert len(read_rows(tmp_path / "a" / "out" / "kernels.csv")) == 1
    device = json.loads((tmp_path / "a" / "out" / "device.json").read_text())
    assert (device["red"], device["skipped"], device["points_left_out"]) == (["one"], ["two"], 3)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]


def test_a_bench_is_replaced_and_its_other_files_stay(tmp_path: Path) -> None:
    save(result(), tmp_path / "out")
    (tmp_path / "out" / "ops.csv").write_text("kept")
    again = result(name="another")
    save(again, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "device.json").read_text())["name"] == "another"
    assert (tmp_path / "out" / "ops.csv").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no bench"):
        check_target(tmp_path)
    with pytest.raises(UsageError, match="holds no bench"):
        save(result(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_earlier_bench_goes_on_with_equal_sources_on_the_same_device(tmp_path: Path) -> None:
    save(result(date="2026-11-29"), tmp_path / "out")
    fresh = result(date="2026-12-24", copy_bandwidth_bytes_per_s=9)
    fresh.rows = []
    continue_from(tmp_path / "out", fresh)
    assert len(fresh.rows) == 1
    assert (fresh.red, fresh.skipped) == (["one"], ["two"])
    assert fresh.device["date"] == "2026-11-29", "the rows that were there are as old as they were"


def test_every_run_keeps_its_own_settings_date_and_bandwidth(tmp_path: Path) -> None:
    save(result(date="2026-11-29"), tmp_path / "out")
    second = result(date="2026-12-24", copy_bandwidth_bytes_per_s=9)
    continue_from(tmp_path / "out", second)
    save(second, tmp_path / "out")
    runs = read_device(tmp_path / "out")["runs"]
    assert [(run["date"], run["copy_bandwidth_bytes_per_s"], run["methods"], run["points"]) for run in runs] == [
        ("2026-11-29", 10**12, ["treelog"], 1), ("2026-12-24", 9, ["treelog"], 1),
    ]  # fmt: skip
    idle = result()
    idle.measured = 0
    continue_from(tmp_path / "out", idle)
    assert idle.record()["runs"] == runs, "a run that measured nothing leaves no entry"


def test_a_bench_measured_as_hard_only_goes_on(tmp_path: Path) -> None:
    save(result(), tmp_path / "out")
    quick = result()
    quick.settings = quick.settings | {"limit_s": 1.0}
    with pytest.raises(UsageError, match=r"limit_s = 0\.2, now it is 1\.0; give or leave away --quick"):
        continue_from(tmp_path / "out", quick)


def test_what_earlier_runs_said_of_a_point_goes_when_it_is_measured_again() -> None:
    found = BenchResult({}, red=["a, 1 rows: x", "a, 12 rows: x"], skipped=["b, 1 rows: y"])
    found.forget("a, 1 rows")
    assert (found.red, found.skipped) == (["a, 12 rows: x"], ["b, 1 rows: y"])


@pytest.mark.parametrize("changed", [{"name": "other"}, {"source_hash": "def"}, {"backend": "cpu"}, {"threads": 3}])
def test_results_of_different_kernels_or_devices_are_not_mixed(tmp_path: Path, changed: dict[str, Any]) -> None:
    save(result(), tmp_path / "out")
    with pytest.raises(UsageError, match=f"--resume: .* was measured with {next(iter(changed))} = "):
        continue_from(tmp_path / "out", result(**changed))


def test_there_must_be_something_to_continue(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no bench to continue"):
        continue_from(tmp_path / "none", result())


@pytest.mark.parametrize("name", ["kernels.csv", "device.json"])
def test_half_a_bench_says_which_file_is_missing(tmp_path: Path, name: str) -> None:
    save(result(), tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    with pytest.raises(UsageError, match=f"out lacks {name}; put it back"):
        continue_from(tmp_path / "out", result())


def test_a_damaged_record_says_what_to_do(tmp_path: Path) -> None:
    save(result(), tmp_path / "out")
    path = tmp_path / "out" / "device.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(UsageError, match=r"device\.json is damaged .* put a copy back, or remove"):
        continue_from(tmp_path / "out", result())


def test_a_bench_is_not_replaced_unasked(tmp_path: Path) -> None:
    save(result(), tmp_path / "out")
    with pytest.raises(UsageError, match=r"holds a bench already; give --resume .* --overwrite"):
        check_target(tmp_path / "out", replace=False)
    check_target(tmp_path / "out")
    check_target(tmp_path / "new", replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_told_by_the_users_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "out", Path("/proc/bench/out")):
        with pytest.raises(UsageError, match=f"^{folder} cannot be written .* give a folder where"):
            check_target(folder)

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        check_target(tmp_path / "out")


def test_the_present_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="give a folder of its own"):
        check_target(Path("."))


def test_the_record_names_device_versions_sources_and_settings() -> None:
    found = new_result(CpuBackend(), {"batches": [1]}, date="2026-11-29", operator_tables="h200")
    found.measured = 1
    record = found.record()
    (run,) = record["runs"]
    assert (run["batches"], run["date"], run["points"]) == ([1], "2026-11-29", 1)
    assert record["backend"] == "cpu"
    assert {"name", "cores", "threads", "numba", "numpy", "treewy_version", "git_hash", "source_hash"} <= set(record)
    assert "closed_form.py" in record["sources"]
    assert (record["date"], record["operator_tables"], record["stale_reason"]) == ("2026-11-29", "h200", None)
    assert "date" not in new_result(CpuBackend(), {}).record()


def test_the_commit_is_named_only_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lab

    found = git_hash()
    assert found is None or len(found.removesuffix("+")) == 40
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "lab" / "__init__.py"))
    assert git_hash() is None
