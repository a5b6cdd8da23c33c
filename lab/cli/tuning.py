"""What `treewy bench --tune` does once its flags are read: tune, keep, and say what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from lab.cli.output import print_json, print_table

if TYPE_CHECKING:
    from lab.bench.backend import Backend
    from lab.bench.points import Axes
    from lab.bench.tune import Tuner, TuneResult
    from lab.profiles.plans import PlanRow

#: Plans that a row of the printed table names.
NAMED_PLANS = 3


@dataclass(frozen=True, slots=True)
class TuneJob:
    """What a call tunes and where it goes."""

    tuner: Tuner
    device: str
    axes: Axes
    limit: float | None
    folder: Path | None
    resume: bool
    overwrite: bool


def tuner_on(backend: Backend) -> Tuner:
    """What tunes on the GPU of a CUDA backend; raises `UsageError` for another one."""
    from lab.bench.cuda_backend import CudaBackend
    from lab.bench.cuda_tune import CudaTuner
    from lab.errors import UsageError

    if not isinstance(backend, CudaBackend):
        raise UsageError(f"--tune: backend {backend.name} has one way to run a verification; give --backend cuda")
    return CudaTuner(backend)


def run(job: TuneJob, as_json: bool) -> None:
    """Tune and print."""
    report(job, tune(job), as_json)


def tune(job: TuneJob) -> TuneResult:
    """Run the tuning and save it as it goes; raises `InterruptedSweepError` on Ctrl-C, after saving what there is."""
    from lab.bench.tune import TuneResult, check_plans_target, run_tuning, save_plans, targets, tuning_record
    from lab.cli.scenarios import progress_bar
    from lab.errors import InterruptedSweepError

    wanted, folder = targets(job.axes.points()), job.folder
    result, record = TuneResult(), tuning_record(job.device)
    if folder is not None:
        result.rows = check_plans_target(folder, job.resume, job.overwrite, record)

    def keep() -> None:
        if folder is not None and result.rows:
            save_plans(result.rows.values(), folder, record)

    timings = sum(
        len(target.points) * len(job.tuner.candidates(target.problem))
        for target in wanted
        if target.place not in result.rows
    )
    typer.echo(f"tuning {len(wanted)} places on {job.device}, {timings:,} timings in all …", err=True)
    try:
        with progress_bar("tuning", "places") as progress:
            run_tuning(job.tuner, wanted, result, time_limit_s=job.limit, progress=progress, save=keep)
    except KeyboardInterrupt:
        keep()
        kept = "nothing is kept without --out"
        if folder is not None:
            kept = f"{len(result.rows)} places are kept in {folder}; continue with the same flags and --resume"
        raise InterruptedSweepError(kept if result.rows else "no place was tuned yet") from None
    keep()
    for line in result.skipped:
        typer.echo(f"left out: {line}", err=True)
    if result.left_out:
        rest = "; tune them with the same flags and --resume" if folder is not None else ""
        typer.echo(f"the time limit left {result.left_out} of {len(wanted)} places out{rest}", err=True)
    return result


def report(job: TuneJob, result: TuneResult, as_json: bool) -> None:
    """Print what won where; exits with 1 when nothing was tuned."""
    rows = list(result.rows.values())
    if as_json:
        print_json({"device": job.device, "left_out": result.left_out, "rows": list(map(_as_dict, rows))})
    elif rows:
        header = ("state", "head dim", "rows to", "log to", "log bf16", "places", "fastest plans", "ahead of the next")
        print_table("Fastest ways to cut a verification", header, _summary(rows), left=1)
    if result.gains:
        typer.echo(
            f"the plans taken without a table last {median(result.gains):.2f} times as long in the median of "
            f"{len(result.gains)} places, {max(result.gains):.2f} times at most",
            err=True,
        )
    if not rows:
        why = result.skipped[0] if result.skipped else f"{result.left_out} places left; give a larger --time-limit"
        typer.echo(f"nothing was tuned: {why}", err=True)
        raise typer.Exit(1)
    if job.folder is not None:
        typer.echo(f"wrote {job.folder}", err=True)


def _as_dict(row: PlanRow) -> dict[str, object]:
    values = asdict(row)
    return {**values.pop("place"), **values}


def _summary(rows: Iterable[PlanRow]) -> list[tuple[object, ...]]:
    """One line per size class and type of the log: how often each plan won, and how far ahead in the median."""
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        size = row.place.size_class
        key: tuple[object, ...] = (
            size.state_dtype,
            size.head_dim,
            size.rows,
            size.log_rows,
            "yes" if row.place.log_bf16 else "no",
        )
        groups.setdefault(key, []).append(row)
    lines: list[tuple[object, ...]] = []
    for key, group in sorted(groups.items()):
        won = Counter(row.plan for row in group)
        names = [f"{name} ×{count}" for name, count in won.most_common(NAMED_PLANS)]
        names += [f"{len(won) - NAMED_PLANS} more"] if len(won) > NAMED_PLANS else []
        ahead = median(row.runner_up_us / row.latency_us - 1 for row in group)
        lines.append((*key, len(group), ", ".join(names), f"{ahead:.1%}"))
    return lines
