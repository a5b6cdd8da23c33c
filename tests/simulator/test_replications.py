"""Replications: one seed after the other, Student-t intervals of means, methods paired by seed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import UsageError
from simulator.replications import half_width, paired, replicate, summarise
from simulator.scenario import expand
from simulator.sweep import run_sweep

RAW = {
    "name": "seeds",
    "model": "Qwen3.5-35B-A3B",
    "engine": {"max_model_len": 8192},
    "speculation": {"state_method": ["storeall", "treelog"], "tree": "1,1"},
    "workload": {"lengths": "balanced-chat", "max_concurrency": 8, "num_requests": 12},
}


def test_interval_of_the_mean_is_students() -> None:
    # n = 3, mean 2, standard deviation 1: t(0.975, 2) = 4.30265
    assert half_width(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert math.isnan(half_width(np.array([1.0])))


def test_a_constant_factor_between_methods_has_no_interval() -> None:
    rows = [
        {"cell": cell, "state_method": method, "seed": seed, "tree": "1", "output_throughput": factor * (10.0 + seed)}
        for cell, (method, factor) in enumerate((("storeall", 1.0), ("treelog", 1.25)))
        for seed in range(4)
    ]
    (found,) = paired(rows, 4, ("cell", "state_method", "seed", "tree"))
    assert found["ratio"] == pytest.approx(1.25)
    assert found["low"] == pytest.approx(found["high"])


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_means_are_those_of_the_replications(values: list[float]) -> None:
    rows = [{"cell": 0, "seed": i, "output_throughput": value} for i, value in enumerate(values)]
    (found,) = summarise(rows, len(values), ("cell", "seed"))
    assert found["output_throughput"] == pytest.approx(float(np.mean(values)))
    assert found["seed"] == 0
    assert found["num_seeds"] == len(values)


def test_every_cell_gets_the_same_seeds() -> None:
    cells = replicate(expand(RAW), 3)
    assert [(cell.speculation.state_method, cell.seed) for cell in cells] == [
        (method, seed) for method in ("storeall", "treelog") for seed in range(3)
    ]


def test_run_directory_of_several_seeds(tmp_path: Path) -> None:
    run = run_sweep(RAW, expand(RAW), tmp_path / "run", seeds=2)
    summary, single, pairs = (pl.read_csv(run / f"{name}.csv") for name in ("summary", "replications", "paired"))
    assert summary["cell"].to_list() == [0, 1]
    assert single["seed"].to_list() == [0, 1, 0, 1]
    mean = single.filter(pl.col("cell") == 1)["mean_ttft_ms"].mean()
    assert summary["mean_ttft_ms"][1] == pytest.approx(mean)
    assert summary["output_throughput_ci95"][0] > 0
    assert set(pairs["state_method"]) == {"treelog"}
    requests = pl.read_parquet(run / "requests.parquet")
    assert requests.group_by("cell", "seed").len()["len"].to_list() == [12] * 4
    record = json.loads((run / "run.json").read_text())
    assert record["replications"]["seeds"] == 2
    # equal seeds meet equal requests and equal luck: the ratio varies less than the figure itself
    width = pairs.filter(pl.col("metric") == "output_throughput").select(pl.col("high") / pl.col("low")).item()
    own = 1 + 2 * summary["output_throughput_ci95"][0] / summary["output_throughput"][0]
    assert width < own


def test_a_sweep_over_seeds_is_not_run_with_several_seeds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--seeds 2 .* the scenario sweeps 2 itself: give `seed` one value"):
        run_sweep(RAW, expand({**RAW, "seed": [0, 7]}), tmp_path / "run", seeds=2)
    assert not (tmp_path / "run").exists()


def test_methods_with_other_seeds_are_not_paired() -> None:
    rows = [
        {"state_method": method, "seed": seed, "output_throughput": 1.0}
        for method, first in (("storeall", 0), ("treelog", 5))
        for seed in (first, first + 1)
    ]
    with pytest.raises(UsageError, match="only when they ran with the same seeds"):
        paired(rows, 2, ("state_method", "seed"))


def test_replications_that_draw_nothing_have_no_interval() -> None:
    rows = [
        {"state_method": method, "seed": seed, "output_throughput": rate}
        for method, rate in (("storeall", 2.0), ("treelog", 3.0))
        for seed in range(3)
    ]
    (found,) = paired(rows, 3, ("state_method", "seed"))
    assert (found["ratio"], found["low"], found["high"]) == (pytest.approx(1.5), None, None)
    assert all(math.isnan(row["output_throughput_ci95"]) for row in summarise(rows, 3, ("state_method", "seed")))


def test_one_seed_leaves_the_run_directory_as_it_was(tmp_path: Path) -> None:
    run = run_sweep(RAW, expand(RAW)[:1], tmp_path / "run")
    assert not (run / "replications.csv").exists()
    assert "num_seeds" not in pl.read_csv(run / "summary.csv").columns
    assert "seed" not in pl.read_parquet(run / "requests.parquet").columns
