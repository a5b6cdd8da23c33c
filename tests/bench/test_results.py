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
from lab.profiles.folders import is_profile
from lab.profiles.rows import read_rows


def result(**changed: Any) -> BenchResult:
    device = {"name": "GPU", "backend": "cuda", "source_hash": "abc", "stale_reason": None, **changed}
    return BenchResult(device, [row("treelog", 1, 1, "chain:0")], red=["one"], skipped=["two"], left_out=3)


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
    fresh = BenchResult({"name": "GPU", "backend": "cuda", "source_hash": "abc"})
    continue_from(tmp_path / "out", fresh)
    assert len(fresh.rows) == 1
    assert fresh.red == ["one"]
    assert fresh.device["date"] == "2026-11-29"


@pytest.mark.parametrize("changed", [{"name": "other"}, {"source_hash": "def"}, {"backend": "cpu"}])
def test_results_of_different_kernels_or_devices_are_not_mixed(tmp_path: Path, changed: dict[str, str]) -> None:
    save(result(), tmp_path / "out")
    with pytest.raises(UsageError, match=f"--resume: .* was measured with {next(iter(changed))} = "):
        continue_from(tmp_path / "out", result(**changed))


def test_there_must_be_something_to_continue(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no bench to continue"):
        continue_from(tmp_path / "none", result())


def test_the_record_names_device_versions_sources_and_settings() -> None:
    record = new_result(CpuBackend(), {"batches": [1]}, date="2026-11-29", operator_tables="h200").record()
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
