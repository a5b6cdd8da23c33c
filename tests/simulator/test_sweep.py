"""Sweeps: run directories, determinism for any number of processes, resume, and combinations left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lab.errors import InfeasibleError, UsageError
from simulator import cells, sweep, workers
from simulator.scenario import expand
from simulator.sweep import plan_cells, run_sweep

RAW: dict[str, Any] = {
    "name": "small",
    "model": "Qwen3.5-35B-A3B",
    "gpu": "h200",
    "speculation": {"state_method": ["recurrent", "storeall", "replayssm", "treelog"], "tree": ["1,1,1", "2,2"]},
    "workload": {"trace": "azure-conv", "max_concurrency": [2, 20], "num_requests": 40},
}
DATA_FILES = ("summary.csv", "requests.parquet", "steps.parquet", "run.json")


@pytest.fixture(scope="module", autouse=True)
def no_shipped_profiles() -> None:
    """Keep the shipped profiles: worker processes see them whatever this process patches."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_sweep(RAW, expand(RAW), tmp_path_factory.mktemp("runs") / "small", keep_steps=True)


def test_a_run_directory_holds_one_row_per_cell_and_nothing_else(run: Path) -> None:
    summary = pl.read_csv(run / "summary.csv")
    assert len(summary) == 2 * (1 + 2 + 1 + 2)  # plain decoding has no tree, replayssm no branching one
    assert sorted(path.name for path in run.iterdir()) == sorted(DATA_FILES)
    assert not run.with_name("small.partial").exists()
    assert summary["completed"].unique().to_list() == [40]
    assert summary["cell"].to_list() == list(range(12))


def test_what_cannot_run_is_left_out_with_its_reason(run: Path) -> None:
    skipped = json.loads((run / "run.json").read_text())["skipped"]
    assert {(item["state_method"], item["tree"]) for item in skipped} == {("replayssm", "2,2")}
    assert "verifies chains only" in skipped[0]["reason"]


def test_records_add_up_to_the_summary(run: Path) -> None:
    summary = pl.read_csv(run / "summary.csv")
    requests = pl.read_parquet(run / "requests.parquet").group_by("cell", maintain_order=True)
    totals = requests.agg(pl.len(), pl.col("output_tokens").sum(), pl.col("accepted_tokens").sum())
    assert totals["len"].to_list() == [40] * 12
    assert totals["output_tokens"].to_list() == summary["total_output_tokens"].to_list()
    steps = pl.read_parquet(run / "steps.parquet").group_by("cell", maintain_order=True)
    emitted = steps.agg(pl.len(), pl.col("emitted_tokens").sum())
    assert emitted["emitted_tokens"].to_list() == summary["total_output_tokens"].to_list()
    assert emitted["len"].to_list() == summary["num_steps"].to_list()


def test_terms_of_a_step_add_up_to_its_duration(run: Path) -> None:
    steps = pl.read_parquet(run / "steps.parquet")
    terms = ("rows_us", "head_us", "state_us", "attention_us", "prefill_us", "draft_us", "host_us")
    total = steps.select(pl.sum_horizontal(pl.col(name).cast(pl.Float64) for name in terms)).to_series()
    assert ((total - steps["duration_us"]).abs() / steps["duration_us"]).max() < 1e-5


def test_shares_in_the_summary_are_those_of_the_steps(run: Path) -> None:
    summary = pl.read_csv(run / "summary.csv")
    terms = ("rows", "head", "state", "attention", "prefill", "draft", "host")
    sums = [pl.col(f"{term}_us").cast(pl.Float64).sum() for term in terms]
    steps = pl.read_parquet(run / "steps.parquet").group_by("cell", maintain_order=True)
    totals = steps.agg(pl.col("duration_us").sum(), pl.col("duration_us").mean().alias("mean_us"), *sums)
    assert summary["mean_step_ms"].to_list() == pytest.approx((totals["mean_us"] / 1e3).to_list())
    for term in terms:
        expected = (totals[f"{term}_us"] / totals["duration_us"]).to_list()
        assert summary[f"{term}_share"].to_list() == pytest.approx(expected, abs=1e-6), term
    assert summary.filter(pl.col("state_method") == "recurrent")["draft_share"].to_list() == [0.0, 0.0]


@pytest.mark.slow
def test_inv_6_data_files_are_the_same_bytes_for_any_number_of_jobs(run: Path, tmp_path: Path) -> None:
    again = run_sweep(RAW, expand(RAW), tmp_path / "again", jobs=2, keep_steps=True)
    for name in DATA_FILES:
        assert (again / name).read_bytes() == (run / name).read_bytes(), name


