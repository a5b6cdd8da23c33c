"""CUDA graphs: sizes by the engines' defaults, rows between two sizes, and launches above the largest one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InfeasibleError, UsageError
from lab.methods import get_method
from lab.shapes import load_shape
from lab.trees import parse_tree
from simulator.check import check
from simulator.cudagraphs import CudaGraphs, captured_graphs, sglang_sizes
from simulator.run import simulate, step_cost
from simulator.scenario import Scenario, expand
from simulator.settings import EngineSettings
from simulator.stepcost import StepCost, build_step_cost, step_breakdown

LAYERS = 40
H200 = 150_754_820_096
RAW: dict[str, Any] = {
    "model": "Qwen3.5-35B-A3B",
    "speculation": {"state_method": "treelog", "tree": "2,2,2"},
    "workload": {"lengths": "fixed:60/60", "max_concurrency": 40, "num_requests": 60},
}


def build(tree: str = "chain:0", **engine: Any) -> StepCost:
    method = get_method("recurrent" if tree == "chain:0" else "treelog")
    return build_step_cost(
        load_shape("Qwen3.5-35B-A3B"), "h200", 1, EngineSettings(**engine), method, parse_tree(tree), 1.5
    )


def cell(**fields: Any) -> Scenario:
    (found,) = expand({**RAW, **fields})
    return found


def test_default_sizes_are_vllms_in_rows_and_whole_requests_of_a_tree() -> None:
    plain = captured_graphs(EngineSettings(), 1).sizes
    assert plain == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert captured_graphs(EngineSettings(max_num_seqs=5), 1).sizes == (1, 2, 4, 8)
    assert captured_graphs(EngineSettings(), 4).sizes == (4, *range(8, 256, 8), *range(256, 513, 16))
    assert captured_graphs(EngineSettings(), 15).sizes == (*range(15, 481, 15), 510)


def test_default_sizes_of_sglang_are_in_requests_and_denser_with_drafts() -> None:
    assert sglang_sizes(None, 1, 1, H200)[:8] == (1, 2, 4, 8, 12, 16, 24, 32)
    assert sglang_sizes(None, 4, 1, H200)[:9] == tuple(4 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 10))
    assert [max(sglang_sizes(None, 1, tp, H200)) for tp in (1, 4)] == [256, 512]
    assert sglang_sizes((3, 9), 4, 1, H200) == (12, 36)


@given(st.sets(st.integers(1, 60), max_size=8), st.integers(0, 80))
def test_rows_are_padded_to_the_next_size_and_left_alone_above_the_largest(sizes: set[int], count: int) -> None:
    padded = CudaGraphs(tuple(sorted(sizes))).padded(count)
    expected = [0] + [min((size for size in sizes if size >= rows), default=rows) for rows in range(1, count + 1)]
    assert padded.tolist() == expected


def test_rows_between_two_sizes_cost_what_the_larger_one_does() -> None:
    cost, bare = build(), build(cudagraph_capture_sizes=())
    for requests, captured in ((3, 4), (9, 16), (250, 256)):
        found, exact = step_breakdown(cost, requests, 2048), step_breakdown(cost, captured, 2048)
        assert (found["rows"], found["head"]) == (exact["rows"], exact["head"])
        assert found["state"] < exact["state"]  # states and attention are those of the requests there are
        assert found["attention"] < exact["attention"]
        assert found["rows"] == pytest.approx(bare.tables.rows_us[captured])
    assert step_breakdown(cost, prefill=[(0, 700)])["rows"] == bare.tables.rows_us[700]


def test_a_tree_of_many_rows_is_not_padded_by_the_default_sizes() -> None:
    tree, bare = build("2,2,2"), build("2,2,2", cudagraph_capture_sizes=())
    rows = np.arange(15, 481, 15)
    np.testing.assert_array_equal(tree.tables.rows_us[rows], bare.tables.rows_us[rows])


def test_above_the_largest_size_a_step_lasts_as_long_as_its_launches() -> None:
    cost = build("2,2,2", cudagraph_capture_sizes=[15, 60])
    inside, outside = (sum(step_breakdown(cost, n, 64).values()) for n in (4, 5))
    assert inside < 0.8e3 * LAYERS
    assert outside == pytest.approx(0.8e3 * LAYERS)
    many = step_breakdown(cost, 200, 64)
    assert sum(many.values()) > 0.8e3 * LAYERS
    assert many["rows"] == pytest.approx(cost.tables.rows_us[3000])  # the GPU takes longer than the launches
    prompt = step_breakdown(cost, 5, 64, prefill=[(0, 100)])
    assert prompt["rows"] == pytest.approx(cost.tables.rows_us[175])  # the host's time of prompt steps holds it


def test_small_engines_have_graphs_larger_than_their_steps() -> None:
    cost = build(max_num_seqs=5, max_num_batched_tokens=6, max_model_len=64)
    assert len(cost.tables.head_us) == 6
    assert cost.tables.rows_us[5] == build().tables.rows_us[8] == cost.tables.rows_us[6]


def test_sizes_that_hold_no_request_are_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"up to 8 hold no request of 15 rows; add a multiple of 15"):
        build("2,2,2", cudagraph_capture_sizes=[4, 8])
    with pytest.raises(UsageError, match=r"engine\.cudagraph_capture_sizes\.1 = 0: input should be greater than"):
        cell(engine={"cudagraph_capture_sizes": [1, 0]})
    with pytest.raises(UsageError, match=r"the engine sglang has cuda_graph_bs"):
        cell(engine={"name": "sglang", "cudagraph_capture_sizes": [1]})


@pytest.mark.parametrize(
    ("engine", "option"),
    [
        ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes []"),
        ({"name": "sglang", "cuda_graph_bs": [], "disable_overlap_schedule": True}, "cuda_graph_bs"),
    ],
)
def test_a_run_without_graphs_waits_for_launches_and_says_so(engine: Any, option: str, tmp_path: Path) -> None:
    captured = {name: value for name, value in engine.items() if "cud" not in name}
    rows = {}
    for key, settings in (("captured", captured), ("eager", engine)):
        checked = check(Scenario.model_validate_json(cell(engine=settings).model_dump_json()))
        cost = step_cost(checked)
        rows[key] = simulate(checked, cost, tmp_path / key)
        assert ("none is captured" in cost.sources["rows"]) == (key == "eager")
    assert option in rows["eager"]["engine_options"]
    assert rows["eager"]["mean_step_ms"] > 0.8 * LAYERS
    assert rows["captured"]["mean_step_ms"] < rows["eager"]["mean_step_ms"]
    assert rows["eager"]["rows_share"] > rows["captured"]["rows_share"]


def test_the_key_of_a_cell_holds_the_sizes() -> None:
    sizes = {json.dumps(cell(engine={"cudagraph_capture_sizes": s}).model_dump(mode="json")) for s in ([1], [1, 2])}
    assert len(sizes) == 2
