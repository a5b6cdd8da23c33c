"""What simulations say of a profile that does not price every state method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernel_profiles import grid_rows, write_profile

from lab.cli.profilenotes import calibration_notes, profile_notes
from lab.profiles.folders import target_folder
from simulator.scenario import expand

SCENARIO = {
    "model": "Qwen3.5-35B-A3B",
    "gpu": "mine",
    "engine": {"gpu_memory_utilization": 0.9, "max_num_seqs": 8, "max_model_len": 4096},
    "speculation": {
        "state_method": ["treelog", "storeall", "lumotree", "recurrent"], "tree": ["1,1,1", "2,2"],
        "acceptance": {"per_depth": [0.8, 0.7, 0.6], "rank_rescue": [0.2]},
    },
    "workload": {
        "trace": "azure-conv", "max_concurrency": 2,
        "num_requests": 4,
    },
}  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the profile that the scenario names."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return target_folder("mine")


def test_methods_without_a_step_are_named_with_where_their_cost_comes_from(mine: Path) -> None:
    write_profile(mine, grid_rows(("treelog",)), name="My CPU", backend="cpu", operator_tables="h200")
    (note,) = profile_notes(expand(SCENARIO))
    assert "profile mine has no step of storeall, lumotree (float32 state)" in note
    assert "the operator tables of h200 say, not what My CPU takes" in note
    assert note.endswith("treewy bench --backend cpu --profile mine --resume --method storeall,lumotree")


def test_a_shipped_gpu_and_a_whole_profile_need_no_word(mine: Path) -> None:
    write_profile(mine, grid_rows(("treelog", "storeall", "lumotree")))
    assert profile_notes(expand(SCENARIO)) == []
    assert profile_notes(expand({**SCENARIO, "gpu": "h200"})) == []


def test_simulate_warns_before_it_runs(call: Any, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    write_profile(mine, grid_rows(("treelog",)))
    code, _, err = call("simulate", str(tmp_path / "scenario.yaml"), "--out", str(tmp_path))
    assert code == 2, "the folder holds something else"
    assert err.startswith("warning: profile mine has no step of storeall, lumotree")


def test_a_profile_without_steps_is_unusable(call: Any, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    write_profile(mine, [])
    code, _, err = call("simulate", str(tmp_path / "scenario.yaml"))
    assert code == 2
    assert "profile mine holds no row of phase step with a time" in err


def test_a_calibration_of_another_gpu_is_named(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    record = {
        "schema_version": 1, "fitted_on": {"model": "Qwen3.5-35B-A3B", "gpu": "h200"},
        "constants": {"host.ms_per_step": {"value": 3.0}},
    }  # fmt: skip
    file.write_text(json.dumps(record), encoding="utf-8")
    here = {**SCENARIO, "gpu": "h200", "calibration": str(file)}
    assert calibration_notes(expand(here)) == []
    (note,) = calibration_notes(expand({**here, "gpu": "b200"}))
    assert "fitted on Qwen3.5-35B-A3B on h200, not on Qwen3.5-35B-A3B on b200" in note
