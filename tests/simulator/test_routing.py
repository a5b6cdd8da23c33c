"""How rows choose experts: a scenario's field, what it does to trees of every width, and where it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest

from lab.errors import InfeasibleError, UsageError
from lab.methods import get_method
from lab.profiles.operators import ROUTINGS, load_tables
from lab.shapes import load_shape
from lab.trees import DraftTree
from simulator.cells import cell_key
from simulator.check import check
from simulator.run import step_cost
from simulator.scenario import Scenario, expand
from simulator.settings import EngineSettings, Routing
from simulator.stepcost import DEFAULT_ROUTING, build_step_cost, step_breakdown
from simulator.sweep import run_sweep

RAW: dict[str, Any] = {
    "model": "Qwen3.5-35B-A3B",
    "speculation": {"state_method": "treelog", "tree": "2,2,2"},
    "workload": {"lengths": "fixed:60/20", "max_concurrency": 8, "num_requests": 16},
}


def cell(**fields: Any) -> Scenario:
    (found,) = expand({**RAW, **fields})
    return found


def rows_us(routing: str, requests: int, widths: tuple[int, ...]) -> float:
    """The rows term of a step that verifies a tree for so many requests."""
    tree = DraftTree.from_widths(widths)
    shape, method = load_shape("Qwen3.5-35B-A3B"), get_method("treelog")
    cost = build_step_cost(shape, "h200", 1, EngineSettings(), method, tree, 2.5, routing)
    return step_breakdown(cost, requests, 2048)["rows"]


@pytest.mark.parametrize("routing", ["power_law_1.01", "balanced"])
@pytest.mark.parametrize(
    ("requests", "widths", "rows"), [(16, (2, 2, 2), 240), (256, (2, 2, 2), 3840), (64, (1,), 128)]
)
def test_a_step_changes_by_what_the_expert_table_says(
    routing: str, requests: int, widths: tuple[int, ...], rows: int
) -> None:
    def experts_us(name: str) -> float:
        return float(load_tables("h200").moe("bf16", 2048, 512, 8, 256, 1, [float(rows)], name).latency_us[0])

    found = rows_us(routing, requests, widths) - rows_us(DEFAULT_ROUTING, requests, widths)
    assert found == pytest.approx(40 * (experts_us(routing) - experts_us(DEFAULT_ROUTING)), rel=1e-6)


def test_skew_makes_wide_trees_cheaper_for_few_requests_and_dearer_for_many() -> None:
    """Few rows touch fewer experts when routing is skewed; of many rows the busiest experts hold most."""
    few, many = (rows_us("balanced", n, (2, 2, 2)) / rows_us("power_law_1.2", n, (2, 2, 2)) for n in (4, 256))
    assert few > 1.15
    assert many < 0.9


def test_names_are_those_of_the_tables_and_the_default_is_skewed() -> None:
    assert get_args(Routing) == ROUTINGS
    assert check(cell()).moe_routing == DEFAULT_ROUTING
    same, given, other = (step_cost(check(cell(moe_routing=name))) for name in (None, DEFAULT_ROUTING, "balanced"))
    assert same.tables.rows_us.tolist() == given.tables.rows_us.tolist() != other.tables.rows_us.tolist()
    assert same.tables.draft_us[8] < other.tables.draft_us[8]


def test_unknown_values_and_dense_models_are_refused_with_what_to_change() -> None:
    with pytest.raises(
        UsageError, match=r"moe_routing = 'uniform': input should be 'power_law_1\.2', 'power_law_1\.01'"
    ):
        cell(moe_routing="uniform")
    with pytest.raises(InfeasibleError, match=r"Qwen3\.5-27B is dense .* leave moe_routing out"):
        check(cell(model="Qwen3.5-27B", moe_routing="balanced"))
    assert check(cell(model="Qwen3.5-27B")).moe_routing == ""


def test_routing_is_swept_keyed_and_told(tmp_path: Path) -> None:
    raw = {**RAW, "name": "routing", "moe_routing": ["power_law_1.2", "balanced"]}
    cells = expand(raw)
    assert len({cell_key(each, keep_steps=False) for each in cells}) == 2
    out = run_sweep(raw, cells, tmp_path / "run")
    summary = pl.read_csv(out / "summary.csv")
    assert summary["moe_routing"].to_list() == raw["moe_routing"]
    assert summary["mean_tpot_ms"][1] > 1.05 * summary["mean_tpot_ms"][0]
    record = json.loads((out / "run.json").read_text())
    assert record["first_cell"]["moe_routing"] == "power_law_1.2"
    told = [entry["source"] for entry in record["step_cost"] if entry["term"] == "rows"]
    assert [source.rpartition("; ")[2] for source in told] == ["routing power_law_1.2", "routing balanced"]
