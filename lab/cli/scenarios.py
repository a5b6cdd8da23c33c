"""What `simulate` and `plan` share: their options, flags that take the place of a scenario's fields, progress."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from lab.cli.output import JSON_OPTION
from lab.cli.profilenotes import calibration_notes, profile_notes
from lab.errors import InterruptedSweepError, UsageError

#: Where a flag's value goes in the scenario.
PLACES: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "gpu": ("gpu",),
    "tensor_parallel_size": ("tensor_parallel_size",),
    "moe_routing": ("moe_routing",),
    "weight_dtype": ("engine", "weight_dtype"),
    "gpu_memory_utilization": ("engine", "gpu_memory_utilization"),
    "max_num_seqs": ("engine", "max_num_seqs"),
    "max_model_len": ("engine", "max_model_len"),
    "mem_fraction_static": ("engine", "mem_fraction_static"),
    "max_running_requests": ("engine", "max_running_requests"),
    "context_length": ("engine", "context_length"),
    "max_mamba_cache_size": ("engine", "max_mamba_cache_size"),
    "mamba_full_memory_ratio": ("engine", "mamba_full_memory_ratio"),
    "mamba_radix_cache_strategy": ("engine", "mamba_radix_cache_strategy"),
    "state_method": ("speculation", "state_method"),
    "tree": ("speculation", "tree"),
    "trace": ("workload", "trace"),
    "arrivals": ("workload", "arrivals"),
    "request_rate": ("workload", "request_rate"),
    "burstiness": ("workload", "burstiness"),
    "max_concurrency": ("workload", "max_concurrency"),
    "num_requests": ("workload", "num_requests"),
    "seed": ("seed",),
}
#: What a flag adds to the name of a run before its value; the seed and the number of requests do not name a service.
_NAMING = {
    "model": "",
    "gpu": "",
    "tensor_parallel_size": "tp",
    "moe_routing": "",
    "weight_dtype": "",
    "gpu_memory_utilization": "gmu",
    "max_num_seqs": "seqs",
    "max_model_len": "len",
    "mem_fraction_static": "mfs",
    "max_running_requests": "running",
    "context_length": "len",
    "max_mamba_cache_size": "slots",
    "mamba_full_memory_ratio": "ratio",
    "mamba_radix_cache_strategy": "",
    "state_method": "",
    "tree": "tree",
    "trace": "",
    "arrivals": "",
    "request_rate": "rate",
    "burstiness": "burst",
    "max_concurrency": "clients",
}

#: Run the cells of a scenario into a folder: `(raw scenario, out, jobs, resume, seeds, progress)`.
Runner = Callable[[dict[str, Any], Path, int, bool, int, Callable[[int, int], None]], None]


def scenario_command(run: Runner, show: Callable[[Path, bool], None], text: str) -> Callable[..., None]:
    """A verb that takes a scenario: `run` makes the run directory, `show(folder, as_json)` prints what it holds."""

    def command(
        scenario: Path = typer.Argument(help="Scenario file (YAML); lists in it make a sweep."),
        out: Path = typer.Option(None, "--out", help="Run directory to write (default: runs/<name>)."),
        jobs: int = typer.Option(0, "--jobs", min=0, help="Parallel processes (0: one per core)."),
        resume: bool = typer.Option(False, "--resume", help="Continue an interrupted sweep."),
        seeds: int = typer.Option(
            1, "--seeds", min=1, max=1000, help="Run every cell with so many seeds; gives 95 % intervals."
        ),
        as_json: bool = JSON_OPTION,
        model: str = _flag("--model", "A shipped model or the path of a config.json"),
        gpu: str = _flag("--gpu", "h200, b200, h100"),
        tensor_parallel_size: int = _flag("--tensor-parallel-size", "GPUs that share the model"),
        moe_routing: str = _flag("--moe-routing", "power_law_1.2, power_law_1.01, balanced"),
        weight_dtype: str = _flag("--weight-dtype", "bf16, fp8_tensor, fp8_block128"),
        gpu_memory_utilization: float = _flag("--gpu-memory-utilization", "Share of memory, 0 to 1"),
        max_num_seqs: int = _flag("--max-num-seqs", "Most running requests"),
        max_model_len: int = _flag("--max-model-len", "Longest request, tokens"),
        mem_fraction_static: float = _flag("--mem-fraction-static", "Share of memory, 0 to 1", "SGLang"),
        max_running_requests: int = _flag("--max-running-requests", "Most running requests", "SGLang"),
        context_length: int = _flag("--context-length", "Longest request, tokens", "SGLang"),
        max_mamba_cache_size: int = _flag("--max-mamba-cache-size", "State slots", "SGLang"),
        mamba_full_memory_ratio: float = _flag("--mamba-full-memory-ratio", "State pool to KV pool", "SGLang"),
        mamba_radix_cache_strategy: str = _flag(
            "--mamba-radix-cache-strategy", "none, no_buffer, extra_buffer, extra_buffer_lazy", "SGLang"
        ),
        state_method: str = _flag("--state-method", "One state method"),
        tree: str = _flag("--tree", "One draft tree, e.g. 2,2,2"),
        trace: str = _flag("--trace", "A shipped trace or a CSV file"),
        arrivals: str = _flag("--arrivals", "closed-loop, poisson, gamma, constant, trace"),
        request_rate: float = _flag("--request-rate", "Requests per second"),
        burstiness: float = _flag("--burstiness", "Shape of gamma arrivals; below 1 is burstier"),
        max_concurrency: int = _flag("--max-concurrency", "Most requests that the client has in flight"),
        num_requests: int = _flag("--num-requests", "Requests"),
        seed: int = _flag("--seed", "Seed"),
    ) -> None:
        given = locals()
        from simulator.scenario import expand

        raw = load(scenario, {name: given[name] for name in PLACES if given[name] is not None})
        folder = out if out is not None else Path("runs") / str(raw["name"])
        cells = expand(raw)
        for note in (*profile_notes(cells), *calibration_notes(cells)):
            typer.echo(f"warning: {note}", err=True)
        try:
            with progress_bar("simulating") as progress:
                run(raw, folder, jobs or len(os.sched_getaffinity(0)), resume, seeds, progress)
        except KeyboardInterrupt:
            raise InterruptedSweepError(f"{folder} was not written; finished cells are kept: use --resume") from None
        show(folder, as_json)

    command.__doc__ = text
    return command


def _flag(name: str, text: str, engine: str = "") -> Any:
    whose = f" ({engine})" if engine else ""
    return typer.Option(None, name, help=f"{text}; in place of the scenario's{whose}.", rich_help_panel="Scenario")


def load(scenario: Path, flags: Mapping[str, Any], calibrated: bool = True) -> dict[str, Any]:
    """The scenario's mapping with the given flags in place of its fields.

    A flag that makes another service of it (model, GPU, trace, …) is added to its name. A trace takes the place of a
    length distribution; arrivals by a clock take away the closed loop's cap, and the closed loop the clock's rate.
    A calibration is looked up beside the scenario's file, unless `calibrated` is false: nothing will read it.
    """
    from simulator.calibration.file import find_calibration
    from simulator.scenario import read_yaml, replace_fields

    raw = replace_fields(read_yaml(scenario), {PLACES[name]: value for name, value in flags.items()})
    name = raw.setdefault("name", scenario.stem)
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w .+-]{0,99}", name):
        raise UsageError(f"name = {name!r}: letters, digits, spaces and . _ + - are allowed; it names a folder")
    if calibrated and isinstance(raw.get("calibration"), str):
        raw["calibration"] = find_calibration(raw["calibration"], scenario.parent)
    workload = raw.get("workload")
    if isinstance(workload, dict):
        if "trace" in flags:
            workload.pop("lengths", None)
        if flags.get("arrivals", "closed-loop") != "closed-loop" and "max_concurrency" not in flags:
            workload.pop("max_concurrency", None)
        if flags.get("arrivals") == "closed-loop":
            workload.pop("request_rate", None)
        clocked = flags.get("arrivals", "closed-loop") != "closed-loop"
        warmup = workload.get("num_warmup_requests")
        if isinstance(warmup, int) and (clocked or "num_requests" in flags):
            workload["num_warmup_requests"] = 0 if clocked else min(warmup, flags["num_requests"] // 4)
    raw["name"] = "-".join([name, *(_name_part(flag, str(flags[flag])) for flag in _NAMING if flag in flags)])
    return raw


def _name_part(flag: str, value: str) -> str:
    """What a flag adds to the name of a run."""
    if flag in ("model", "trace"):
        path = Path(value)
        value = path.parent.name if path.name == "config.json" else path.name.removesuffix(".csv").removesuffix(".json")
    return _NAMING[flag] + re.sub(r"[^\w.+-]+", "_", value).lower()


@contextmanager
def progress_bar(title: str, unit: str = "cells") -> Iterator[Callable[[int, int], None]]:
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
        TextColumn(f"{unit}, elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(title, total=None)

    def update(done: int, total: int) -> None:
        bar.start()  # not before there is progress: input that cannot be used is told without a bar
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()
