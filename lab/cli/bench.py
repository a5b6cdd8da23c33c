"""`treewy bench`: measure the state methods' kernels, or the simulator's own speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.output import JSON_OPTION, print_json, print_table

if TYPE_CHECKING:
    from lab.bench.backend import Backend, Effort
    from lab.bench.points import Axes
    from lab.bench.results import BenchResult
    from lab.profiles.rows import KernelRow

#: A quick run on a CPU stops by itself before this many seconds and says what it left out.
QUICK_LIMIT_S = 40.0


def command(
    backend: str = typer.Option(None, "--backend", help="cpu (Numba, any machine) or cuda (an NVIDIA GPU and CuPy)."),
    method: str = typer.Option(None, "--method", help="State methods, by commas (default: all of the backend)."),
    model: list[str] = typer.Option(
        None, "--model", help="Model whose recurrent heads to use; a shipped name or a config.json. Repeatable."
    ),
    tensor_parallel_size: str = typer.Option(None, "--tensor-parallel-size", help="Sizes, by commas (1)."),
    state_dtype: str = typer.Option(None, "--state-dtype", help="float32, bfloat16, or both by a comma."),
    batch: str = typer.Option(None, "--batch", help="Requests, by commas, e.g. 1,32,256."),
    tree: list[str] = typer.Option(None, "--tree", help="Draft tree: 1,1,1, 2,2,2, chain:0, binary:15, … Repeatable."),
    phase: str = typer.Option(None, "--phase", help="verify, commit, flush, step, by commas (default: all)."),
    eager: bool = typer.Option(False, "--eager", help="Also time launches without a CUDA graph (cuda)."),
    quick: bool = typer.Option(False, "--quick", help="A small grid with short timings; under a minute on a CPU."),
    time_limit: float = typer.Option(None, "--time-limit", min=1, help="Stop after so many seconds, whatever is left."),
    out: Path = typer.Option(None, "--out", help="Folder for kernels.csv and device.json."),
    profile: str = typer.Option(
        None, "--profile", help="Write a profile that --gpu takes: a name for your own profiles, or a folder with a /."
    ),
    resume: bool = typer.Option(False, "--resume", help="Keep the rows that the folder holds; measure the others."),
    operator_tables: str = typer.Option(
        None, "--operator-tables", help="h200, b200 or h100: what prices the rest of a model beside this profile."
    ),
    date: str = typer.Option(None, "--date", help="Date to put into device.json (YYYY-MM-DD); none without it."),
    profile_error: str = typer.Option(
        None, "--profile-error", help="Print the interpolation error of a profile's grid; measures nothing."
    ),
    simulator: bool = typer.Option(False, "--simulator", help="Measure engine steps per second of the simulator."),
    running: int = typer.Option(256, "--running", min=1, max=4096, help="Running requests (--simulator)."),
    steps: int = typer.Option(1_000_000, "--steps", min=1000, help="Engine steps to simulate (--simulator)."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Measure the kernels of the state methods, each gated by the float64 oracle before it is timed.

    Prints one row per method, phase and point, and with --out or --profile writes kernels.csv and device.json. Exits
    with 1 when a gate was red.
    """
    from lab.errors import UsageError

    if simulator:
        _simulator(running, steps, as_json)
        return
    if profile_error is not None:
        _profile_error(profile_error, as_json)
        return
    if backend is None:
        raise UsageError("nothing to measure: give --backend cpu, --backend cuda or --simulator")
    folder = _folder(out, profile, operator_tables, date)
    if resume and folder is None:
        raise UsageError("--resume needs the folder to continue: --out or --profile")
    runner = _backend(backend, eager)
    axes = _axes(runner, quick, method, model, tensor_parallel_size, state_dtype, batch, tree)
    phases = _phases(phase)
    effort = _effort(backend, quick)
    limit = time_limit or (QUICK_LIMIT_S if quick and backend == "cpu" else None)
    result = _measure(runner, axes, phases, effort, limit, folder, resume, date, operator_tables)
    if as_json:
        print_json({"device": result.record(), "rows": [_as_dict(row) for row in result.rows]})
    else:
        _print(result)
    if folder is not None:
        typer.echo(f"wrote {folder}", err=True)
    for line in result.red:
        typer.echo(f"red: {line}", err=True)
    if result.red:
        raise typer.Exit(1)


def _measure(
    backend: Backend,
    axes: Axes,
    phases: Sequence[str],
    effort: Effort,
    limit: float | None,
    folder: Path | None,
    resume: bool,
    date: str | None,
    operator_tables: str | None,
) -> BenchResult:
    from dataclasses import asdict

    from lab.bench.harness import run_bench
    from lab.bench.results import check_target, continue_from, new_result, save
    from lab.cli.scenarios import progress_bar

    points = axes.points()
    result = new_result(backend, {**asdict(axes), "phases": list(phases), **asdict(effort)}, date, operator_tables)
    keep: Callable[[], None] = lambda: None  # noqa: E731
    if folder is not None:
        check_target(folder)
        target = folder
        if resume:
            continue_from(folder, result)

        def keep() -> None:
            save(result, target)

    typer.echo(f"measuring {len(points)} points on {result.device['name']} …", err=True)
    _warn_if_busy(result)
    with progress_bar("measuring", "points") as progress:
        run_bench(
            backend, points, result, effort=effort, phases=phases, time_limit_s=limit, progress=progress, save=keep
        )  # fmt: skip
    keep()
    for line in result.skipped:
        typer.echo(f"left out: {line}", err=True)
    if result.left_out:
        typer.echo(f"the time limit left {result.left_out} points out; --resume measures them", err=True)
    if result.device.get("throttled"):
        typer.echo("warning: the GPU lowered its clock during the run; see clocks in device.json", err=True)
    return result


