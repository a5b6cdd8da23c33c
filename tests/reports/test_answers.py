"""The sentences follow the data: winners, ties, knees, reasons."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from reports.answers import all_best, best_at, knees
from reports.data import Group, load_run
from reports.findings import findings, lead
from tests.reports.synthetic import rate_sweep, row, sweep, write_run


def group_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Group:
    (group,) = load_run(write_run(tmp_path / "run", rows)).groups
    return group


def pair(load: float, storeall: float, treelog: float, **both: Any) -> list[dict[str, Any]]:
    """storeall and treelog at one load with these output throughputs."""
    return [
        row(0, "storeall", "1,1,1", 0.75, load, output_throughput=storeall, **both),
        row(1, "treelog", "1,1,1", 0.75, load, output_throughput=treelog, **both),
    ]


def text_of(group: Group, heading: str) -> str:
    return dict(findings(group)).get(heading, "")


@pytest.mark.parametrize(
    ("storeall", "treelog", "winners"),
    [
        (100.0, 102.0, ["treelog", "storeall"]),  # 2 % is a tie
        (100.0, 102.1, ["treelog"]),
        (100.0, 97.9, ["storeall"]),
        (100.0, 100.0, ["storeall", "treelog"]),
    ],
)
def test_two_per_cent_is_a_tie(tmp_path: Path, storeall: float, treelog: float, winners: list[str]) -> None:
    best = best_at(group_of(tmp_path, pair(8, storeall, treelog)), 0.75, 8)
    assert best is not None
    assert [cell.state_method for cell in best.winners] == winners
    assert best.beats_baseline == (winners == ["treelog"])


def test_storeall_competes_with_its_best_tree(tmp_path: Path) -> None:
    rows = [
        row(0, "storeall", "1,1,1", 0.75, 8, output_throughput=100.0),
        row(1, "storeall", "2,2,2", 0.75, 8, output_throughput=150.0),
        row(2, "treelog", "1,1,1", 0.75, 8, output_throughput=180.0),
    ]
    best = best_at(group_of(tmp_path, rows), 0.75, 8)
    assert best is not None
    assert best.gain == pytest.approx(1.2)


def test_at_a_given_rate_ties_are_ordered_by_time_per_token(tmp_path: Path) -> None:
    rate = {"request_rate": 4.0, "max_concurrency": "", "arrivals": "poisson"}
    rows = [
        row(0, "storeall", "1,1,1", 0.75, 4, output_throughput=100.0, mean_tpot_ms=12.0, **rate),
        row(1, "treelog", "1,1,1", 0.75, 4, output_throughput=99.5, mean_tpot_ms=10.0, **rate),
    ]
    best = best_at(group_of(tmp_path, rows), 0.75, 4)
    assert best is not None
    assert [cell.state_method for cell in best.winners] == ["treelog", "storeall"]


def test_the_lead_names_winner_gain_and_where_it_begins(tmp_path: Path) -> None:
    text = lead(group_of(tmp_path, pair(8, 100.0, 101.0) + pair(64, 300.0, 330.0) + pair(128, 300.0, 450.0)))
    assert "treelog with tree 1,1,1 gains most: 1.50x the output tokens/s of storeall" in text
    assert "at 128 concurrent requests, gpu_memory_utilization 0.75" in text
    assert "That is from 64 concurrent requests on at gpu_memory_utilization 0.75." in text
    assert "At the other 1 point no method is ahead of storeall by more than 2 %." in text


def test_the_lead_changes_with_the_winner(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 150.0)
    rows[1]["state_method"] = "treewy"
    assert lead(group_of(tmp_path, rows)).startswith("treewy with tree 1,1,1 gains most")


def test_without_a_gain_throughput_does_not_decide(tmp_path: Path) -> None:
    text = lead(group_of(tmp_path, pair(8, 100.0, 101.0) + pair(64, 300.0, 290.0)))
    assert text.startswith("Output throughput does not decide")
    assert "Choose by memory and latency." in text


def test_without_storeall_no_ratio_is_claimed(tmp_path: Path) -> None:
    text = lead(group_of(tmp_path, sweep(methods=("treewy", "treelog"), loads=(8, 64))))
    assert "storeall was not run, so there are no ratios to it." in text
    assert "x the output" not in text


def test_one_cell_is_not_compared(tmp_path: Path) -> None:
    text = lead(group_of(tmp_path, [row(0, "treelog", "1,1,1", 0.75, 64, output_throughput=1234.0)]))
    assert text == (
        "One cell was run: treelog with tree 1,1,1 reaches 1,234 output tokens/s at 64 concurrent requests, "
        "gpu_memory_utilization 0.75. There is nothing to compare it with."
    )


def test_cells_that_finished_nothing_are_told_and_not_ranked(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 900.0)
    rows[1] |= {"completed": 0, "rejected": 1000}
    group = group_of(tmp_path, rows)
    assert [best.top.state_method for best in all_best(group)] == ["storeall"]
    assert "1 cell of 2 rejected requests (up to 1,000 of 1,000)" in text_of(group, "Rejected")
    assert "1 cell finished no request and is not ranked." in text_of(group, "Rejected")


def test_nothing_finished_is_said_plainly(tmp_path: Path) -> None:
    group = group_of(tmp_path, pair(8, 0.0, 0.0, completed=0))
    assert lead(group) == "No cell finished a request: there is nothing to compare."


def test_the_knee_is_the_lowest_memory_bound_load(tmp_path: Path) -> None:
    group = group_of(tmp_path, sweep())
    found = {(knee.state_method, knee.tree): knee.loads for knee in knees(group)}
    assert found["storeall", "1,1,1"] == {0.6: 64, 0.75: 128, 0.9: 256}
    assert found["storeall", "3,3,3"][0.6] == 8
    assert found["treelog", "1,1,1"][0.9] is None
    assert "storeall 64 (0.6), 128 (0.75), 256 (0.9)" in text_of(group, "Knee")
    assert "not up to 256 (0.9)" in text_of(group, "Knee")


def test_why_names_the_batch_when_memory_is_the_reason(tmp_path: Path) -> None:
    rows = pair(128, 300.0, 450.0)
    rows[0] |= {
        "memory_bound": True,
        "mean_running": 40.0,
        "peak_running": 40,
        "peak_kv_gib": 12.0,
        "mean_step_ms": 20.0,
    }
    rows[1] |= {
        "memory_bound": False,
        "mean_running": 80.0,
        "peak_running": 80,
        "peak_kv_gib": 10.0,
        "mean_step_ms": 25.0,
    }
    text = text_of(group_of(tmp_path, rows), "Why")
    assert "storeall is memory bound: at the peak a running request holds 0.30 GiB, with treelog 0.12 GiB" in text
    assert "so 80.0 requests run at once on average instead of 40.0 (2.00x)" in text
    assert "The mean step is longer, for it carries more requests: 25.0 ms against 20.0 ms." in text


def test_why_does_not_blame_memory_when_the_batch_is_the_same(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 120.0, mean_running=8.0, memory_bound=False)
    rows[0]["mean_step_ms"], rows[1]["mean_step_ms"] = 20.0, 16.0
    text = text_of(group_of(tmp_path, rows), "Why")
    assert "memory is not the reason" in text
    assert "The mean step is shorter: 16.0 ms against 20.0 ms." in text


def test_by_load_joins_loads_with_the_same_verdict(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 101.0) + pair(64, 300.0, 330.0) + pair(128, 300.0, 450.0)
    assert text_of(group_of(tmp_path, rows), "By load") == (
        "gpu_memory_utilization 0.75, load 8: storeall, tied with treelog; "
        "64 to 128: treelog with tree 1,1,1, 1.10x to 1.50x."
    )


def test_tree_width_counts_where_a_wider_tree_pays(tmp_path: Path) -> None:
    rows = [
        row(n, "treelog", tree, 0.75, load, output_throughput=value, num_rows=num_rows)
        for n, (tree, num_rows, load, value) in enumerate(
            [("1,1,1", 4, 1, 100.0), ("2,2,2", 15, 1, 110.0), ("1,1,1", 4, 64, 900.0), ("2,2,2", 15, 64, 700.0)]
        )
    ]
    assert "more than 2 % more throughput at 1 of 2 points" in text_of(group_of(tmp_path, rows), "Tree width")


def test_confidence_names_what_is_modelled_and_extrapolated(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 120.0, extrapolated=False, extrapolated_steps=0.0)
    rows[1] |= {"extrapolated": True, "extrapolated_steps": 0.25}
    text = dict(findings(group_of(tmp_path, rows), ["drafting"]))["Confidence"]
    assert "modelled, not timed: drafting." in text
    assert "1 cell of 2 holds steps outside the measured tables (up to 25 % of a cell's steps)." in text


def test_every_sentence_survives_missing_numbers(tmp_path: Path) -> None:
    rows = sweep(loads=(8, 64)) + rate_sweep(rates=(2,))
    missing = ("p99_ttft_ms", "mean_tpot_ms", "mean_step_ms", "peak_kv_gib", "mean_running", "acceptance_length")
    for cell in rows:
        cell |= dict.fromkeys(missing, "nan")
    for group in load_run(write_run(tmp_path / "run", rows)).groups:
        text = lead(group) + " ".join(text for _, text in findings(group))
        assert "nan" not in text
        assert "inf" not in text


def test_a_group_is_a_value(tmp_path: Path) -> None:
    group = group_of(tmp_path, pair(8, 1.0, 2.0))
    assert dataclasses.replace(group) == group
