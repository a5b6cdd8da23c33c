"""`treewy plan`: sweep a scenario and write the capacity report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from lab.cli.scenarios import scenario_command
from lab.cli.simulate import show_summary


def _run(
    raw: dict[str, Any], out: Path, jobs: int, resume: bool, seeds: int, progress: Callable[[int, int], None]
) -> None:
    from reports import write_report
    from simulator.scenario import expand
    from simulator.sweep import run_sweep

    run_sweep(raw, expand(raw), out, jobs=jobs, resume=resume, seeds=seeds, progress=progress, finish=write_report)


def _show(folder: Path, as_json: bool) -> None:
    if as_json:
        show_summary(folder, as_json)
    else:
        typer.echo(str(folder / "report.html"))


command = scenario_command(
    _run, _show, "Sweep a scenario and write report.html, summary.csv, requests.parquet and run.json."
)
