"""One cell from scenario to summary row: flags, limits and Little's law on the published columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from simulator.check import check
from simulator.records import part_files
from simulator.run import simulate, step_cost
from simulator.scenario import expand


def row(folder: Path, **sections: Any) -> dict[str, Any]:
    """Summary row of a scenario of plain values; its records stay in `folder`."""
    base: dict[str, Any] = {
        "model": "Qwen3.5-35B-A3B",
        "speculation": {"state_method": "treelog", "tree": "1,1,1"},
        "workload": {"lengths": "fixed:300/40", "max_concurrency": 4, "num_requests": 40},
    }
    (scenario,) = expand({**base, **sections})
    cell = check(scenario)
    return simulate(cell, step_cost(cell), folder)


def test_inv_8_steps_outside_the_measured_points_are_flagged_in_steps_and_summary(tmp_path: Path) -> None:
    inside = row(tmp_path / "inside")
    assert (inside["extrapolated"], inside["extrapolated_steps"]) == (False, 0)
    wide = row(
        tmp_path / "outside",
        workload={"lengths": "fixed:300/40", "max_concurrency": 100, "num_requests": 200},
        speculation={"state_method": "treelog", "tree": "2,2,2"},
    )  # the convolution of 15 rows a request is measured to 68 requests
    steps = pl.concat([pl.read_parquet(part) for part in part_files(tmp_path / "outside", "steps")])
    assert wide["extrapolated"]
    assert wide["extrapolated_steps"] == pytest.approx((steps["extrapolated"] > 0).mean())
    assert steps.filter(pl.col("decoding") > 68)["extrapolated"].min() == 1


def test_littles_law_holds_for_the_published_columns(tmp_path: Path) -> None:
    found = row(
        tmp_path,
        workload={"trace": "azure-conv", "arrivals": "poisson", "request_rate": 0.5, "num_requests": 300},
    )
    time_running_s = (found["mean_e2el_ms"] - found["mean_queue_ms"]) / 1e3
    assert found["mean_running"] == pytest.approx(found["request_throughput"] * time_running_s, rel=0.02)


def test_acceptance_is_reported_by_the_engines_definitions(tmp_path: Path) -> None:
    found = row(tmp_path)
    by_depth = [float(rate) for rate in found["per_position_acceptance_rates"].split(";")]
    assert found["acceptance_length"] == pytest.approx(1 + sum(by_depth), abs=1e-3)
    assert found["acceptance_rate"] == pytest.approx(100 * sum(by_depth) / 3, abs=0.01)
    assert found["tokens_per_round"] < found["acceptance_length"]  # the last round is cut at the output length
    plain = row(tmp_path / "plain", speculation={"state_method": "recurrent"})
    assert (plain["acceptance_length"], plain["per_position_acceptance_rates"]) == (1.0, "")


def test_an_open_loop_that_outruns_the_service_is_called_saturated(tmp_path: Path) -> None:
    def at(rate: float) -> dict[str, Any]:
        workload = {"trace": "azure-conv", "arrivals": "poisson", "request_rate": rate, "num_requests": 1500}
        return row(tmp_path / f"{rate}", workload=workload)

    calm, flooded = at(4), at(200)
    assert (calm["saturated"], flooded["saturated"]) == (False, True)
    assert flooded["seqs_limited_steps"] + flooded["budget_limited_steps"] + flooded["memory_limited_steps"] > 0.5
    assert calm["memory_limited_steps"] == 0


def test_a_running_limit_caps_what_runs_and_what_records_are_reserved(tmp_path: Path) -> None:
    workload = {"lengths": "fixed:300/40", "max_concurrency": 64, "num_requests": 128}
    full = row(tmp_path / "full", workload=workload)
    limited = row(tmp_path / "limited", workload=workload, engine={"running_limit": 16})
    assert (full["peak_running"], limited["peak_running"]) == (64, 16)
    assert limited["reserved_records_gib"] == pytest.approx(full["reserved_records_gib"] * 16 / 256)
    assert limited["num_gpu_blocks"] > full["num_gpu_blocks"]
    assert limited["seqs_limited_steps"] > 0.5


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_steps(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from simulator.check import check; from simulator.run import simulate, step_cost\n"
        "from simulator.scenario import expand\n"
        "workload = {'lengths': 'fixed:50/4000', 'max_concurrency': 8, 'num_requests': int(sys.argv[1])}\n"
        "spec = {'state_method': 'recurrent'}\n"
        "raw = {'model': 'Qwen3.5-35B-A3B', 'speculation': spec, 'workload': workload}\n"
        "cell = check(expand(raw)[0]); row = simulate(cell, step_cost(cell), Path(sys.argv[2]))\n"
        "print(row['num_steps'], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for requests in (200, 4000):
        command = [sys.executable, "-c", code, str(requests), str(tmp_path / str(requests))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        steps, peak_kib = map(int, done.stdout.split())
        assert steps > 400 * requests
        peaks.append(peak_kib)
    assert peaks[1] - peaks[0] < 60 * 1024  # 1.9 million more steps, 80 bytes a record
