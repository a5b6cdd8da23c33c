"""What `simulate` and `plan` share: their options, flags that take the place of a scenario's fields, progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from lab.cli.output import JSON_OPTION

#: Where a flag's value goes in the scenario.
PLACES: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "gpu": ("gpu",),
    "tensor_parallel_size": ("tensor_parallel_size",),
    "trace": ("workload", "trace"),
    "num_requests": ("workload", "num_requests"),
    "max_model_len": ("engine", "max_model_len"),
    "seed": ("seed",),
}

#: Run the cells of a scenario into a folder: `(raw scenario, out, jobs, resume, progress)`.
Runner = Callable[[dict[str, Any], Path, int, bool, Callable[[int, int], None]], None]


def scenario_command(run: Runner, show: Callable[[Path, bool], None], text: str) -> Callable[..., None]:
    """A verb that takes a scenario: `run` makes the run directory, `show(folder, as_json)` prints what it holds."""

    def command(
        scenario: Path = typer.Argument(help="Scenario file (YAML); lists in it make a sweep."),
        out: Path = typer.Option(None, "--out", help="Run directory to write (default: runs/<scenario name>)."),
        jobs: int = typer.Option(0, "--jobs", min=0, help="Parallel processes (0: one per core)."),
        resume: bool = typer.Option(False, "--resume", help="Continue an interrupted sweep."),
        model: str = typer.Option(None, "--model", help="In place of the scenario's model."),
        gpu: str = typer.Option(None, "--gpu", help="In place of the scenario's gpu."),
        tensor_parallel_size: int = typer.Option(None, "--tensor-parallel-size", help="In place of the scenario's."),
        trace: str = typer.Option(None, "--trace", help="In place of the workload: a shipped trace or a CSV file."),
        num_requests: int = typer.Option(None, "--num-requests", help="In place of the scenario's."),
        max_model_len: int = typer.Option(None, "--max-model-len", help="In place of the scenario's."),
        seed: int = typer.Option(None, "--seed", help="In place of the scenario's seed."),
        as_json: bool = JSON_OPTION,
    ) -> None:
        flags = {
            "model": model,
            "gpu": gpu,
            "tensor_parallel_size": tensor_parallel_size,
            "trace": trace,
            "num_requests": num_requests,
            "max_model_len": max_model_len,
            "seed": seed,
        }
        raw = load(scenario, flags)
        folder = out if out is not None else Path("runs") / str(raw["name"])
        with progress_bar("simulating") as progress:
            run(raw, folder, jobs or len(os.sched_getaffinity(0)), resume, progress)
        show(folder, as_json)

    command.__doc__ = text
    return command


def load(scenario: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario's mapping with the flags that were given in place of its fields."""
    from simulator.scenario import read_yaml, replace_fields

    chosen = {PLACES[name]: value for name, value in flags.items() if value is not None}
    raw = replace_fields(read_yaml(scenario), chosen)
    if flags.get("trace") is not None:
        raw["workload"].pop("lengths", None)
    raw.setdefault("name", scenario.stem)
    return raw


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left, on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells, elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
