"""Recurrent state costs from measured step kernels: what changes with a profile, and what stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernel_profiles import step_us, write_profile

from lab.errors import UsageError
from lab.methods import get_method
from lab.profiles import folders, load_tables
from lab.profiles.kernels import gpu_kernels
from lab.shapes import load_shape
from lab.trees import DraftTree
from simulator.scenario import expand
from simulator.settings import EngineSettings
from simulator.stepcost import StepCost, build_step_cost
from simulator.sweep import run_sweep

ROOT = DraftTree.chain(0)
CHAIN = DraftTree.chain(3)
LAYERS = 30


def build(
    gpu: str, method: str = "treelog", tree: DraftTree = CHAIN, model: str = "Qwen3.5-35B-A3B", **engine: object
) -> StepCost:
    settings = EngineSettings(**{"max_num_seqs": 256, **engine})  # type: ignore[arg-type]
    return build_step_cost(load_shape(model), gpu, 1, settings, get_method(method), tree, 2.5)


def conv_us(gpu: str, requests: np.ndarray, rows: int) -> np.ndarray:
    tables = load_tables(gpu)
    update = tables.gdn("conv_update", 16, 32, requests * rows).latency_us
    return update if rows == 1 else np.minimum(update, tables.gdn("conv_prefill", 16, 32, requests, rows).latency_us)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "shipped"


def test_a_measured_method_costs_its_steps_and_the_convolution(shipped: Path) -> None:
    write_profile(shipped / "h200")
    cost = build("h200")
    requests = np.arange(1, 257)
    expected = LAYERS * (conv_us("h200", requests, 4) + step_us(requests, 4))
    np.testing.assert_allclose(cost.tables.state_us[1:], expected, rtol=1e-3)
    assert cost.tables.state_us[0] == 0
    assert cost.sources["state"] == "measured: step kernels on NVIDIA H200"


def test_everything_but_the_state_stays_as_it_was(shipped: Path) -> None:
    before = build("h200")
    write_profile(shipped / "h200")
    after = build("h200")
    assert before.sources["state"].startswith("modelled")
    assert {k: v for k, v in before.sources.items() if k != "state"} == {
        k: v for k, v in after.sources.items() if k != "state"
    }
    for name in before.tables._fields:
        if name not in ("state_us", "limits"):
            assert np.array_equal(getattr(before.tables, name), getattr(after.tables, name)), name


def test_what_the_profile_does_not_hold_is_modelled_as_before(shipped: Path) -> None:
    before = [build("h200", "specla"), build("h200", mamba_ssm_cache_dtype="bfloat16")]
    write_profile(shipped / "h200")
    after = [build("h200", "specla"), build("h200", mamba_ssm_cache_dtype="bfloat16")]
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old.tables.state_us, new.tables.state_us)
        assert old.sources == new.sources


def test_beyond_the_measured_batches_steps_are_marked_extrapolated(shipped: Path) -> None:
    write_profile(shipped / "h200")
    assert build("h200", max_num_seqs=400).tables.limits[2] == 256


def test_other_heads_are_extrapolated_from_the_first_request_on(shipped: Path) -> None:
    write_profile(shipped / "h200")
    cost = build("h200", model="Qwen3.5-27B")
    assert cost.sources["state"].startswith("extrapolated: step kernels on NVIDIA H200; heads 16/32 stand in")
    assert cost.tables.limits[2] == 0


def test_another_gpu_scales_by_bandwidth_and_says_so(shipped: Path) -> None:
    write_profile(shipped / "h200")
    cost = build("b200")
    factor = gpu_kernels("b200").time_factor  # type: ignore[union-attr]
    expected = LAYERS * (conv_us("b200", np.array([64.0]), 4)[0] + factor * step_us(64, 4))
    assert cost.tables.state_us[64] == pytest.approx(expected, rel=1e-3)
    assert "scaled by bandwidth" in cost.sources["state"]
    assert cost.tables.limits[2] == 0


def test_plain_decoding_measured_on_the_gpu_itself_goes_before_a_scaled_profile(shipped: Path) -> None:
    before = build("b200", "recurrent", ROOT)
    write_profile(shipped / "h200")
    assert np.array_equal(build("b200", "recurrent", ROOT).tables.state_us, before.tables.state_us)
    assert build("h200", "recurrent", ROOT).sources["state"] == "measured: step kernels on NVIDIA H200"


def test_a_sweep_runs_on_ones_own_profile_and_records_it(shipped: Path, tmp_path: Path) -> None:
    import json

    folder = write_profile(tmp_path / "Mine", source_hash="abc", stale_reason="a test")
    raw = {
        "name": "mine",
        "model": "Qwen3.5-35B-A3B",
        "gpu": str(folder),
        "speculation": {"state_method": "treelog", "tree": "1,1,1"},
        "workload": {"trace": "azure-conv", "max_concurrency": 2, "num_requests": 4},
    }
    out = run_sweep(raw, expand(raw), tmp_path / "run")
    record = json.loads((out / "run.json").read_text())
    profile = record["kernel_profiles"][str(folder)]
    assert (profile["device"], profile["source_hash"], profile["stale_reason"]) == ("NVIDIA H200", "abc", "a test")
    (state,) = [entry["source"] for entry in record["step_cost"] if entry["term"] == "state"]
    assert state == "measured: step kernels on NVIDIA H200; stale record: a test"


def test_a_broken_profile_ends_in_one_sentence(shipped: Path) -> None:
    folder = write_profile(shipped / "h200")
    (folder / "kernels.csv").write_text("method\n")
    with pytest.raises(UsageError, match="has other columns than"):
        build("h200")
