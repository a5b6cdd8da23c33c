"""`treewy bench` for kernels: real runs of the CPU backend on small heads, refusals, profiles, and doctor's view."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from kernel_profiles import row as kernel_row
from kernel_profiles import write_profile

from lab.bench.sources import source_hash
from lab.data import data_path
from lab.profiles.folders import read_device, target_folder
from lab.profiles.rows import COLUMNS, read_rows

HAS_CUPY = importlib.util.find_spec("cupy") is not None


@pytest.fixture
def small_model(tmp_path: Path) -> str:
    """The shape of a shipped model with one key head and two value heads of 32."""
    config = json.loads(data_path("models", "Qwen3.5-0.8B.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text |= {
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


SHORT = ("bench", "--backend", "cpu", "--quick", "--batch", "2", "--tree", "1,1", "--method")


def test_a_bench_writes_kernels_csv_and_device_json(call: Any, small_model: str, tmp_path: Path) -> None:
    out = tmp_path / "bench"
    code, text, err = call(*SHORT, "treelog,storeall", "--model", small_model, "--out", str(out))
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["device.json", "kernels.csv"]
    rows = read_rows(out / "kernels.csv")
    assert [(row.method, row.phase) for row in rows] == [
        ("storeall", "step"), ("storeall", "verify"), ("treelog", "flush"), ("treelog", "step"),
        ("treelog", "verify"),
    ]  # fmt: skip
    for row in rows:
        assert (row.batch, row.rows, row.tree, row.timer, row.head_dim) == (2, 3, "chain:2", "eager", 32)
        assert row.latency_us_p50 is not None
        assert row.rel_err_state <= 1e-5
    assert "p50 us" in text
    assert f"wrote {out}" in err.replace("\n", "")


def test_json_holds_the_device_and_the_rows(call: Any, small_model: str) -> None:
    code, text, _ = call(*SHORT, "treewy", "--model", small_model, "--phase", "step", "--json")
    result = json.loads(text)
    assert code == 0
    assert [tuple(row) for row in result["rows"]] == [COLUMNS]
    assert result["device"]["backend"] == "cpu"
    assert [run["methods"] for run in result["device"]["runs"]] == [["treewy"]]


def test_a_profile_serves_simulations_by_its_name(call: Any, small_model: str, tmp_path: Path) -> None:
    flags = ("--profile", "mine", "--operator-tables", "h200", "--date", "2026-11-29")
    code, _, _ = call(*SHORT, "treelog", "--model", small_model, *flags)
    assert code == 0
    ledgers = [call("ledger", "--model", "Qwen3.5-35B-A3B", "--gpu", gpu, "--json") for gpu in ("mine", "h200")]
    assert ledgers[0][:2] == ledgers[1][:2]
    (profile,) = [each for each in json.loads(call("doctor", "--json")[1])["profiles"] if each["name"] == "mine"]
    assert profile["changed"] is None
    assert "measured 2026-11-29" in call("doctor")[1]


def test_resume_measures_only_what_is_missing(call: Any, small_model: str, tmp_path: Path) -> None:
    arguments = ("--model", small_model, "--out", str(tmp_path / "out"), "--phase", "step")
    call(*SHORT, "treelog", *arguments)
    before = (tmp_path / "out" / "kernels.csv").read_text().splitlines()
    code, _, _ = call(*SHORT, "treelog,treewy", *arguments, "--resume")
    after = (tmp_path / "out" / "kernels.csv").read_text().splitlines()
    assert code == 0
    assert len(after) == len(before) + 1
    assert set(before) <= set(after)


def test_resume_alone_goes_on_with_what_the_last_run_was_to_measure(
    call: Any, small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", str(tmp_path / "out"))
    stop_after(monkeypatch, 2)
    code, _, err = call(*SHORT, "treelog,treewy,bole", "--phase", "step", "--model", small_model, *out)
    assert code == 130
    again = f"treewy bench --backend cpu --out {out[1]} --resume"
    assert f"interrupted: 2 points are kept in {out[1]}; continue with: {again}" in err
    assert read_device(tmp_path / "out")["points_left_out"] == 1
    monkeypatch.undo()
    code, _, _ = call(*again.split()[1:])
    assert code == 0
    rows = read_rows(tmp_path / "out" / "kernels.csv")
    assert [(row.method, row.phase) for row in rows] == [("bole", "step"), ("treelog", "step"), ("treewy", "step")]
    device = read_device(tmp_path / "out")
    assert ([run["points"] for run in device["runs"]], device["points_left_out"]) == ([2, 1], 0)


def stop_after(monkeypatch: pytest.MonkeyPatch, points: int) -> None:
    """Ctrl-C when so many points are measured."""
    from lab.bench.cpu_backend import CpuBackend

    whole, asked = CpuBackend.refusal, []

    def refusal(self: CpuBackend, point: Any) -> str | None:
        asked.append(point)
        if len(asked) > points:
            raise KeyboardInterrupt
        return whole(self, point)

    monkeypatch.setattr(CpuBackend, "refusal", refusal)


def test_an_interruption_before_the_first_point_writes_nothing(
    call: Any, small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 0)
    code, _, err = call(*SHORT, "treelog", "--model", small_model, "--out", str(tmp_path / "out"))
    assert code == 130
    assert "no point was measured yet" in err
    assert not (tmp_path / "out").exists()


def test_a_bench_is_replaced_only_with_overwrite(call: Any, small_model: str, tmp_path: Path) -> None:
    flags = (*SHORT, "recurrent", "--tree", "chain:0", "--model", small_model, "--out", str(tmp_path / "out"))
    assert call(*flags)[0] == 0
    before = (tmp_path / "out" / "kernels.csv").read_text()
    code, _, err = call(*flags)
    assert code == 2
    assert "give --resume to add what it lacks, --overwrite to measure it anew" in err
    assert (tmp_path / "out" / "kernels.csv").read_text() == before
    assert call(*flags, "--overwrite")[0] == 0
    assert (tmp_path / "out" / "kernels.csv").read_text() != before


def test_nothing_measured_is_a_failure_that_says_why(call: Any, small_model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _, err = call(*SHORT, "treewy", "--phase", "flush", "--model", small_model, "--out", str(out))
    assert code == 1
    assert "left out: treewy: no phase flush of its own" in err
    assert "nothing was measured: treewy has none of the phases flush" in err
    assert "wrote" not in err
    assert not out.exists()


def test_pairs_that_cannot_run_are_left_out_aloud(call: Any, small_model: str) -> None:
    _, _, err = call(*SHORT, "treewy,recurrent", "--tree", "chain:0", "--phase", "step", "--model", small_model)
    assert err.splitlines()[0] == "left out: recurrent cannot verify chain:2"


def test_a_profile_without_operator_tables_says_how_to_name_them(call: Any, small_model: str, tmp_path: Path) -> None:
    _, _, err = call(*SHORT, "treewy", "--phase", "step", "--model", small_model, "--profile", "mine")
    again = "treewy bench --backend cpu --profile mine --resume --operator-tables h200"
    assert "note: --operator-tables is not given" in err
    assert again in err
    code, _, err = call("ledger", "--model", "Qwen3.5-35B-A3B", "--gpu", "mine")
    assert code == 2
    assert again in err
    before = target_folder("mine").joinpath("kernels.csv").read_text()
    assert call(*again.split()[1:])[0] == 0
    assert target_folder("mine").joinpath("kernels.csv").read_text() == before
    assert call("ledger", "--model", "Qwen3.5-35B-A3B", "--gpu", "mine")[0] == 0


def test_a_red_gate_exits_with_1_and_prints_no_time(
    call: Any, small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lab.bench.cpu_backend import CpuBackend
    from lab.bench.reference import GateErrors

    monkeypatch.setattr(CpuBackend, "gate", lambda *_: GateErrors(1e-7, 0.5))
    out = tmp_path / "red"
    code, text, err = call(*SHORT, "treelog", "--model", small_model, "--out", str(out))
    assert code == 1
    assert "gate red" in text
    assert "state error 5.0e-01 > 1.0e-05" in err
    assert all(row.latency_us_p50 is None and row.rel_err_state == 0.5 for row in read_rows(out / "kernels.csv"))


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed")
def test_cuda_without_cupy_exits_with_3_and_says_how_to_get_it(call: Any) -> None:
    code, _, err = call("bench", "--backend", "cuda", "--quick")
    assert code == 3
    assert "pip install -e '.[gpu]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "tpu"), "--backend is 'tpu'; allowed are cpu, cuda"),
        (("--backend", "cpu", "--method", "lumotree"), "which backend cpu does not run"),
        (("--backend", "cpu", "--method", "magic"), "state_method is 'magic'"),
        (("--backend", "cpu", "--batch", "1,x"), "--batch is '1,x'"),
        (("--backend", "cpu", "--phase", "warm"), "--phase is 'warm'"),
        (("--backend", "cpu", "--tree", "9,9,9"), "more than 64 rows"),
        (("--backend", "cpu", "--state-dtype", "fp8"), "--state-dtype is 'fp8'"),
        (("--backend", "cpu", "--resume"), "--resume needs the folder"),
        (("--backend", "cpu", "--out", "a", "--profile", "b"), "give one of them"),
        (("--backend", "cpu", "--profile", "h200"), "is the name of a shipped GPU"),
        (("--backend", "cpu", "--date", "today"), "--date is 'today'"),
        (("--backend", "cpu", "--profile", "x", "--operator-tables", "a100"), "--operator-tables is 'a100'"),
        (("--profile-error", "none"), "no such profile"),
        (("--profile-error", "h200", "--batch", "4"), "--batch has no meaning beside --profile-error"),
        (("--simulator", "--backend", "cpu", "--out", "x"), "--backend, --out has no meaning beside --simulator"),
        (("--backend", "cpu", "--running", "8", "--steps", "9999"), "--running, --steps has no meaning"),
        (("--backend", "cpu", "--eager"), "--eager is for --backend cuda"),
        (("--backend", "cpu", "--out", "a", "--resume", "--overwrite"), "give one of them"),
        (("--backend", "cpu", "--out", ""), "--out is ''; the name of a folder is needed"),
        (("--backend", "cpu", "--method", ""), "--method is ''; allowed are recurrent, storeall"),
        (("--backend", "cpu", "--method", ","), "--method is ','; allowed are recurrent, storeall"),
        (("--backend", "cpu", "--batch", "1,,2"), "--batch is '1,,2'; positive whole numbers by single commas"),
    ],
)
def test_unusable_flags_are_one_sentence(call: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call("bench", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out


def test_profile_error_prints_median_and_worst(call: Any, tmp_path: Path) -> None:
    folder = write_profile(tmp_path / "gpu")
    code, text, _ = call("bench", "--profile-error", str(folder))
    assert code == 0
    assert "median" in text
    assert "worst" in text
    errors = json.loads(call("bench", "--profile-error", str(folder), "--json")[1])
    assert [error["axis"] for error in errors] == ["batch", "rows"]


def test_profile_error_of_too_small_a_grid_fails_and_says_what_to_add(call: Any, tmp_path: Path) -> None:
    folder = write_profile(tmp_path / "gpu", [kernel_row("treelog", batch, 1, "chain:0") for batch in (1, 4)])
    code, _, err = call("bench", "--profile-error", str(folder))
    assert code == 1
    assert "has three batches (--batch 1,4,16 --resume) or three sizes" in err


def test_doctor_tells_a_stale_profile_and_one_that_is_broken(call: Any, tmp_path: Path) -> None:
    profiles = tmp_path / "home" / "treewy-lab" / "profiles"
    write_profile(profiles / "old", source_hash="before", stale_reason="comments only")
    write_profile(profiles / "half", source_hash=source_hash("cuda"), stale_reason="half of it is older")
    write_profile(profiles / "broken")
    (profiles / "broken" / "kernels.csv").write_text("nonsense")
    code, text, _ = call("doctor")
    assert code == 0
    assert "the sources have changed (kept because: comments only)" in text
    assert "matches the sources, but: half of it is older" in text
    assert "interpolation along batch: median 0.0%" in text
    assert "cannot be used: " + str(profiles / "broken") in " ".join(text.split())
    assert "nvrtc" in text
    lines = [line for line in text.splitlines() if str(tmp_path) not in line and not line.startswith("---")]
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    "verb",
    [
        ("ledger", "--model", "Qwen3.5-35B-A3B", "--gpu", "mine"),
        ("bench", "--profile-error", "mine"),
        ("compare", "mine", "h200"),
        ("bench", "--backend", "cpu", "--profile", "mine", "--resume"),
    ],
    ids=" ".join,
)
def test_every_verb_refuses_a_profile_with_a_bad_row(call: Any, tmp_path: Path, verb: tuple[str, ...]) -> None:
    write_profile(tmp_path / "home" / "treewy-lab" / "profiles" / "mine", [kernel_row("magic", 1, 1, "chain:0")])
    code, _, err = call(*verb)
    assert code == 2
    assert "kernels.csv, line 2: method is 'magic'; allowed are" in err


@pytest.mark.parametrize(
    ("date", "said"), [("2999-01-01", "dated 2999-01-01, which is in the future"), ("May", "'May', which is no date")]
)
def test_doctor_doubts_dates(call: Any, tmp_path: Path, date: str, said: str) -> None:
    write_profile(tmp_path / "home" / "treewy-lab" / "profiles" / "mine", date=date)
    assert said in call("doctor")[1]


def test_doctor_lists_half_a_profile_and_a_record_it_cannot_trust(call: Any, tmp_path: Path) -> None:
    profiles = tmp_path / "home" / "treewy-lab" / "profiles"
    write_profile(profiles / "future", schema_version=99, source_hash=source_hash("cuda"))
    (write_profile(profiles / "half") / "device.json").unlink()
    found = {profile["name"]: profile for profile in json.loads(call("doctor", "--json")[1])["profiles"]}
    assert "schema_version is 99; 1 is needed" in found["future"]["error"]
    assert "incomplete, it lacks device.json" in found["half"]["error"]
    assert "rows" in found["h200"]


def test_doctor_survives_profiles_that_cannot_be_read(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = tmp_path / "home" / "treewy-lab" / "profiles"
    profiles.mkdir(parents=True)
    whole = Path.iterdir

    def iterdir(folder: Path) -> Any:
        if folder == profiles:
            raise PermissionError(13, "Permission denied", str(folder))
        return whole(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    code, text, _ = call("doctor")
    assert code == 0
    assert f"cannot be used: {profiles}: Permission denied" in " ".join(text.split())
    assert "profile h200" in text
    assert "bench --backend cpu" in text


def test_a_quick_bench_that_runs_out_of_time_has_seen_every_tree_and_method() -> None:
    from lab.bench.cpu_backend import CpuBackend
    from lab.bench.points import default_axes, spread_out

    points = default_axes("cpu", True, CpuBackend.methods).points()
    first = spread_out(points)[: len(CpuBackend.methods)]
    assert {point.method for point in first} == set(CpuBackend.methods)
    assert {point.tree_text for point in first} == {"chain:0", "chain:3", "2,2,2"}
    assert sorted(map(str, spread_out(points))) == sorted(map(str, points))


@pytest.mark.slow
def test_a_quick_cpu_bench_runs_every_method_on_real_heads(call: Any, tmp_path: Path) -> None:
    code, _, _ = call("bench", "--backend", "cpu", "--quick", "--out", str(tmp_path / "out"))
    rows = read_rows(tmp_path / "out" / "kernels.csv")
    assert code == 0
    assert {(row.key_heads, row.value_heads, row.head_dim) for row in rows} == {(16, 32, 128)}
    assert {row.method for row in rows if row.phase == "step"} >= {"recurrent", "storeall", "treewy", "bole", "treelog"}
