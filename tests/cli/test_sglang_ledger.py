"""`treewy ledger --engine sglang`, and SGLang's flags of the verbs that take a scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lab.profiles.system import load_system

LEDGER = ("ledger", "--engine", "sglang", "--model", "Qwen3.5-35B-A3B", "--gpu", "h200")


def test_the_lines_add_up_to_the_whole_memory(call: Any) -> None:
    code, out, _ = call(*LEDGER, "--tree", "2,2,2", "--max-running-requests", "64", "--json")
    result = json.loads(out)
    assert code == 0
    assert sum(result["lines"].values()) == load_system("h200").memory_capacity_bytes
    assert result["max_running_requests"] == result["max_mamba_cache_size"] // 5
    assert result["lines"]["speculative_states"] == result["max_running_requests"] * 15 * 60 * 2**20


def test_it_speaks_the_words_of_the_engines_log(call: Any) -> None:
    arguments = ("--max-mamba-cache-size", "40", "--speculative-num-draft-tokens", "4", "--request-tokens", "1500")
    code, out, _ = call(*LEDGER, *arguments)
    assert code == 0
    assert "max_running_requests=8, max_mamba_cache_size=40, context_len=32768" in out
    assert "State slots per running request: 5 reserved, 4 held (extra_buffer, with overlap schedule), 61.41 MiB" in out
    assert "max_running_requests is capped to 8 by the mamba state cache (max_mamba_cache_size=40, 5 state slots" in out
    assert "requests of 1500 tokens at --mamba-full-memory-ratio 17.15" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu-memory-utilization", "0.5"), "is an option of vLLM; SGLang has --mem-fraction-static"),
        (("--max-num-seqs", "5"), "is an option of vLLM; SGLang has --max-running-requests"),
        (("--enable-prefix-caching",), "--enable-prefix-caching is an option of vLLM"),
        (("--speculative-config", "{}"), "SGLang has --speculative-num-draft-tokens"),
        (("--speculative-num-draft-tokens", "1"), "it counts the root: give 2 to 64"),
        (("--speculative-num-draft-tokens", "4", "--tree", "1"), "both say what is drafted"),
        (("--request-tokens", "0"), "give the mean tokens of a request"),
        (("--mem-fraction-static", "1.5"), "mem_fraction_static = 1.5: input should be less than 1"),
        (("--mamba-radix-cache-strategy", "all"), "mamba_radix_cache_strategy = 'all': input should be 'auto', 'none'"),
    ],
)
def test_unusable_input_is_one_sentence_and_exit_2(call: Any, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = call(*LEDGER, *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_option_of_sglang_needs_the_engine(call: Any) -> None:
    code, _, err = call("ledger", "--model", "Qwen3.5-27B", "--gpu", "h200", "--page-size", "16")
    assert (code, "--page-size is an option of SGLang; add --engine sglang" in err) == (2, True)
    code, _, err = call("ledger", "--model", "Qwen3.5-27B", "--gpu", "h200", "--engine", "tgi")
    assert (code, "allowed are vllm and sglang" in err) == (2, True)
    code, _, err = call("ledger", "--model", "Qwen3.5-27B", "--engine", "sglang")
    assert (code, "name a --gpu" in err) == (2, True)


def test_flags_take_the_place_of_sglangs_fields(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model: Qwen3.5-35B-A3B\nengine: {name: sglang}\n"
        "speculation: {state_method: storeall, tree: '1,1,1'}\n"
        "workload: {lengths: fixed:100/20, max_concurrency: 8, num_requests: 12}\n"
    )
    arguments = ("--mem-fraction-static", "0.8", "--max-mamba-cache-size", "20", "--context-length", "4096")
    code, _, _ = call("simulate", str(path), *arguments, "--out", str(tmp_path / "run"), "--jobs", "1")
    (row,) = pl.read_csv(tmp_path / "run" / "summary.csv").to_dicts()
    assert code == 0
    assert (row["gpu_memory_utilization"], row["max_model_len"], row["running_limit"]) == (0.8, 4096, 4)
    code, _, err = call("simulate", str(path), "--gpu-memory-utilization", "0.8", "--out", str(tmp_path / "other"))
    assert (code, "the engine sglang has mem_fraction_static" in err) == (2, True)
