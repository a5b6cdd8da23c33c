"""A small real run: the simulator's files hold what the report reads, under the names that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lab.units import GIB
from reports import write_report
from reports.data import load_run
from reports.ledgers import group_ledgers
from simulator.scenario import expand
from simulator.sweep import run_sweep
from tests.reports.synthetic import COLUMNS

SCENARIO: dict[str, Any] = {
    "name": "small",
    "model": "Qwen3.5-35B-A3B",
    "gpu": "h200",
    "engine": {"gpu_memory_utilization": 0.6},
    "speculation": {"state_method": ["recurrent", "storeall", "replayssm", "treelog"], "tree": ["1,1,1", "3,3,3"]},
    "workload": {"trace": "azure-conv", "max_concurrency": 4, "num_requests": 20},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_sweep(SCENARIO, expand(SCENARIO), tmp_path_factory.mktemp("real") / "run")


def test_synthetic_columns_are_those_of_the_simulator(run: Path) -> None:
    assert pl.read_csv(run / "summary.csv", infer_schema=False).columns == COLUMNS


def test_blocks_at_the_peak_are_those_of_the_pool(run: Path) -> None:
    loaded = load_run(run)
    (group,) = loaded.groups
    ledgers = {(entry.state_method, entry.tree): entry for entry in group_ledgers(loaded, group)}
    for cell in group.cells:
        entry = ledgers[cell.state_method, cell.tree]
        blocks = cell.peak_kv_usage * (cell.num_gpu_blocks - 1)
        assert cell.blocks_gib == pytest.approx(blocks * entry.bytes_per_block / GIB)
        assert cell.reserved_records_gib == pytest.approx(entry.lines["method_scratch"] / GIB)


def test_the_report_tells_what_the_run_was(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    for part in (
        "Not run: replayssm with tree 3,3,3 (verifies chains only).",
        "Records for 256 requests at once do not fit everywhere: treelog at most",
        '<span class="source fitted">fitted</span>',
        "Operator tables (digest): h200 ",
        "All settings of the first cell",
    ):
        assert part in html
    assert "chain:0" not in html
