"""`treewy calibrate`: errors by metric, fitted constants that a scenario can name, one sentence on bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.cli.scenarios import load

Call = Callable[..., tuple[int, str, str]]

SCENARIO: dict[str, Any] = {
    "model": "Qwen3.5-35B-A3B",
    "gpu": "h200",
    "engine": {"max_model_len": 8192},
    "speculation": {"state_method": "recurrent"},
    "workload": {"lengths": "fixed:800/100", "max_concurrency": 4, "num_requests": 8},
}
TIMES = "input_tokens,output_tokens,arrival_s,ttft_ms,e2el_ms\n800,100,0,60,900\n2000,120,0.2,110,1100\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(SCENARIO))
    (tmp_path / "times.csv").write_text(TIMES)
    return tmp_path / "s.yaml", tmp_path / "times.csv"


def test_errors_of_every_metric(call: Call, files: tuple[Path, Path]) -> None:
    code, out, _ = call("calibrate", str(files[0]), "--engine-result", str(files[1]), "--json")
    record = json.loads(out)
    assert code == 0
    (errors,) = record["errors"].values()
    assert {"mean_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "mean_e2el_ms", "output_throughput"} <= set(errors)
    assert errors["mean_ttft_ms"]["measured"] == pytest.approx(85.0)
    assert "constants" not in record


def test_fitted_constants_reach_a_run_and_its_record(call: Call, files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    fitting = ("--fit", "--constants", "host.ms_per_step", "--out", str(out))
    code, text, err = call("calibrate", str(files[0]), "--engine-result", str(files[1]), *fitting)
    assert (code, "95 % interval" in text, f"wrote {out}" in err) == (0, True, True)
    value = json.loads(out.read_text())["constants"]["host.ms_per_step"]["value"]
    assert value > 2.0  # the measured service is slower than the default
    (tmp_path / "s2.yaml").write_text(yaml.safe_dump({**SCENARIO, "calibration": str(out)}))
    code, _, _ = call("plan", str(tmp_path / "s2.yaml"), "--out", str(tmp_path / "run"), "--jobs", "1")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert code == 0
    assert record["first_cell"]["host"]["ms_per_step"] == value
    assert record["calibration"][0]["constants"] == {"host.ms_per_step": value}
    assert record["calibration"][0]["same_model_and_gpu"] is True
    assert "Calibrated with" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "c.json"), "--out and --constants belong to --fit"),
        (("--fit", "--constants", "speed"), "no constant 'speed'"),
        (("--fit", "--constants", "acceptance"), "the scenario drafts nothing"),
        (("--fit", "--constants", "acceptance", "--out", "c.json"), "none of them is fitted; name one in"),
        (("--fit", "--out", "no/such/c.json"), "there is no folder no/such; make it"),
        (("--fit", "--out", "."), "is a folder; name a file"),
    ],
)
def test_bad_flags_end_in_one_sentence(
    call: Call, files: tuple[Path, Path], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = call("calibrate", str(files[0]), "--engine-result", str(files[1]), *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_seconds_are_refused_with_the_remedy(call: Call, files: tuple[Path, Path], tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    fields = {"duration": 10.0, "completed": 5, "total_input_tokens": 500, "total_output_tokens": 500}
    result.write_text(json.dumps({**fields, "mean_ttft_ms": 0.2, "output_throughput": 50.0}))
    code, _, err = call("calibrate", str(files[0]), "--engine-result", str(result))
    assert code == 2
    assert "multiply by 1000" in err


def test_another_model_is_noted(call: Call, files: tuple[Path, Path], tmp_path: Path) -> None:
    fields = {"duration": 10.0, "completed": 5, "total_input_tokens": 500, "total_output_tokens": 500}
    result = tmp_path / "r.json"
    for model, noted in (("Qwen/qwen3.5-35b-a3b", False), ("models/Qwen3.5-35B-A3B-FP8/", False), ("a/Other", True)):
        result.write_text(json.dumps({**fields, "mean_ttft_ms": 80.0, "model_id": model}))
        code, _, err = call("calibrate", str(files[0]), "--engine-result", str(result))
        assert code == 0
        assert ("the result is of" in err) is noted


def test_an_interruption_is_one_line(
    call: Call, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulator.calibration.report.fit", stopped)
    arguments = ("--engine-result", str(files[1]), "--fit", "--out", str(tmp_path / "c.json"))
    code, out, err = call("calibrate", str(files[0]), *arguments)
    assert (code, out, err) == (130, "", "interrupted: nothing was written\n")
    assert not (tmp_path / "c.json").exists()


def test_a_calibration_is_found_beside_the_scenario_then_here(
    call: Call, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    files[0].write_text(yaml.safe_dump({**SCENARIO, "calibration": "c.json"}))
    code, _, err = call("plan", str(files[0]), "--out", "run")
    assert code == 2
    assert f"no file {tmp_path / 'c.json'} and none {here / 'c.json'}" in err
    for folder, value in ((here, 3.0), (tmp_path, 4.0)):
        record = {"schema_version": 1, "constants": {"host.ms_per_step": {"value": value}}}
        (folder / "c.json").write_text(json.dumps(record))
        assert load(files[0], {})["calibration"] == str(folder / "c.json" if folder == tmp_path else Path("c.json"))
