"""Scenario files: sweeps, defaults, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.errors import UsageError
from simulator.scenario import expand, read_yaml, replace_fields

BASE: dict[str, Any] = {"model": "Qwen3.5-35B-A3B", "workload": {"lengths": "fixed:10/10", "max_concurrency": 4}}


def scenario(**sections: Any) -> dict[str, Any]:
    return {**BASE, **sections}


def test_lists_make_the_product_and_the_method_varies_fastest() -> None:
    cells = expand(
        scenario(
            engine={"gpu_memory_utilization": [0.6, 0.9]},
            speculation={"state_method": ["storeall", "treewy"], "tree": ["1,1,1", "2,2,2"]},
        )
    )
    assert len(cells) == 8
    assert [cell.speculation.state_method for cell in cells[:2]] == ["storeall", "treewy"]
    assert [cell.engine.gpu_memory_utilization for cell in cells] == [0.6] * 4 + [0.9] * 4


def test_a_scenario_without_lists_is_one_cell() -> None:
    assert len(expand(BASE)) == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modell": "x"}, "modell: no such field"),
        ({"model": None}, "model = None"),
        (
            {"engine": {"gpu_memory_utilization": 1.5}},
            r"engine.gpu_memory_utilization = 1.5: input should be less than",
        ),
        ({"engine": {"gpu_memory_utilization": float("nan")}}, "engine.gpu_memory_utilization = not a number"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs = 0: input should be greater than or equal to 1"),
        (
            {"engine": {"kv_cache_dtype": "int3"}},
            "engine.kv_cache_dtype = 'int3': input should be 'auto', 'bfloat16' or",
        ),
        ({"engine": {"max_num_seqs": []}}, "engine.max_num_seqs is an empty list"),
        ({"workload": {"lengths": "fixed:1/1", "arrivals": "poisson", "request_rate": -2}}, "request_rate = -2"),
        ({"workload": {"lengths": "fixed:1/1", "arrivals": "poisson"}}, "'poisson' needs 'request_rate'"),
        ({"workload": {"lengths": "fixed:1/1"}}, "'closed-loop' needs 'max_concurrency'"),
        ({"workload": {"max_concurrency": 1}}, "either 'trace' or 'lengths'"),
        ({"workload": {"lengths": "fixed:1/1", "arrivals": "trace"}}, "needs a 'trace' with time stamps"),
        ({"workload": 3}, "workload = 3"),
        ({"speculation": {"acceptance": {"per_depth": [1.2]}}}, "per_depth.0 = 1.2"),
        ({"speculation": {"acceptance": {}}}, "either 'preset' or 'per_depth'"),
        ({"host": {"ms_per_step": -1}}, "host.ms_per_step = -1"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_values_are_refused_by_field_value_and_what_is_allowed(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        expand(scenario(**sections))


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n- 2\n", "must be a mapping"), ("a: [1\n", "not valid YAML"), ("!!python/object:os.x {}", "YAML")],
)
def test_files_that_are_no_scenario_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_yaml(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read scenario .*none.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_fields_are_replaced_without_touching_the_original() -> None:
    changed = replace_fields(BASE, {("model",): "m", ("engine", "max_model_len"): 5})
    assert changed["model"] == "m"
    assert changed["engine"] == {"max_model_len": 5}
    assert "engine" not in BASE
