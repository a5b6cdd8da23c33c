"""The command line: exit codes, what goes to stdout, and the fixed shapes that other programs read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from kernels_cupy.launch import load_driver

SCENARIO = """
name: tiny
model: Qwen3.5-35B-A3B
gpu: h200
speculation: {state_method: [storeall, treelog], tree: "1,1,1"}
workload: {trace: azure-conv, max_concurrency: [1, 4], num_requests: 12}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO)
    return path


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from lab import cli; print(sorted(set(sys.modules) & {'numpy', 'numba', 'polars', 'altair'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_verb_has_help(call: Any) -> None:
    for verb in ("doctor", "models", "tree", "ledger", "bench", "simulate", "plan"):
        code, out, _ = call(verb, "--help")
        assert code == 0
        assert f"treewy {verb}" in out


def test_ledger_json_has_the_fixed_shape(call: Any) -> None:
    speculation = '{"method": "mtp", "num_speculative_tokens": 3}'
    code, out, _ = call(
        "ledger", "--model", "qwen3.5-27b", "--kv-cache-memory-bytes", str(60 << 30), "--enable-prefix-caching",
        "--speculative-config", speculation, "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert code == 0
    assert list(result) == [
        "block_size_tokens", "bytes_per_block", "num_gpu_blocks", "blocks_per_request", "kv_cache_tokens",
        "max_concurrency", "max_viable_num_seqs", "gpu_blocks_source", "lines",
    ]  # fmt: skip
    assert (result["block_size_tokens"], result["num_gpu_blocks"], result["kv_cache_tokens"]) == (800, 1156, 676_425)
    assert sum(result["lines"].values()) == 60 << 30


def test_ledger_speaks_the_words_of_the_engines_log(call: Any) -> None:
    code, out, _ = call(
        "ledger", "--model", "Qwen3.5-27B", "--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8",
        "--max-model-len", "131072", "--enable-prefix-caching", "--num-gpu-blocks-override", "208",
    )  # fmt: skip
    assert code == 0
    assert "Setting attention block size to 1568 tokens" in out
    assert "GPU KV cache size: 302,921 tokens" in out
    assert "Maximum concurrency for 131,072 tokens per request: 2.31x" in out
    assert "(override)" in out


def test_ledger_prints_the_older_count_and_the_proposed_one(call: Any) -> None:
    # vllm-project/vllm issue 40691: Qwen3.5-27B, vLLM 0.19.0, 1,487 blocks
    _, out, _ = call("ledger", "--model", "Qwen3.5-27B", "--num-gpu-blocks-override", "1487")
    assert "before vLLM 0.20: 290,864 tokens" in out
    assert "33.04x" in out
    # 2,667 blocks, 46 a request, three groups, three drafts: (2667 - 8 * 9) / (46 - 9)
    speculation = '{"method": "mtp", "num_speculative_tokens": 3}'
    _, out, _ = call(
        "ledger", "--model", "Qwen3.5-35B-A3B", "--num-gpu-blocks-override", "2667", "--enable-prefix-caching",
        "--max-num-seqs", "8", "--speculative-config", speculation,
    )  # fmt: skip
    assert "(vLLM pull 57261, max_num_seqs 8): 2,298,188 tokens, 70.14x" in out


def test_ledger_refuses_as_the_engine_does_with_a_number_that_works(call: Any) -> None:
    code, _, err = call("ledger", "--model", "Qwen3.5-27B", "--gpu", "h200", "--max-num-seqs", "5000")
    assert code == 2
    assert "max_num_seqs (5000) exceeds available Mamba cache blocks" in err
    assert "largest viable max_num_seqs is" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ledger", "--model", "nope", "--gpu", "h200"), "error: model 'nope' is neither a shipped shape"),
        (("ledger", "--model", "Qwen3.5-27B"), "name a gpu"),
        (("ledger", "--model", "Qwen3.5-27B", "--gpu", "h200", "--speculative-config", "{"), "is not JSON"),
        (("ledger", "--model", "Qwen3.5-27B", "--gpu", "h200", "--gpu-memory-utilization", "2"), "= 2.0: input should"),
        (("tree", "4,4,4"), "more than 64 rows"),
        (("models", "Qwen3.5-27B", "--mamba-ssm-cache-dtype", "int4"), "allowed are auto, float32, bfloat16"),
        (("simulate", "missing.yaml"), "cannot read scenario missing.yaml"),
        (("bench",), "nothing to measure"),
    ],
)
def test_unusable_input_is_one_sentence_and_exit_2(call: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out
    assert len(err.strip().splitlines()) == 1


def test_models_and_trees_print_json(call: Any) -> None:
    rows = json.loads(call("models", "--json")[1])
    assert {"Qwen3.5-35B-A3B", "Kimi-Linear-48B-A3B"} <= {row["model"] for row in rows}
    methods = json.loads(call("models", "Qwen3.5-35B-A3B", "--json")[1])["methods"]
    assert {row["state_method"]: row["resident_bytes_per_layer"] for row in methods}[
        "treewy"
    ] == 2_097_152 + 15 * 32_896
    tree = json.loads(call("tree", "2,2,2", "--json")[1])
    assert (tree["num_rows"], tree["num_drafts"], tree["max_depth"]) == (15, 14, 3)
    assert "rank 1" in call("tree", "2,1")[1]


def test_doctor_says_that_chained_launches_lack_their_module(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels_cupy.device.load_cupy", lambda: None)
    monkeypatch.setattr("kernels_cupy.device.chains_here", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    load_driver.cache_clear()
    found = json.loads(call("doctor", "--json")[1])
    assert "cuda-bindings" in found
    assert found["GPU kernels"].startswith("not available: chained launches need cuda-bindings; install the extra")


def test_doctor_says_what_can_run(call: Any) -> None:
    code, out, _ = call("doctor", "--json")
    assert code == 0
    assert json.loads(out)["simulate, plan, ledger"] == "ready"


def test_simulate_writes_a_run_directory_and_prints_its_summary(call: Any, scenario: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "run"
    code, out, err = call("simulate", str(scenario), "--out", str(out_dir), "--jobs", "1", "--json")
    assert code == 0
    assert [row["state_method"] for row in json.loads(out)] == ["storeall", "treelog"] * 2
    assert f"wrote {out_dir}" in err.replace("\n", "")
    assert sorted(path.name for path in out_dir.iterdir()) == [
        "requests.parquet",
        "run.json",
        "steps.parquet",
        "summary.csv",
    ]


def test_the_table_shows_what_was_swept_and_the_hit_rate(call: Any, scenario: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load(SCENARIO)
    raw["speculation"]["state_method"] = "storeall"
    trace = tmp_path / "talk.csv"
    turns = [f"{talk},{tokens},40" for tokens in (4000, 8000, 12000) for talk in (1, 2)]
    trace.write_text("\n".join(["conversation,input_tokens,output_tokens", *turns]))
    raw["workload"] |= {"trace": str(trace), "max_concurrency": 2, "num_requests": 6}
    swept = {"async_scheduling": [False, True], "num_gpu_blocks_override": [900, 1000]}
    scenario.write_text(yaml.safe_dump(raw | {"engine": {"enable_prefix_caching": True, **swept}}))
    code, out, _ = call("simulate", str(scenario), "--out", str(tmp_path / "run"), "--jobs", "1")
    assert code == 0
    header, _, *rows = [re.split(r" {2,}", line) for line in out.strip().splitlines()]
    assert header[:4] == ["method", "tree", "engine_options", "async_scheduling"]
    assert header[-1] == "hit rate"
    options = [f"num_gpu_blocks_override {count}" for count in (900, 1000)]
    told = {(row[header.index("engine_options")], row[header.index("async_scheduling")]) for row in rows}
    assert told == {(option, value) for option in options for value in ("false", "true")}
    rates = pl.read_csv(tmp_path / "run" / "summary.csv")["prefix_cache_hit_rate"]
    assert all(rate > 0 for rate in rates)
    assert [float(row[-1]) for row in rows] == pytest.approx(rates.to_list(), abs=1e-3)


def test_a_table_of_equal_settings_without_a_cache_has_no_more_columns(
    call: Any, scenario: Path, tmp_path: Path
) -> None:
    _, out, _ = call("simulate", str(scenario), "--out", str(tmp_path / "run"), "--jobs", "1")
    assert out.splitlines()[0].split()[:3] == ["method", "tree", "gmu"]
    assert "hit rate" not in out


def test_plan_takes_another_model_and_a_csv_of_ones_own(call: Any, scenario: Path, tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("input_tokens,output_tokens\n100,20\n300,40\n")
    code, out, _ = call(
        "plan", str(scenario), "--model", "Qwen3.5-122B-A10B", "--tensor-parallel-size", "2", "--trace", str(trace),
        "--out", str(tmp_path / "run"), "--jobs", "1",
    )  # fmt: skip
    assert code == 0
    assert out.strip() == str(tmp_path / "run" / "report.html")
    summary = pl.read_csv(tmp_path / "run" / "summary.csv")
    assert summary["model"].unique().to_list() == ["Qwen3.5-122B-A10B"]
    assert summary["total_input_tokens"].unique().to_list() == [6 * 400]
    assert "<html" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_bad_trace_leaves_nothing_behind(call: Any, scenario: Path, tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("input_tokens,output_tokens\n100,-3\n")
    code, _, err = call("simulate", str(scenario), "--trace", str(trace), "--out", str(tmp_path / "run"))
    assert code == 2
    assert "mine.csv" in err
    assert "-3" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.csv", "tiny.yaml"]


def test_bench_measures_the_simulator(call: Any) -> None:
    result = json.loads(call("bench", "--simulator", "--steps", "20000", "--running", "32", "--json")[1])
    assert result["engine_steps"] > 15_000
    assert result["mean_running"] == pytest.approx(32, rel=0.05)
    assert result["steps_per_second"] > 0
