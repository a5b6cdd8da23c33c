"""Bad input ends in one sentence, exit code 2, and nothing left behind: what broke once, kept from breaking again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Call = Callable[..., tuple[int, str, str]]

BASE: dict[str, Any] = {
    "name": "cell",
    "model": "Qwen3.5-35B-A3B",
    "speculation": {"state_method": "treelog", "tree": "1,1,1"},
    "workload": {"lengths": "fixed:100/20", "max_concurrency": 4, "num_requests": 5},
}


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)


def scenario(tmp_path: Path, **sections: Any) -> str:
    """Write a scenario whose sections are merged into the base."""
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for key, value in sections.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in out + err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"engine": {"max_num_batched_tokens": 10**9}}, ("engine.max_num_batched_tokens = 1000000000",)),
        ({"engine": {"long_prefill_token_threshold": 2**63}}, ("engine.long_prefill_token_threshold",)),
        ({"workload": {"max_concurrency": 2**63}}, ("workload.max_concurrency",)),
        ({"workload": {"num_requests": 10**30}}, ("workload.num_requests",)),
        ({"workload": {"burstiness": 2}}, ("burstiness",)),
        ({"workload": {"arrivals": "poisson", "request_rate": 5e-324}}, ("workload.request_rate",)),
        ({"host": {"ms_per_step": 1e300}}, ("host.ms_per_step",)),
        ({"speculation": {"acceptance": {"per_depth": [0.9], "concentration": 1e-300}}}, ("concentration",)),
        ({"speculation": {"tree": [2, 2, 2]}}, ("write trees as text",)),
        ({"speculation": {"tree": "chain:10000000000"}}, ("chain:10000000000", "give widths like")),
        ({"speculation": {"tree": "²"}}, ("give widths like",)),
        ({"speculation": {"tree": "(((2"}}, ("give widths like",)),
        ({"engine": {"gpu_memory_utilization": [0.1, 0.2]}}, ("none of 2 cells can run", "raise gpu_memory")),
        ({"engine": {"num_gpu_blocks_override": 300, "kv_cache_memory_bytes": 5}}, ("not both",)),
        ({"engine": {"enable_chunked_prefill": False, "max_num_batched_tokens": 110}}, ("longest request, 120",)),
        ({"workload": {"num_warmup_requests": 5}}, ("num_warmup_requests must be below",)),
        ({"name": "../up"}, ("letters, digits",)),
        ({"name": ""}, ("letters, digits",)),
        ({"num_requests": [1, 2]}, ("a list makes a sweep only in",)),
    ],
)
def test_scenarios_that_broke_once(
    call: Call, tmp_path: Path, sections: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(call("simulate", scenario(tmp_path, **sections), "--out", "o", "--jobs", "1"), *words)
    assert sorted(os.listdir(tmp_path)) == ["s.yaml"]


def test_without_chunked_prefill_a_threshold_is_ignored(call: Call, tmp_path: Path) -> None:
    engine = {"enable_chunked_prefill": False, "long_prefill_token_threshold": 10}
    assert call("simulate", scenario(tmp_path, engine=engine), "--out", "o", "--jobs", "1")[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "gpu: h200\ngpu: b200\n",
        "name: 2024-13-45\n",
        "seed: 0x_\n",
        "a:\t- b\n\t- c: [\n",
        "[" * 3000,
        'name: "\\ud800"\n',
        "!!python/object/apply:os.getcwd []\n",
    ],
)
def test_yaml_that_broke_once(call: Call, tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    refused(call("simulate", "s.yaml", "--out", "o"))


def test_a_folder_of_somebody_else_is_never_touched(call: Call, tmp_path: Path) -> None:
    path = scenario(tmp_path)
    for folder, file in (("z.partial", "mine.txt"), ("proj", "run.json"), ("kept", "notes.md")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("not ours")
    refused(call("simulate", path, "--out", "z", "--jobs", "1"), "z.partial is in the way")
    refused(call("simulate", path, "--out", "proj", "--jobs", "1"), "is not a run directory")
    assert call("simulate", path, "--out", "ours", "--jobs", "1")[0] == 0
    (tmp_path / "ours" / "sub").mkdir()
    refused(call("simulate", path, "--out", "ours", "--jobs", "1"), "it holds sub")
    refused(call("simulate", path, "--out", "kept/..", "--jobs", "1"), "is not a run directory")
    (tmp_path / "file").write_text("")
    refused(call("simulate", path, "--out", "file/x", "--jobs", "1"))
    (tmp_path / "link").symlink_to("kept")
    refused(call("simulate", path, "--out", "link", "--jobs", "1"), "is a link")
    assert (tmp_path / "z.partial" / "mine.txt").read_text() == "not ours"
    assert (tmp_path / "proj" / "run.json").read_text() == "not ours"


def test_another_run_is_not_overwritten(call: Call, tmp_path: Path) -> None:
    assert call("simulate", scenario(tmp_path), "--out", "o", "--jobs", "1")[0] == 0
    other = scenario(tmp_path, name="other")
    refused(call("simulate", other, "--out", "o", "--jobs", "1"), "holds the run 'cell', not 'other'")


def test_flags_give_a_run_a_name_of_its_own(call: Call, tmp_path: Path) -> None:
    path = scenario(tmp_path)
    assert call("simulate", path, "--gpu", "b200", "--tensor-parallel-size", "2", "--jobs", "1")[0] == 0
    assert os.listdir(tmp_path / "runs") == ["cell-b200-tp2"]


def test_a_trace_name_is_no_pattern(call: Call, tmp_path: Path) -> None:
    (tmp_path / "*.csv").write_text("input_tokens,output_tokens\n10,3\n")
    (tmp_path / "other.csv").write_text("input_tokens,output_tokens\n500,30\n")
    path = scenario(tmp_path)
    code, out, _ = call("simulate", path, "--trace", "*.csv", "--out", "o", "--jobs", "1", "--json")
    assert code == 0
    assert yaml.safe_load(out)[0]["total_input_tokens"] == 5 * 10


def test_damaged_cells_are_run_again(call: Call, tmp_path: Path) -> None:
    path = scenario(tmp_path, workload={"max_concurrency": [1, 2, 3]})
    command = ("simulate", path, "--jobs", "1", "--out")
    assert call(*command, "whole")[0] == 0

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.sweep._write_run", stop)
        code, _, err = call(*command, "o")
    assert code == 130
    assert "use --resume" in err
    cells = sorted((tmp_path / "o.partial").glob("*/result.json"))
    assert len(cells) == 3
    cells[0].write_text("{")
    next(cells[1].parent.glob("requests-*.parquet")).unlink()
    assert call(*command, "o", "--resume")[0] == 0
    for name in ("summary.csv", "requests.parquet", "steps.parquet"):
        assert (tmp_path / "o" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_outputs_of_one_token_have_no_time_per_token(call: Call, tmp_path: Path) -> None:
    code, out, _ = call(
        "simulate", scenario(tmp_path, workload={"lengths": "fixed:100/1"}), "--out", "o", "--jobs", "1"
    )
    assert code == 0
    assert "nan" not in out
    assert "NaN" not in (tmp_path / "o" / "summary.csv").read_text()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": [["a"]] * 40}, "layer_types"),
        ({"layer_types": None, "full_attention_interval": 1}, "one kind of layer"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0"),
        ({"num_experts_per_tok": 999}, "num_experts_per_tok = 999 is more than"),
        ({"num_hidden_layers": 10**7, "layer_types": None}, "at most 10000"),
    ],
)
def test_configs_that_broke_once(call: Call, tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    import json

    from lab.data import data_path

    raw = json.loads(data_path("models", "Qwen3.5-35B-A3B.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    refused(call("models", "config.json"), word)


@pytest.mark.slow
def test_an_interruption_stops_workers_at_once_and_resume_gives_the_same_bytes(tmp_path: Path) -> None:
    raw = {**BASE, "workload": {"trace": "azure-conv", "max_concurrency": list(range(1, 25)), "num_requests": 1000}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(raw))
    python = [sys.executable, "-c", "from lab.cli import main; main()"]
    command = [*python, "simulate", "s.yaml", "--jobs", "2", "--out"]
    subprocess.run([*command, "whole"], cwd=tmp_path, check=True, capture_output=True)
    process = subprocess.Popen([*command, "o"], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    while len(list(tmp_path.glob("o.partial/*/result.json"))) < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"use --resume" in err
    assert b"Traceback" not in err
    finished = len(list(tmp_path.glob("o.partial/*/result.json")))
    assert 4 <= finished < 24
    assert not (tmp_path / "o").exists()
    subprocess.run([*command, "o", "--resume"], cwd=tmp_path, check=True, capture_output=True)
    for name in ("summary.csv", "requests.parquet", "steps.parquet", "run.json"):
        assert (tmp_path / "o" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
