"""Reading a run directory: what is refused, and how cells fall into groups."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from lab.errors import UsageError
from reports.data import GROUP_FIELDS, Cell, load_run
from reports.tables import CELL_COLUMNS, cell_columns, cell_table
from reports.text import percent
from simulator.settings import EngineSettings
from tests.reports.synthetic import rate_sweep, record, row, sweep, write_run


def test_a_sweep_is_one_group_with_its_axes(tmp_path: Path) -> None:
    (group,) = load_run(write_run(tmp_path / "run", sweep())).groups
    assert group.load_field == "max_concurrency"
    assert group.loads == [1, 8, 32, 64, 128, 256]
    assert group.budgets == [0.9, 0.75, 0.6]
    assert group.trees == ["1,1,1", "2,2,2", "3,3,3"]
    assert group.methods == ["storeall", "replayssm", "treewy", "treelog"]


def test_a_swept_rate_is_the_load_axis(tmp_path: Path) -> None:
    (group,) = load_run(write_run(tmp_path / "run", rate_sweep(rates=(2, 4)))).groups
    assert (group.load_field, group.loads) == ("request_rate", [2, 4])


def test_a_cap_beside_a_swept_rate_sets_groups_apart(tmp_path: Path) -> None:
    rows = rate_sweep(rates=(2, 4), max_concurrency=32) + rate_sweep(rates=(2, 4), max_concurrency=64)
    groups = load_run(write_run(tmp_path / "run", rows)).groups
    assert [group.cells[0].max_concurrency for group in groups] == [32, 64]
    assert [group.label.rpartition(", ")[2] for group in groups] == ["max_concurrency 32", "max_concurrency 64"]


def test_cells_of_other_models_workloads_or_seeds_are_never_mixed(tmp_path: Path) -> None:
    settings = [{}, {"model": "Qwen3.5-27B"}, {"workload": "sharegpt"}, {"seed": 1}, {"kv_cache_dtype": "fp8"}]
    rows = [cell for extra in settings for cell in sweep(loads=(8,), **extra)]
    groups = load_run(write_run(tmp_path / "run", rows)).groups
    assert len(groups) == len(settings)
    assert len({group.label for group in groups}) == len(settings)


@pytest.mark.parametrize(
    ("field", "values", "labels"),
    [
        ("async_scheduling", (False, True), ("false", "true")),
        ("enable_prefix_caching", (False, True), ("false", "true")),
        ("prefix_cache_retention_interval", ("", 0, 4096), ("none", "0", "4096")),
        ("scheduling_policy", ("fcfs", "priority"), ("fcfs", "priority")),
        ("engine_options", ("", "watermark 0.05"), ("default", "watermark 0.05")),
    ],
)
def test_every_engine_option_sets_groups_apart(
    tmp_path: Path, field: str, values: tuple[object, ...], labels: tuple[str, ...]
) -> None:
    rows = [cell for value in values for cell in sweep(loads=(8,), **{field: value})]
    groups = load_run(write_run(tmp_path / "run", rows)).groups
    assert [group.label.rpartition(", ")[2] for group in groups] == [f"{field} {label}" for label in labels]
    assert {len(group.cells) for group in groups} == {len(rows) // len(values)}


def test_every_setting_of_the_engine_is_a_column_or_an_option() -> None:
    columns = {field.name for field in fields(Cell)} | {"name"}
    changed = {
        "long_prefill_token_threshold": 512,
        "enable_chunked_prefill": False,
        "scheduler_reserve_full_isl": False,
        "watermark": 0.05,
        "cudagraph_capture_sizes": [1, 2],
        "reserve_speculative_blocks": True,
        "num_gpu_blocks_override": 300,
        "kv_cache_memory_bytes": 1 << 30,
        "runtime_and_activations_gib": 4.5,
    }
    assert set(EngineSettings.model_fields) - columns == {*changed, "mamba_ssm_cache_dtype"}  # state_dtype's column
    assert EngineSettings().options == ""
    for name, value in changed.items():
        assert EngineSettings.model_validate({name: value}).options == f"{name} {value}"
    drawn = {"gpu_memory_utilization", "running_limit"}  # an axis of the charts, and what follows from max_num_seqs
    assert columns & set(EngineSettings.model_fields) - drawn - {"name"} <= set(GROUP_FIELDS)


def test_the_hit_rate_is_told_where_prefixes_are_cached(tmp_path: Path) -> None:
    caching = {"enable_prefix_caching": True, "prefix_cache_hit_rate": 0.25}
    rows = [row(n, "treelog", "1,1,1", 0.75, 8, **extra) for n, extra in enumerate(({}, caching))]
    without, cached = load_run(write_run(tmp_path / "run", rows)).groups
    assert cell_columns(without) == CELL_COLUMNS
    told = dict(zip(cell_columns(cached), cell_table(cached)[0][1], strict=True))
    assert told["prefix cache hit rate"] == percent(0.25)


def test_a_method_without_drafts_answers_for_every_tree(tmp_path: Path) -> None:
    plain = row(0, "storeall", "1,1,1", 0.75, 8, state_method="recurrent", tree="none", num_rows=1)
    (group,) = load_run(write_run(tmp_path / "run", [plain, *sweep(loads=(8,))])).groups
    assert group.trees == ["1,1,1", "2,2,2", "3,3,3"]
    assert group.all_trees[0] == "none"
    found = group.find("recurrent", "3,3,3", 0.75, 8)
    assert found is not None
    assert found.state_method == "recurrent"


def test_numbers_that_are_not_finite_are_nan(tmp_path: Path) -> None:
    rows = [row(n, "treelog", "1,1,1", 0.75, 8, p99_ttft_ms=value) for n, value in enumerate(("nan", "inf", ""))]
    cells = load_run(write_run(tmp_path / "run", rows)).cells
    assert all(math.isnan(cell.p99_ttft_ms) for cell in cells)


def test_a_header_alone_is_a_run_without_cells(tmp_path: Path) -> None:
    assert load_run(write_run(tmp_path / "run", [])).groups == ()


@pytest.mark.parametrize("name", ["summary.csv", "run.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", sweep(loads=(8,)))
    (run / name).unlink()
    with pytest.raises(UsageError, match=name):
        load_run(run)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", "{", "not valid JSON"),
        ("run.json", "[]", "must hold a JSON object"),
        ("run.json", '{"schema_version": 7}', "schema_version is 7; this version reads 1"),
        ("summary.csv", "", "not a CSV table"),
        ("summary.csv", "cell,model\n0,x\n", "lacks the columns gpu, tensor_parallel_size"),
    ],
)
def test_an_unusable_file_is_named_with_its_fault(tmp_path: Path, file: str, text: str, message: str) -> None:
    run = write_run(tmp_path / "run", sweep(loads=(8,)))
    (run / file).write_text(text)
    with pytest.raises(UsageError, match=message):
        load_run(run)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", "4.5", "line 2: num_rows must be a whole number, not '4.5'"),
        ("output_throughput", "fast", "line 2: output_throughput must be a number, not 'fast'"),
        ("memory_bound", "maybe", "line 2: memory_bound must be true or false, not 'maybe'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(tmp_path: Path, field: str, value: str, message: str) -> None:
    run = write_run(tmp_path / "run", [row(0, "treelog", "1,1,1", 0.75, 8, **{field: value})])
    with pytest.raises(UsageError, match=message):
        load_run(run)


def test_a_ledger_without_its_fields_is_refused(tmp_path: Path) -> None:
    from reports import write_report

    run = write_run(tmp_path / "run", sweep(loads=(8,)), record(ledgers=[{"state_method": "treelog"}]))
    with pytest.raises(UsageError, match="an entry of 'ledgers' lacks tree, gpu_memory_utilization"):
        write_report(run)
    assert not (run / "report.html").exists()
    assert json.loads((run / "run.json").read_text())["name"]


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({}, "none"),
        ({"memory_limited_steps": 0.5, "budget_limited_steps": 0.2}, "memory"),
        ({"memory_bound": True, "memory_limited_steps": 0.02}, "memory"),
        ({"seqs_limited_steps": 0.4}, "max_num_seqs"),
        ({"seqs_limited_steps": 0.4, "running_limit": 200}, "running limit"),
        ({"budget_limited_steps": 0.09}, "none"),
        ({"budget_limited_steps": 0.09, "saturated": True}, "token budget"),
        ({"budget_limited_steps": 0.5, "memory_bound": True, "memory_limited_steps": 0.02}, "token budget"),
    ],
)
def test_the_limit_is_what_keeps_requests_waiting_most(tmp_path: Path, values: dict[str, object], limit: str) -> None:
    quiet = {"memory_bound": False, "memory_limited_steps": 0.0, "budget_limited_steps": 0.0}
    run = load_run(write_run(tmp_path / "run", [row(0, "treelog", "1,1,1", 0.75, 8, **(quiet | values))]))
    assert run.cells[0].limit == limit


def test_blocks_leave_out_records_and_committed_memory_holds_all_of_them(tmp_path: Path) -> None:
    values = {"peak_kv_gib": 5.0, "peak_running": 10, "reserved_records_gib": 25.6, "running_limit": 256}
    (cell,) = load_run(write_run(tmp_path / "run", [row(0, "treelog", "1,1,1", 0.75, 8, **values)])).cells
    assert cell.blocks_gib == pytest.approx(4.0)
    assert cell.committed_gib == pytest.approx(29.6)
