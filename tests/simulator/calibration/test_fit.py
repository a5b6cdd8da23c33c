"""Constants are recovered from results that were made with them; unknown ones stay at their default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.errors import UsageError
from simulator.calibration.compare import fitted_metrics
from simulator.calibration.constants import CONSTANTS
from simulator.calibration.fit import fit
from simulator.calibration.levels import Level, chain_acceptance, level_of
from simulator.calibration.measure import measure
from simulator.calibration.report import calibrate, write_calibration
from simulator.calibration.results import EngineResult, read_results
from simulator.metrics import gap_metrics, request_metrics
from simulator.records import PartWriter
from simulator.run import run_engine, step_cost
from simulator.scenario import expand

RAW: dict[str, Any] = {
    "name": "service",
    "model": "Qwen3.5-35B-A3B",
    "gpu": "h200",
    "engine": {"max_model_len": 16384},
    "speculation": {"state_method": "recurrent"},
    "workload": {"trace": "azure-conv", "arrivals": "poisson", "request_rate": 1, "num_requests": 1},
}
TRUE = {
    "host.ms_per_step": 1.2,
    "host.ms_per_prompt_step": 4.0,
    "gpu_time.decode_factor": 1.15,
    "gpu_time.prompt_factor": 1.3,
}
RATES = (0.5, 4.0, 12.0, 25.0)


def vllm_result(path: Path, rate: float, truth: dict[str, float], detailed: bool = False) -> Path:
    """What the client would have written had the engine these constants."""
    asked = EngineResult("", "", 200, 1000.0, 210.0, rate, 1.0, None, {})
    level = level_of(RAW, asked)
    cell, cost = level.with_constants(truth)
    run = measure(cell, cost, level.blocks())
    requests = run.requests
    record: dict[str, Any] = {
        "backend": "vllm",
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": run.metrics["duration_s"],
        "completed": len(requests),
        "total_input_tokens": int(requests["prompt_tokens"].sum()),
        "total_output_tokens": int(requests["output_tokens"].sum()),
    }
    record |= {name: value for name, value in run.metrics.items() if name.endswith(("_ms", "throughput"))}
    if detailed:
        record |= {
            "input_lens": requests["prompt_tokens"].tolist(),
            "output_lens": requests["output_tokens"].tolist(),
            "start_times": (requests["arrival_s"] + 1e5).tolist(),
            "ttfts": (requests["first_token_s"] - requests["arrival_s"]).tolist(),
        }
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("results")
    return [vllm_result(folder / f"{rate}.json", rate, TRUE, detailed=True) for rate in RATES]


@pytest.mark.slow
def test_the_fit_recovers_the_constants(files: list[Path]) -> None:
    levels = [level_of(RAW, read_results(file)[0]) for file in files]
    found = fit(levels)
    for constant in found.constants:
        assert constant.value == pytest.approx(TRUE[constant.name], rel=0.2)
        assert constant.low < constant.value < constant.high
    for errors in found.after.values():
        assert all(abs(error.relative) < 0.03 for error in errors if error.metric.startswith("mean"))


def test_a_level_with_the_true_constants_has_no_error(files: list[Path]) -> None:
    result = read_results(files[1])[0]
    predicted = level_of(RAW, result).predict(TRUE)
    for metric in fitted_metrics(result.metrics):
        assert predicted[metric] == pytest.approx(result.metrics[metric], rel=1e-9)


def test_one_level_tells_host_time_and_leaves_the_rest_near_its_default(files: list[Path]) -> None:
    found = fit([level_of(RAW, read_results(files[0])[0])], ("host.ms_per_step",))
    assert found.values["host.ms_per_step"] == pytest.approx(2.0, rel=0.3)  # it also stands for the factor of 1.15


def test_calibration_file_feeds_a_scenario(files: list[Path], tmp_path: Path) -> None:
    found = calibrate(RAW, files[:1], ("host.ms_per_step",))
    write_calibration(found, tmp_path / "c.json")
    (scenario,) = expand({**RAW, "calibration": str(tmp_path / "c.json")})
    assert found.fit is not None
    assert scenario.host.ms_per_step == found.fit.values["host.ms_per_step"]
    record = json.loads((tmp_path / "c.json").read_text())
    assert record["fitted_on"]["model"] == "Qwen3.5-35B-A3B"
    assert record["errors_leave_one_out"] == {}


def test_memory_metrics_are_those_of_the_run_directory(tmp_path: Path) -> None:
    asked = EngineResult("", "", 100, 1000.0, 210.0, 6.0, 1.0, None, {})
    level = level_of(RAW, asked)
    costs = step_cost(level.cell)
    held = measure(level.cell, costs, level.blocks()).metrics
    writer = PartWriter(tmp_path)
    engine = run_engine(level.cell, costs, level.blocks(), writer)
    tokens = int(engine.state["emitted_tokens"]) - int(engine.state["num_finished"])
    written = request_metrics(writer.parts("requests")) | gap_metrics(
        writer.parts("steps"), writer.parts("gaps_s"), tokens
    )
    for name in held.keys() & written.keys():
        assert held[name] == pytest.approx(written[name], rel=1e-9), name
    assert {"mean_itl_ms", "p99_ttft_ms", "median_tpot_ms", "output_throughput"} <= held.keys() & written.keys()


def test_a_sweep_cannot_be_calibrated(files: list[Path]) -> None:
    swept = {**RAW, "speculation": {"state_method": ["recurrent", "deltalog"]}}
    with pytest.raises(UsageError, match="a sweep of 2 cells"):
        calibrate(swept, files[:1], ())


def test_unknown_constant_is_named(files: list[Path]) -> None:
    with pytest.raises(UsageError, match=r"no constant 'host\.x'; known are host\.ms_per_step"):
        calibrate(RAW, files[:1], ("host.x",))


def drafting(acceptance_length: float | None) -> Level:
    asked = EngineResult("", "", 50, 1000.0, 210.0, 4.0, 1.0, None, {}, acceptance_length=acceptance_length)
    return level_of({**RAW, "speculation": {"state_method": "treewy", "tree": "1,1"}}, asked)


def test_a_fitted_acceptance_takes_the_place_of_the_scenarios_but_not_of_a_measured_one() -> None:
    told, untold = drafting(1.5), drafting(None)
    assert told.predict({"acceptance": 0.99}) == told.predict({})
    assert untold.predict({"acceptance": 0.99})["acceptance_length"] > 2.5


def test_acceptance_is_not_fitted_where_every_result_tells_it(tmp_path: Path) -> None:
    record = json.loads(vllm_result(tmp_path / "r.json", 4.0, {}).read_text())
    (tmp_path / "r.json").write_text(json.dumps(record | {"spec_decode_acceptance_length": 1.5}))
    raw = {**RAW, "speculation": {"state_method": "treewy", "tree": "1,1"}}
    with pytest.raises(UsageError, match="every result tells its own; leave it out of --constants"):
        calibrate(raw, [tmp_path / "r.json"], ("acceptance",))


def test_a_result_without_lengths_has_the_requests_of_the_scenario() -> None:
    asked = EngineResult("", "", 60, 1000.0, 100.0, None, 1.0, 4, {})
    engine = {"max_model_len": 16384, "enable_prefix_caching": True}
    load = {"lengths": "balanced-chat", "shared_prefix_tokens": 700, "priority_classes": {0: 1, 5: 1}}
    (block,) = level_of({**RAW, "engine": engine, "workload": load}, asked).blocks()
    assert block.prefix is not None
    assert block.prefix.shared_tokens == 700
    assert set(block.priority.tolist()) == {0, 5}
    assert block.prompt_tokens.mean() == pytest.approx(1000.0, abs=1)
    turns = {"trace": "sharegpt-multiturn", "think_time_s": 2.0}
    (block,) = level_of({**RAW, "engine": engine, "workload": turns}, asked).blocks()
    assert block.turns is not None
    assert block.turns.think_s == 2.0


def test_a_detailed_result_tells_neither_prefixes_nor_priorities(files: list[Path]) -> None:
    result = read_results(files[0])[0]
    engine = {"max_model_len": 16384, "enable_prefix_caching": True}
    shared = {**RAW["workload"], "shared_prefix_tokens": 64}
    with pytest.raises(UsageError, match="does not tell which prompts share a prefix"):
        level_of({**RAW, "engine": engine, "workload": shared}, result)
    level_of({**RAW, "engine": engine}, result)
    classes = {**RAW["workload"], "priority_classes": {0: 1, 5: 1}}
    with pytest.raises(UsageError, match="no priorities"):
        level_of(
            {**RAW, "engine": {"max_model_len": 16384, "scheduling_policy": "priority"}, "workload": classes}, result
        )


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("chance", [0.1, 0.6, 0.95])
def test_chain_acceptance_inverts_the_mean_length(depth: int, chance: float) -> None:
    length = sum(chance**j for j in range(depth + 1))
    assert chain_acceptance(length, depth) == pytest.approx(chance, abs=1e-6)


@pytest.mark.parametrize("name", CONSTANTS)
def test_the_fits_scale_is_invertible(name: str) -> None:
    constant = CONSTANTS[name]
    assert constant.from_fit(constant.to_fit(constant.default)) == pytest.approx(constant.default)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "schema_version must be 1"),
        ('{"schema_version": 1, "constants": {"host.y": {"value": 1}}}', "no constant 'host.y'"),
        ('{"schema_version": 1, "constants": {"host.ms_per_step": {"value": -1}}}', "ms_per_step = -1"),
        ('{"schema_version": 1, "constants": {"gpu_time.decode_factor": {"value": 0}}}', "decode_factor = 0"),
        ("no", "not valid JSON"),
    ],
)
def test_bad_calibration_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        expand({**RAW, "calibration": str(path)})


def test_a_constant_set_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"schema_version": 1, "constants": {"host.ms_per_step": {"value": 1.5}}}')
    with pytest.raises(UsageError, match="remove one of the two"):
        expand({**RAW, "calibration": str(path), "host": {"ms_per_step": 2.5}})


def test_a_level_may_be_a_service_of_sglang() -> None:
    asked = EngineResult("", "", 100, 1000.0, 210.0, 4.0, 1.0, None, {})
    level = level_of({**RAW, "engine": {"name": "sglang", "context_length": 16384}}, asked)
    usual, slow = level.predict({}), level.predict({"gpu_time.decode_factor": 2.0})
    assert slow["mean_tpot_ms"] > 1.5 * usual["mean_tpot_ms"]
