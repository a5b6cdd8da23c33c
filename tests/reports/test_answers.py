"""The sentences follow the data: winners, ties, knees, reasons."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from reports.accuracy import VALIDATED
from reports.answers import all_best, best_at, highest_rate, knees
from reports.data import Group, load_run
from reports.findings import findings
from reports.lead import caveats, lead
from tests.reports.synthetic import rate_sweep, record, row, sweep, write_run

RATE = {"request_rate": 4.0, "max_concurrency": "", "arrivals": "poisson"}
IDLE = {"memory_bound": False, "memory_limited_steps": 0.0, "saturated": False}


def group_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Group:
    (group,) = load_run(write_run(tmp_path / "run", rows)).groups
    return group


def pair(load: float, storeall: float, treelog: float, budget: float = 0.75, **both: Any) -> list[dict[str, Any]]:
    """storeall and treelog at one load with these output throughputs."""
    return [
        row(0, "storeall", "1,1,1", budget, load, output_throughput=storeall, **both),
        row(1, "treelog", "1,1,1", budget, load, output_throughput=treelog, **both),
    ]


def rated(
    rate: float, storeall: tuple[float, float], treelog: tuple[float, float], **both: Any
) -> list[dict[str, Any]]:
    """storeall and treelog at one arrival rate with these mean TPOT and p99 TTFT."""
    settings = RATE | IDLE | {"request_rate": rate} | both
    return [
        row(n, method, "1,1,1", 0.75, rate, **settings, mean_tpot_ms=tpot, p99_ttft_ms=ttft)
        for n, (method, (tpot, ttft)) in enumerate({"storeall": storeall, "treelog": treelog}.items())
    ]


def plain_spaces(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def lead_of(group: Group) -> str:
    return plain_spaces(lead(group))


def text_of(group: Group, heading: str) -> str:
    return plain_spaces(dict(findings(group)).get(heading, ""))


@pytest.mark.parametrize(
    ("storeall", "treelog", "winners"),
    [
        (100.0, 105.0, ["treelog", "storeall"]),  # 5 % is a tie
        (100.0, 105.1, ["treelog"]),
        (100.0, 95.2, ["storeall"]),
        (100.0, 100.0, ["storeall", "treelog"]),
    ],
)
def test_five_per_cent_is_a_tie(tmp_path: Path, storeall: float, treelog: float, winners: list[str]) -> None:
    best = best_at(group_of(tmp_path, pair(8, storeall, treelog)), 0.75, 8)
    assert best is not None
    assert [cell.state_method for cell in best.winners] == winners[: len(best.winners)]
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


def test_an_open_loop_is_ranked_by_time_per_token_then_by_first_token(tmp_path: Path) -> None:
    best = best_at(group_of(tmp_path, rated(4, (12.0, 300.0), (10.0, 300.0))), 0.75, 4)
    assert best is not None
    assert [cell.state_method for cell in best.winners] == ["treelog"]
    assert best.gain == pytest.approx(1.2)
    best = best_at(group_of(tmp_path, rated(4, (10.0, 400.0), (10.2, 300.0))), 0.75, 4)
    assert best is not None
    assert [cell.state_method for cell in best.winners] == ["treelog"]


def test_what_does_not_keep_up_is_not_ranked(tmp_path: Path) -> None:
    rows = rated(4, (5.0, 100.0), (10.0, 100.0))
    rows[0]["saturated"] = True
    best = best_at(group_of(tmp_path, rows), 0.75, 4)
    assert best is not None
    assert best.top.state_method == "treelog"
    assert best.clear
    rows[1]["saturated"] = True
    assert best_at(group_of(tmp_path, rows), 0.75, 4) is None


def test_an_open_loop_opens_with_the_highest_rate_that_is_sustained(tmp_path: Path) -> None:
    rows = rated(4, (6.0, 200.0), (5.9, 200.0)) + rated(8, (12.0, 300.0), (10.0, 300.0))
    rows += rated(16, (30.0, 9e4), (40.0, 9e4), saturated=True, memory_limited_steps=0.03)
    rows[2] |= {"saturated": True, "memory_limited_steps": 0.5}
    group = group_of(tmp_path, rows)
    assert highest_rate(group, 0.75) == 8
    assert highest_rate(group, 0.75, "storeall") == 4
    assert lead_of(group).startswith(
        "At gpu_memory_utilization 0.75, treelog with tree 1,1,1 has the shortest mean TPOT, 10.0 ms, at 8 requests/s, "
        "the highest rate that anything run here sustains (storeall sustains 4 requests/s)."
    )
    assert "16" not in lead_of(group)
    assert text_of(group, "Knee").endswith("storeall 4 (then memory); treelog 8 (then memory).")
    assert "storeall does not keep up; what keeps its requests waiting is memory." in text_of(group, "Why")
    assert text_of(group, "By load").endswith("0.75: at 8 requests/s")


def test_a_rate_that_nothing_sustains_is_no_headline(tmp_path: Path) -> None:
    group = group_of(tmp_path, rated(4, (5.0, 100.0), (10.0, 100.0), saturated=True))
    assert lead(group) == "No configuration keeps up with 4 requests/s or more. Try lower rates."


def test_the_lead_opens_with_the_largest_budget_and_then_names_the_largest_gain(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 101.0, 0.6) + pair(128, 300.0, 450.0, 0.6) + pair(8, 100.0, 101.0) + pair(128, 400.0, 480.0)
    assert lead_of(group_of(tmp_path, rows)) == (
        "At gpu_memory_utilization 0.75 and 128 concurrent requests, treelog with tree 1,1,1 reaches 480 output "
        "tokens/s, the most of what was run and 1.20x those of storeall. Over all loads and budgets the gain is up to "
        "1.50x: treelog with tree 1,1,1 at 128 concurrent requests, gpu_memory_utilization 0.6."
    )


def test_the_lead_changes_with_the_winner(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 150.0)
    rows[1]["state_method"] = "treewy"
    assert "treewy with tree 1,1,1 reaches 150 output tokens/s" in lead(group_of(tmp_path, rows))


def test_without_a_gain_throughput_does_not_decide(tmp_path: Path) -> None:
    text = lead_of(group_of(tmp_path, pair(8, 100.0, 101.0) + pair(64, 300.0, 290.0)))
    assert "storeall with tree 1,1,1 reaches 300 output tokens/s, the most of what was run (treelog within 5 %)" in text
    assert "At no point has a method an output throughput higher than storeall's by more than 5 %" in text


def test_without_storeall_no_ratio_is_claimed(tmp_path: Path) -> None:
    text = lead(group_of(tmp_path, sweep(methods=("treewy", "treelog"), loads=(8, 64))))
    assert "storeall was not run, so there are no ratios to it." in text
    assert "x those" not in text


def test_one_cell_is_not_compared(tmp_path: Path) -> None:
    text = lead(group_of(tmp_path, [row(0, "treelog", "1,1,1", 0.75, 64, output_throughput=1234.0)]))
    assert text == (
        "One cell was run: at gpu_memory_utilization 0.75 and 64 concurrent requests, treelog with tree 1,1,1 reaches "
        "1,234 output tokens/s. There is nothing to compare it with."
    )


def test_what_was_not_run_and_lowered_limits_stand_beside_the_answer(tmp_path: Path) -> None:
    rows = sweep(loads=(8,))
    for cell in rows:
        if (cell["state_method"], cell["tree"], cell["gpu_memory_utilization"]) == ("treelog", "3,3,3", 0.9):
            cell["running_limit"] = 227
    run = load_run(write_run(tmp_path / "run", rows))
    assert caveats(run, run.groups[0]) == [
        "Not run: replayssm with trees 2,2,2 and 3,3,3 (verifies chains only).",
        "Records for 256 requests at once do not fit everywhere: treelog at most 227 with tree 3,3,3 at 0.9.",
    ]


def test_a_method_that_could_not_be_run_at_some_budgets_only(tmp_path: Path) -> None:
    entry = record()["skipped"][0] | {"state_method": "storeall", "tree": "3,3,3", "reason": "a " * 40}
    run = load_run(write_run(tmp_path / "run", sweep(loads=(8,)), record(skipped=[entry])))
    assert caveats(run, run.groups[0]) == ["Not run: storeall with tree 3,3,3 at gpu_memory_utilization 0.6."]


def test_ranges_of_load_rest_on_more_than_a_tie(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 101.0) + pair(64, 300.0, 325.0) + pair(128, 300.0, 335.0) + pair(256, 300.0, 450.0)
    assert text_of(group_of(tmp_path, rows), "By load") == (
        "storeall yields less than the best by more than 10 %, by gpu_memory_utilization:\n"
        "0.75: from 128 concurrent requests on"
    )


def test_cells_that_finished_nothing_are_told_and_not_ranked(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 900.0)
    rows[1] |= {"completed": 0}
    group = group_of(tmp_path, rows)
    assert [best.top.state_method for best in all_best(group)] == ["storeall"]
    assert text_of(group, "Not finished") == "1 cell finished no request and is not ranked."


def test_nothing_finished_is_said_plainly(tmp_path: Path) -> None:
    group = group_of(tmp_path, pair(8, 0.0, 0.0, completed=0))
    assert lead(group) == "No cell finished a request: there is nothing to compare."


def test_the_knee_is_the_lowest_memory_bound_load(tmp_path: Path) -> None:
    group = group_of(tmp_path, sweep())
    found = {
        (knee.state_method, knee.tree): {budget: (mark.load, mark.limit) for budget, mark in knee.marks.items()}
        for knee in knees(group)
    }
    assert found["storeall", "1,1,1"] == {0.6: (64, "memory"), 0.75: (128, "memory"), 0.9: (256, "memory")}
    assert found["storeall", "3,3,3"][0.6] == (8, "memory")
    assert found["treelog", "1,1,1"][0.9] == (None, "none")
    assert text_of(group, "Knee") == (
        "Load at which requests begin to wait, tree 1,1,1, gpu_memory_utilization 0.9: storeall 256 (memory); "
        "replayssm, treewy and treelog not up to 256."
    )


def test_why_names_the_batch_when_memory_is_the_reason(tmp_path: Path) -> None:
    rows = pair(128, 300.0, 450.0)
    rows[0] |= {
        "memory_bound": True,
        "memory_limited_steps": 0.5,
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
    assert "storeall is limited by memory: 40.0 requests run at once on average, with treelog 80.0 (2.00x)." in text
    assert "A running request of storeall holds 0.30 GiB at the peak, with treelog 0.12 GiB, records included." in text
    assert "The mean step of treelog is longer, for it carries more requests: 25.0 ms against 20.0 ms." in text


def test_why_does_not_blame_memory_when_the_batch_is_the_same(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 120.0, mean_running=8.0, memory_bound=False)
    rows[0]["mean_step_ms"], rows[1]["mean_step_ms"] = 20.0, 16.0
    text = text_of(group_of(tmp_path, rows), "Why")
    assert "memory is not the reason" in text
    assert "The mean step of treelog is shorter: 16.0 ms against 20.0 ms." in text


def test_tree_width_counts_where_a_wider_tree_pays(tmp_path: Path) -> None:
    rows = [
        row(n, "treelog", tree, 0.75, load, output_throughput=value, num_rows=num_rows)
        for n, (tree, num_rows, load, value) in enumerate(
            [("1,1,1", 4, 1, 100.0), ("2,2,2", 15, 1, 110.0), ("1,1,1", 4, 64, 900.0), ("2,2,2", 15, 64, 700.0)]
        )
    ]
    assert "more than 5 % more throughput at 1 of 2 points" in text_of(group_of(tmp_path, rows), "Tree width")


def test_step_costs_name_what_is_modelled_and_extrapolated(tmp_path: Path) -> None:
    rows = pair(8, 100.0, 120.0, extrapolated=False, extrapolated_steps=0.0)
    rows[1] |= {"extrapolated": True, "extrapolated_steps": 0.25}
    text = dict(findings(group_of(tmp_path, rows), ["drafting"]))["Step costs"]
    assert "Modelled, not timed: drafting." in text
    text = plain_spaces(text)
    assert "1 cell of 2 holds steps outside the measured tables (up to 25 % of a cell's steps)." in text


def test_every_sentence_survives_missing_numbers(tmp_path: Path) -> None:
    rows = sweep(loads=(8, 64)) + rate_sweep(rates=(2,))
    missing = (
        "tokens_per_round",
        "p99_ttft_ms",
        "mean_tpot_ms",
        "mean_step_ms",
        "peak_kv_gib",
        "mean_running",
        "acceptance_length",
    )
    for cell in rows:
        cell |= dict.fromkeys(missing, "nan")
    for group in load_run(write_run(tmp_path / "run", rows)).groups:
        text = lead(group) + " ".join(text for _, text in findings(group))
        assert "nan" not in text
        assert "inf" not in text


def test_a_group_is_a_value(tmp_path: Path) -> None:
    group = group_of(tmp_path, pair(8, 1.0, 2.0))
    assert dataclasses.replace(group) == group


def test_the_confidence_is_that_of_the_validation_page() -> None:
    """When `make validation` changes the number, `reports.accuracy.VALIDATED` must follow."""
    page = (Path(__file__).parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
    found = re.search(r"up to (\d+) % shorter time per token for TreeWY", page)
    assert found is not None
    assert f"up to {found[1]} % too favourable to treewy" in plain_spaces(VALIDATED[0])
