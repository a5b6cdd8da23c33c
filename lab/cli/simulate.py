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
    """The main columns of a run's summary.csv as a table, or all of it as JSON; the folder's name on stderr.

    Settings that differ between cells come after method and tree, the hit rate of a prefix cache last.
    """
    import polars as pl

    from reports.data import GROUP_FIELDS

    frame = pl.read_csv(folder / "summary.csv", infer_schema_length=None)
    typer.echo(f"wrote {folder}", err=True)
    if as_json:
        print_json(frame.to_dicts())
        return
    swept = [name for name in GROUP_FIELDS if frame[name].n_unique() > 1]
    columns = {
        "state_method": "method",
        "tree": "tree",
        **{name: name for name in swept},
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
    if frame["enable_prefix_caching"].any():
        columns["prefix_cache_hit_rate"] = "hit rate"
    rows = [[_text(value) for value in row] for row in frame.select(*columns).iter_rows()]
    print_table("", list(columns.values()), rows, left=2 + len(swept))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


command = scenario_command(
    _run,
    show_summary,
    "Simulate a scenario: summary.csv, requests.parquet, steps.parquet and run.json in the run directory.",
)
