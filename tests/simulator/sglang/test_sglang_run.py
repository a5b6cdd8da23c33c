"""A scenario with SGLang as its engine: from YAML to summary row and report, and what the examples claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lab.errors import UsageError
from reports import write_report
from simulator.check import check
from simulator.run import simulate, step_cost
from simulator.scenario import expand, read_yaml
from simulator.sglang.memory import balanced_full_memory_ratio
from simulator.sweep import plan_cells, run_sweep

EXAMPLES = Path(__file__).parents[3] / "examples"
BASE: dict[str, Any] = {
    "name": "small",
    "model": "Qwen3.5-35B-A3B",
    "engine": {"name": "sglang"},
    "speculation": {"state_method": "treelog", "tree": "1,1,1"},
    "workload": {"lengths": "fixed:300/40", "max_concurrency": 4, "num_requests": 40},
}


def rows(raw: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Summary rows of all cells."""
    found = []
    for number, scenario in enumerate(expand(raw)):
        cell = check(scenario)
        found.append(simulate(cell, step_cost(cell), folder / str(number)))
    return found


def test_littles_law_holds_for_the_published_columns(tmp_path: Path) -> None:
    workload = {"trace": "azure-conv", "arrivals": "poisson", "request_rate": 0.5, "num_requests": 300}
    (found,) = rows({**BASE, "workload": workload}, tmp_path)
    time_running_s = (found["mean_e2el_ms"] - found["mean_queue_ms"]) / 1e3
    assert found["mean_running"] == pytest.approx(found["request_throughput"] * time_running_s, rel=0.02)


def test_both_engines_serve_the_same_requests_with_the_same_luck(tmp_path: Path) -> None:
    """One client: no queueing, so the engines differ in nothing that a single request could notice but host time."""
    workload = {"trace": "azure-conv", "max_concurrency": 1, "num_requests": 50}
    host = {"ms_per_step": 0, "ms_per_prompt_step": 0}
    (sglang,) = rows({**BASE, "workload": workload, "host": host}, tmp_path / "sglang")
    (vllm,) = rows({**BASE, "workload": workload, "host": host, "engine": {}}, tmp_path / "vllm")
    for name in ("total_output_tokens", "acceptance_length", "num_steps"):
        assert sglang[name] == vllm[name]
    assert sglang["mean_tpot_ms"] == pytest.approx(vllm["mean_tpot_ms"], rel=1e-6)


def test_overlap_scheduling_hides_host_time(tmp_path: Path) -> None:
    raw = {**BASE, "host": {"ms_per_step": 2, "ms_per_prompt_step": 0}}
    (hidden,) = rows(raw, tmp_path / "hidden")
    (shown,) = rows({**raw, "engine": {"name": "sglang", "disable_overlap_schedule": True}}, tmp_path / "shown")
    assert shown["mean_step_ms"] - hidden["mean_step_ms"] == pytest.approx(2, abs=0.05)


def test_a_sweep_of_sglang_makes_a_report_in_its_own_words(tmp_path: Path) -> None:
    raw = {
        **BASE,
        "engine": {"name": "sglang", "mem_fraction_static": [0.7, 0.85], "max_running_requests": 64},
        "speculation": {"state_method": ["recurrent", "storeall", "replayssm", "treelog"], "tree": ["1,1,1", "2,2,2"]},
        "workload": {"trace": "azure-conv", "max_concurrency": 40, "num_requests": 80},
    }
    run = run_sweep(raw, expand(raw), tmp_path / "run")
    summary = pl.read_csv(run / "summary.csv")
    assert summary["engine"].unique().to_list() == ["sglang"]
    wide = summary.filter((pl.col("state_method") == "storeall") & (pl.col("tree") == "2,2,2"))
    assert (wide["peak_running"] == wide["running_limit"]).all()
    assert wide["memory_bound"].all()
    html = write_report(run).read_text(encoding="utf-8")
    for part in (
        "mem_fraction_static 0.85",
        "slots per request",
        "prefix-cache states",
        "let fewer than 64 requests run at ",
    ):
        assert part in html
    for vllms in ("gpu_memory_utilization", "max_num_seqs", "max_model_len"):
        assert vllms not in html.partition("<script")[0]


def test_swept_options_keep_groups_apart(tmp_path: Path) -> None:
    raw = {**BASE, "engine": {"name": "sglang", "mamba_full_memory_ratio": [0.5, 0.9]}}
    run = run_sweep(raw, expand(raw), tmp_path / "run")
    options = pl.read_csv(run / "summary.csv")["engine_options"].to_list()
    assert options == ["mamba_full_memory_ratio 0.5", ""]
    assert "engine_options mamba_full_memory_ratio 0.5" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"name": "tgi"}, "engine.name = 'tgi': allowed are vllm and sglang"),
        ({"name": "sglang", "max_num_seqs": 3}, "max_num_seqs is vLLM's name; .* max_running_requests"),
        ({"mem_fraction_static": 0.8}, "mem_fraction_static: no such field; it is SGLang's, which engine.name: sglang"),
        ({"name": "sglang", "mem_fraction_static": 1.2}, "engine.mem_fraction_static = 1.2: input should be less than"),
        ({"name": "sglang", "context_length": 100}, "raise context_length to at least 340"),
        (
            {"name": "sglang", "max_total_tokens": 300},
            "max_total_tokens = 300 is too small .* raise max_total_tokens to",
        ),
        ("sglang", "engine = 'sglang': write engine: {name: sglang}"),
        ("tgi", "write engine: {name: vllm} or {name: sglang}"),
    ],
)
def test_bad_values_say_what_to_change(engine: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        [check(scenario) for scenario in expand({**BASE, "engine": engine})]


def test_drafts_counted_as_slots_cost_throughput_while_slots_lie_idle(tmp_path: Path) -> None:
    raw = read_yaml(EXAMPLES / "complaints" / "drafts-counted-as-slots.yaml")
    law = check(expand(raw)[0]).ledger.layout
    assert round(balanced_full_memory_ratio(law, 2 * 4512), 2) == raw["engine"]["mamba_full_memory_ratio"][0]
    right, counted = rows(raw, tmp_path)
    assert counted["max_mamba_cache_size"] > 1.3 * right["max_mamba_cache_size"]
    assert counted["kv_cache_tokens"] < 0.7 * right["kv_cache_tokens"]
    assert counted["peak_mamba_usage"] < 0.6 < right["peak_mamba_usage"]
    assert counted["output_throughput"] < 0.93 * right["output_throughput"]
    assert (right["num_preemptions"], counted["num_preemptions"] > 0) == (0, True)


def test_reserved_slots_make_requests_queue_beside_an_idle_pool(tmp_path: Path) -> None:
    capped, enough = rows(read_yaml(EXAMPLES / "complaints" / "slots-reserved-not-used.yaml"), tmp_path)
    assert (capped["peak_running"], enough["peak_running"]) == (8, 16)
    assert capped["peak_mamba_usage"] == pytest.approx(0.8)
    assert capped["peak_kv_usage"] < 0.05
    assert capped["memory_limited_steps"] > 0.9
    assert enough["memory_limited_steps"] == 0
    assert capped["mean_ttft_ms"] > 1000
    assert enough["mean_ttft_ms"] < 100


def test_the_ordinary_example_can_run() -> None:
    runnable, skipped = plan_cells(expand(read_yaml(EXAMPLES / "sglang-qwen3.5-35b-h200.yaml")))
    assert len(runnable) == 3 * (5 + 3)
    assert {item.scenario.speculation.state_method for item in skipped} == {"replayssm"}
