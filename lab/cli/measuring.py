"""What `treewy bench --backend` does once its flags are read: measure, keep, and say what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.output import print_json, print_table

if TYPE_CHECKING:
    from lab.bench.backend import Backend, Effort
    from lab.bench.points import Axes, Point
    from lab.bench.results import BenchResult
    from lab.profiles.rows import KernelRow


@dataclass(frozen=True, slots=True)
class Job:
    """What a call measures and where it goes; `again` is the command that continues it, without --resume."""

    backend: Backend
    axes: Axes
    phases: tuple[str, ...]
    effort: Effort
    limit: float | None
    folder: Path | None
    resume: bool
    overwrite: bool
    date: str | None
    operator_tables: str | None
    again: str


def measure(job: Job) -> BenchResult:
    """Run the bench, save it as it goes, and tell on stderr what was left out; raises `UsageError` before it starts.

    Raises `InterruptedSweepError` on Ctrl-C, after what is measured was saved.
    """
    from dataclasses import asdict

    from lab.bench.harness import run_bench
    from lab.bench.points import spread_out
    from lab.bench.results import check_target, continue_from, new_result, save
    from lab.cli.scenarios import progress_bar
    from lab.errors import InterruptedSweepError

    points = job.axes.points() if job.limit is None else spread_out(job.axes.points())
    settings = {**asdict(job.axes), "phases": list(job.phases), **asdict(job.effort)}
    result = new_result(job.backend, settings, job.date, job.operator_tables)
    folder = job.folder
    if folder is not None:
        if job.resume:
            continue_from(folder, result)
        check_target(folder, replace=job.resume or job.overwrite)

    def keep() -> None:
        if folder is not None and result.rows:
            save(result, folder)

    for line in _cannot_run(job, points):
        typer.echo(f"left out: {line}", err=True)
    if "--profile " in job.again and result.device["operator_tables"] is None:
        typer.echo(
            "note: --operator-tables is not given, and this device has none of its own; --gpu asks for them", err=True
        )
    typer.echo(f"measuring {len(points)} points on {result.device['name']} …", err=True)
    _warn_if_busy(result)
    try:
        with progress_bar("measuring", "points") as progress:
            run_bench(
                job.backend, points, result, effort=job.effort, phases=job.phases, time_limit_s=job.limit,
                progress=progress, save=keep,
            )  # fmt: skip
    except KeyboardInterrupt:
        keep()
        raise InterruptedSweepError(_kept(result, job)) from None
    keep()
    for line in result.skipped:
        typer.echo(f"left out: {line}", err=True)
    if result.left_out:
        rest = f"; measure them with: {job.again} --resume" if folder is not None else "; --time-limit gives more time"
        typer.echo(f"the time limit left {result.left_out} of {len(points)} points out{rest}", err=True)
    if result.device.get("throttled"):
        typer.echo("warning: the GPU lowered its clock during the run; see clocks in device.json", err=True)
    return result


def report(job: Job, result: BenchResult, is_profile: bool, as_json: bool) -> None:
    """Print the rows, and on stderr what became of them; exits with 1 when a gate was red or nothing was measured."""
    if as_json:
        print_json({"device": result.record(), "rows": [_as_dict(row) for row in result.rows]})
    elif result.rows:
        _print_result(result)
    if not result.rows:
        typer.echo(f"nothing was measured{_why_nothing(job, result)}", err=True)
        raise typer.Exit(1)
    if job.folder is not None:
        typer.echo(f"wrote {job.folder}", err=True)
    if is_profile and result.device["operator_tables"] is None:
        typer.echo(f"note: {_no_tables(result, job.again)}", err=True)
    for line in result.red:
        typer.echo(f"red: {line}", err=True)
    if result.red:
        raise typer.Exit(1)


def _kept(result: BenchResult, job: Job) -> str:
    if job.folder is None:
        return "nothing is kept without --out or --profile"
    if not result.rows:
        return f"no point was measured yet; {job.folder} was not written"
    points = len({(row.key[0], *row.key[2:-1]) for row in result.rows})
    return f"{points} points are kept in {job.folder}; continue with: {job.again} --resume"


def _cannot_run(job: Job, points: Sequence[Point]) -> list[str]:
    """What is asked for and cannot be measured: trees that a method cannot verify, phases that it does not have."""
    from lab.profiles.rows import PHASES

    pairs = [f"{method} cannot verify {', '.join(trees)}" for method, trees in job.axes.impossible().items()]
    lines = ["; ".join(pairs)] if pairs else []
    if tuple(job.phases) != PHASES:
        has = {method: set[str]() for method in job.axes.methods}
        for point in points:
            has[point.method] |= set(job.backend.phases(point))
        for phase in job.phases:
            lacking = [method for method, phases in has.items() if phases and phase not in phases]
            if lacking:
                lines.append(f"{', '.join(lacking)}: no phase {phase} of its own")
    return lines


def _why_nothing(job: Job, result: BenchResult) -> str:
    if result.skipped:
        return f": {result.skipped[0]}"
    if result.left_out:
        return f" within {job.limit:g} s; give a larger --time-limit"
    return f": {', '.join(job.axes.methods)} has none of the phases {', '.join(job.phases)}; choose others with --phase"


def _no_tables(result: BenchResult, again: str) -> str:
    return (
        f"no operator tables fit {result.device['name']}; before --gpu takes this profile, name those that price the "
        f"rest of a model (nothing is timed again): {again} --resume --operator-tables h200"
    )


def _warn_if_busy(result: BenchResult) -> None:
    load = result.device.get("load_average")
    if load and load[0] > 0.5 * result.device["cores"]:
        typer.echo(f"note: the machine is busy (load {load[0]} on {result.device['cores']} cores)", err=True)


def _print_result(result: BenchResult) -> None:
    header = (
        "method", "phase", "tree", "heads", "state", "batch", "rows", "timer",
        "p50 us", "p20 us", "p80 us", "n", "% of copy", "output err", "state err",
    )  # fmt: skip
    rows = [_cells(row) for row in result.rows]
    print_table("Microseconds per layer", header, rows, left=5)
    gigabytes = result.device["copy_bandwidth_bytes_per_s"] / 1e9
    typer.echo(f"\n{result.device['name']}: a copy reads and writes {gigabytes:,.1f} GB/s")


def _cells(row: KernelRow) -> tuple[object, ...]:
    latencies = (row.latency_us_p50, row.latency_us_p20, row.latency_us_p80)
    times = ["gate red" if value is None else f"{value:,.1f}" for value in latencies]
    percent = "n/a" if row.pct_copy_bandwidth is None else f"{row.pct_copy_bandwidth:.0f}"
    return (
        row.method, row.phase, row.tree, f"{row.key_heads}/{row.value_heads}", row.state_dtype, row.batch, row.rows,
        row.timer, *times, row.samples, percent, f"{row.rel_err_output:.1e}", f"{row.rel_err_state:.1e}",
    )  # fmt: skip


def _as_dict(row: KernelRow) -> dict[str, Any]:
    from dataclasses import asdict

    values = asdict(row)
    return {name: None if isinstance(value, float) and value != value else value for name, value in values.items()}