def test_an_interrupted_sweep_resumes_and_runs_nothing_twice(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    whole = cells.run_cell

    def dies_after_five(payload: str, folder: Path, keep_steps: bool) -> None:
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(payload)
        whole(payload, folder, keep_steps)

    monkeypatch.setattr(sweep, "run_cell", dies_after_five)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(RAW, expand(RAW), tmp_path / "out", keep_steps=True)
    assert not (tmp_path / "out").exists()

    def counts(payload: str, folder: Path, keep_steps: bool) -> None:
        calls.append(payload)
        whole(payload, folder, keep_steps)

    monkeypatch.setattr(sweep, "run_cell", counts)
    run_sweep(RAW, expand(RAW), tmp_path / "out", resume=True, keep_steps=True)
    assert len(calls) == len(set(calls)) == 12
    for name in DATA_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (run / name).read_bytes(), name


def test_an_earlier_run_is_replaced_and_anything_else_is_kept(run: Path, tmp_path: Path) -> None:
    one = {**RAW, "speculation": {"state_method": "storeall"}, "workload": {**RAW["workload"], "max_concurrency": 2}}
    out = run_sweep(one, expand(one), tmp_path / "out")
    assert len(pl.read_csv(run_sweep(one, expand(one), out) / "summary.csv")) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep me")
    with pytest.raises(UsageError, match="is not a run directory"):
        run_sweep(one, expand(one), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep me"


def cell(**sections: Any) -> dict[str, Any]:
    workload = {"lengths": "fixed:100/10", "max_concurrency": 2, "num_requests": 4}
    return {"model": "Qwen3.5-35B-A3B", "workload": workload, **sections}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (cell(speculation={"state_method": "replayssm", "tree": "2,2"}), "verifies chains only"),
        (cell(tensor_parallel_size=3), "does not divide num_attention_heads"),
        (cell(engine={"num_gpu_blocks_override": 20}), "max_num_seqs .256. exceeds available Mamba cache blocks .20."),
        (cell(engine={"num_gpu_blocks_override": 20, "max_num_seqs": 8}), "largest max_model_len that fits is"),
        (
            cell(engine={"num_gpu_blocks_override": 900}, speculation={"tree": ["1,1", "2,2"]}),
            "counts blocks of one state method and tree, and this sweep has 2",
        ),
        (
            cell(engine={"enable_prefix_caching": True, "max_num_batched_tokens": 1000}),
            "below the block of 1072 tokens at which prefix caching cuts prompts; raise it to at least 1072",
        ),
        (cell(engine={"max_model_len": 100}), "longest request of the workload has 110 tokens"),
        (cell(engine={"enable_chunked_prefill": False, "max_num_batched_tokens": 64}), "longest request, 110 tokens"),
        (cell(engine={"max_num_batched_tokens": 3}), "below the 4 rows of tree"),
        (cell(gpu="a100"), "gpu is 'a100'; allowed are h200, b200, h100"),
        (
            cell(model="Olmo-Hybrid-7B", speculation={"state_method": "recurrent"}),
            "is not covered by the operator tables of h200",
        ),
        (cell(speculation={"state_method": "magic"}), "state_method is 'magic'"),
        (cell(speculation={"tree": "two"}), "give widths like 2,2,2"),
        (cell(speculation={"acceptance": {"preset": "psychic"}}), "psychic"),
    ],
)
def test_a_scenario_that_cannot_run_says_what_to_change(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_cells(expand(raw))


def test_a_sweep_without_any_cell_that_runs_lists_all_reasons() -> None:
    raw = cell(speculation={"state_method": "replayssm", "tree": ["2,2", "3,3"]})
    runnable, skipped = plan_cells(expand(raw))
    assert runnable == []
    assert len(skipped) == 2


def test_a_single_cell_that_cannot_run_is_an_error() -> None:
    with pytest.raises(InfeasibleError):
        plan_cells(expand(cell(speculation={"state_method": "replayssm", "tree": "2,2"})))


def test_a_sweep_survives_workers_that_die(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = []

    def dies_once(work: Any, tasks: Any, jobs: int) -> Any:
        work(*tasks[0])
        yield None
        if not deaths:
            deaths.append(tasks[0])
            raise workers.BrokenProcessPool
        for task in tasks[1:]:
            work(*task)
            yield None

    monkeypatch.setattr(workers, "run_parallel", dies_once)
    out = run_sweep(RAW, expand(RAW), tmp_path / "out", jobs=2, keep_steps=True)
    assert len(deaths) == 1
    assert (out / "summary.csv").read_bytes() == (run / "summary.csv").read_bytes()


def test_changed_input_files_are_not_resumed(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    keys = []
    for tokens in (10, 20):
        trace.write_text(f"input_tokens,output_tokens\n{tokens},5\n")
        workload = {"trace": str(trace), "max_concurrency": 1, "num_requests": 2}
        (scenario,) = expand({**cell(), "workload": workload})
        keys.append(cells.cell_key(scenario, keep_steps=False))
    assert keys[0] != keys[1]