def _backend(name: str, eager: bool) -> Backend:
    from lab.errors import UsageError

    if name == "cpu":
        from lab.bench.cpu_backend import CpuBackend

        return CpuBackend()
    if name == "cuda":
        from lab.bench.cuda_backend import CudaBackend

        return CudaBackend(eager)
    raise UsageError(f"--backend is '{name}'; allowed are cpu, cuda")


def _axes(
    backend: Backend,
    quick: bool,
    method: str | None,
    model: Sequence[str] | None,
    tensor_parallel_size: str | None,
    state_dtype: str | None,
    batch: str | None,
    tree: Sequence[str] | None,
) -> Axes:
    """The default axes with the flags that were given in their place."""
    from dataclasses import replace

    from lab.bench.points import default_axes
    from lab.errors import UsageError
    from lab.methods import get_method

    axes = default_axes(backend.name, quick, backend.methods)
    if method is not None:
        methods = _words(method)
        for name in methods:
            get_method(name)
            if name not in backend.methods:
                known = ", ".join(backend.methods)
                raise UsageError(f"--method is '{name}', which backend {backend.name} does not run; it runs {known}")
        axes = replace(axes, methods=methods)
    if model or tensor_parallel_size is not None:
        models = list(model) if model else list(dict.fromkeys(name for name, _ in axes.models))
        sizes = _integers("--tensor-parallel-size", tensor_parallel_size or "1")
        axes = replace(axes, models=tuple((name, size) for name in models for size in sizes))
    if state_dtype is not None:
        axes = replace(axes, state_dtypes=_words(state_dtype))
    if batch is not None:
        axes = replace(axes, batches=_integers("--batch", batch))
    if tree:
        axes = replace(axes, trees=tuple(tree))
    return axes


def _effort(backend: str, quick: bool) -> Effort:
    from lab.bench.backend import Effort

    if backend == "cuda":  # the layers' buffers follow from the cache
        return Effort(0.01, 0.01, 9, 0) if quick else Effort(0.003, 0.05, 9, 0)
    return Effort(0.01, 0.2, 9, 64 << 20) if quick else Effort()


def _phases(text: str | None) -> tuple[str, ...]:
    from lab.errors import UsageError
    from lab.profiles.rows import PHASES

    chosen = PHASES if text is None else _words(text)
    for name in chosen:
        if name not in PHASES:
            raise UsageError(f"--phase is '{name}'; allowed are {', '.join(PHASES)}")
    return tuple(phase for phase in PHASES if phase in chosen)


def _folder(out: Path | None, profile: str | None, operator_tables: str | None, date: str | None) -> Path | None:
    import datetime

    from lab.errors import UsageError
    from lab.profiles.folders import GPU_NAMES, target_folder

    if operator_tables is not None and operator_tables not in GPU_NAMES:
        raise UsageError(f"--operator-tables is '{operator_tables}'; allowed are {', '.join(GPU_NAMES)}")
    if date is not None:
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            raise UsageError(f"--date is '{date}'; a date such as 2026-11-29 is needed") from None
    if out is not None and profile is not None:
        raise UsageError("--out and --profile both say where to write; give one of them")
    return target_folder(profile) if profile is not None else out


def _warn_if_busy(result: BenchResult) -> None:
    load = result.device.get("load_average")
    if load and load[0] > 0.5 * result.device["cores"]:
        typer.echo(f"note: the machine is busy (load {load[0]} on {result.device['cores']} cores)", err=True)


def _print(result: BenchResult) -> None:
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


def _profile_error(gpu: str, as_json: bool) -> None:
    from dataclasses import asdict

    from lab.errors import UsageError
    from lab.profiles.folders import find_profile
    from lab.profiles.kernels import interpolation_errors, load_profile

    folder = find_profile(gpu)
    if folder is None:
        raise UsageError(f"--profile-error {gpu}: no such profile; treewy doctor lists those that are there")
    errors = interpolation_errors(load_profile(folder))
    if as_json:
        print_json([asdict(error) for error in errors])
        return
    if not errors:
        typer.echo("no point of the grid has measured neighbours on both sides")
        return
    rows = [(e.axis, e.points, f"{e.median:.2%}", f"{e.worst:.2%}", e.worst_at) for e in errors]
    title = "Interpolation error of measured points, each left out and guessed from its neighbours"
    print_table(title, ("axis", "points", "median", "worst", "worst at"), rows)


def _simulator(running: int, steps: int, as_json: bool) -> None:
    from simulator.speed import measure_speed

    typer.echo(f"simulating {steps:,} engine steps with {running} running requests …", err=True)
    result = measure_speed(running, steps)
    if as_json:
        print_json(result)
        return
    print_table("", ("figure", "value"), [(key.replace("_", " "), f"{value:,}") for key, value in result.items()])


def _as_dict(row: KernelRow) -> dict[str, Any]:
    from dataclasses import asdict

    values = asdict(row)
    return {name: None if isinstance(value, float) and value != value else value for name, value in values.items()}


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _integers(flag: str, text: str) -> tuple[int, ...]:
    from lab.errors import UsageError

    words = _words(text)
    if not words or not all(word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} is '{text}'; positive whole numbers by commas are needed")
    return tuple(map(int, words))
