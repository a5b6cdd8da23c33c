"""`treewy simulate`: run a scenario, or a sweep, and write its run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from lab.cli.output import print_json, print_table
from lab.cli.scenarios import scenario_command


def _run(
    raw: dict[str, Any], out: Path, jobs: int, resume: bool, seeds: int, progress: Callable[[int, int], None]
) -> None:
    from simulator.scenario import expand
    from simulator.sweep import run_sweep

    run_sweep(raw, expand(raw), out, jobs=jobs, resume=resume, seeds=seeds, keep_steps=True, progress=progress)


def show_summary(folder: Path, as_json: bool) -> None:
    """The main columns of a run's summary.csv as a table, or all of it as JSON; the folder's name on stderr."""
    import polars as pl

    frame = pl.read_csv(folder / "summary.csv", infer_schema_length=None)
    typer.echo(f"wrote {folder}", err=True)
    if as_json:
        print_json(frame.to_dicts())
        return
    columns = {
        "state_method": "method",
        "tree": "tree",
        "gpu_memory_utilization": "gmu",
        "max_concurrency": "max conc.",
        "request_rate": "req/s",
        "output_throughput": "output tok/s",
        "mean_ttft_ms": "mean TTFT ms",
        "p99_ttft_ms": "p99 TTFT ms",
        "mean_tpot_ms": "mean TPOT ms",
        "peak_running": "peak running",
        "peak_kv_usage": "peak KV usage",
        "num_preemptions": "preemptions",
    }
    rows = [
        [f"{value:.4g}" if isinstance(value, float) else "-" if value is None else value for value in row]
        for row in frame.select(*columns).iter_rows()
    ]
    print_table("", list(columns.values()), rows, left=2)


command = scenario_command(
    _run,
    show_summary,
    "Simulate a scenario: summary.csv, requests.parquet, steps.parquet and run.json in the run directory.",
)
