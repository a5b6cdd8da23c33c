"""The scenarios of examples/complaints show what their comments say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.errors import InfeasibleError
from simulator.check import check
from simulator.run import simulate, step_cost
from simulator.scenario import expand, read_yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "complaints"


def rows(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Summary rows of a scenario; paths in it count from the project's root."""
    monkeypatch.chdir(ROOT)
    cells = [check(cell) for cell in expand(read_yaml(FOLDER / f"{name}.yaml"))]
    return [simulate(cell, step_cost(cell), folder / str(i)) for i, cell in enumerate(cells)]


def test_snapshots_leave_three_running_requests_on_a_24_gb_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storeall, treewy = rows("state-blocks-24gb", tmp_path, monkeypatch)
    assert storeall["peak_running"] == 3
    assert treewy["peak_running"] == 5
    assert treewy["output_throughput"] > 1.4 * storeall["output_throughput"]


def test_a_pool_below_that_of_all_clients_costs_a_fifth_of_the_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, other_start, large = rows("start-up-variance", tmp_path, monkeypatch)
    assert (small["kv_cache_tokens"], other_start["kv_cache_tokens"]) == (183_028, 191_884)  # as logged
    assert (small["peak_running"], large["peak_running"]) == (20, 32)
    assert 0.7 < small["output_throughput"] / large["output_throughput"] < 0.85


def test_the_refusal_names_a_max_num_seqs_that_works() -> None:
    (scenario,) = expand(read_yaml(FOLDER / "refused-start.yaml"))
    with pytest.raises(InfeasibleError, match=r"max_num_seqs \(1024\) exceeds available Mamba cache blocks") as refusal:
        check(scenario)
    viable = int(str(refusal.value).rsplit(" ", 1)[1])
    for seqs, fits in ((viable, True), (viable + 1, False)):
        changed = scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"max_num_seqs": seqs})})
        if fits:
            check(changed)
        else:
            with pytest.raises(InfeasibleError):
                check(changed)


def test_the_cliff_of_ttft_lies_between_two_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = rows("ttft-cliff", tmp_path, monkeypatch)
    assert (round(large["kv_cache_tokens"], -3), round(small["kv_cache_tokens"], -3)) == (268_000, 197_000)
    assert large["prefix_cache_hit_rate"] > 0.9
    assert small["prefix_cache_hit_rate"] < 0.2
    assert (large["num_preemptions"], small["num_preemptions"] > 0) == (0, True)
    assert small["median_ttft_ms"] > 10 * large["median_ttft_ms"]
