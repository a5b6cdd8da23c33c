"""`treewy bench`: measure the state methods' kernels, or the simulator's own speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.output import JSON_OPTION, print_json, print_table

if TYPE_CHECKING:
    from lab.bench.backend import Backend, Effort
    from lab.bench.points import Axes

#: Flags that say what to measure; --resume without any goes on with what the folder's last run was to measure.
AXES = {"method", "model", "tensor_parallel_size", "state_dtype", "batch", "tree", "phase", "quick"}
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
    out: str = typer.Option(None, "--out", help="Folder for kernels.csv and device.json."),
    profile: str = typer.Option(
        None, "--profile", help="Write a profile that --gpu takes: a name for your own profiles, or a folder with a /."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Keep the rows in the folder; measure what its last run, or the axes given, still lack."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Measure anew into a folder that holds a bench."),
    operator_tables: str = typer.Option(
        None, "--operator-tables", help="h200, b200 or h100: what prices the rest of a model beside this profile."
    ),
    date: str = typer.Option(None, "--date", help="Date to put into device.json (YYYY-MM-DD); none without it."),
    tune: bool = typer.Option(
        False, "--tune", help="Time every way to cut a verification; --out gets the fastest ones as plans.csv (cuda)."
    ),
    profile_error: str = typer.Option(
        None, "--profile-error", help="Print the interpolation error of a profile's grid; measures nothing."
    ),
    simulator: bool = typer.Option(False, "--simulator", help="Measure engine steps per second of the simulator."),
    running: int = typer.Option(None, "--running", min=1, max=4096, help="Running requests (--simulator; 256)."),
    steps: int = typer.Option(None, "--steps", min=1000, help="Engine steps to simulate (--simulator; 1000000)."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Measure the kernels of the state methods, each gated by the float64 oracle before it is timed.

    Prints one row per method, phase and point, and with --out or --profile writes kernels.csv and device.json. Exits
    with 1 when a gate was red or nothing was measured.
    """
    given = {name for name, value in locals().items() if value not in (None, False, [])}
    import shlex

    from lab.cli.measuring import Job, measure, report

    _check_flags(given)
    if simulator:
        _simulator(running or 256, steps or 1_000_000, as_json)
        return
    if profile_error is not None:
        _profile_error(profile_error, as_json)
        return
    folder = _folder(out, profile, operator_tables, date)
    runner = _backend(backend or "cuda", eager)
    if tune:
        from lab.bench.tune import TUNED_METHODS
        from lab.cli import tuning

        tuner, methods = tuning.tuner_on(runner), ",".join(TUNED_METHODS) if method is None else method
        axes = _axes(runner, quick, methods, model, tensor_parallel_size, state_dtype, batch, tree)
        tuning.run(tuning.TuneJob(tuner, runner.device()["name"], axes, time_limit, folder, resume, overwrite), as_json)
        return
    phases = _phases(phase)
    if resume and folder is not None and not given & AXES:
        axes, phases, effort = _last_run(folder, runner)
    else:
        axes = _axes(runner, quick, method, model, tensor_parallel_size, state_dtype, batch, tree)
        effort = _effort(backend, quick)
    again = f"treewy bench --backend {backend} {'--eager ' if eager else ''}"
    again += f"--profile {shlex.quote(profile)}" if profile else f"--out {shlex.quote(out or '')}"
    limit = time_limit or (QUICK_LIMIT_S if quick and backend == "cpu" else None)
    job = Job(runner, axes, phases, effort, limit, folder, resume, overwrite, date, operator_tables, again)
    report(job, measure(job), profile is not None, as_json)


def _check_flags(given: set[str]) -> None:
    """Refuse flags that would be ignored."""
    from lab.errors import UsageError

    if "simulator" in given:
        mode, known = "--simulator", {"simulator", "running", "steps", "as_json"}
    elif "profile_error" in given:
        mode, known = "--profile-error", {"profile_error", "as_json"}
    elif "tune" in given:
        others = {"backend", "tune", "time_limit", "out", "resume", "overwrite", "as_json"}
        mode, known = "--tune", (AXES - {"phase"}) | others
    elif "backend" in given:
        mode, known = "--backend", given - {"running", "steps"}
    else:
        raise UsageError("nothing to measure: give --backend cpu, --backend cuda, --tune or --simulator")
    ignored = sorted(f"--{name.replace('_', '-')}" for name in given - known)
    if ignored:
        raise UsageError(f"{', '.join(ignored)} has no meaning beside {mode}; leave it away")
    if "resume" in given and not given & {"out", "profile"}:
        raise UsageError("--resume needs the folder to continue: --out or --profile")
    if {"resume", "overwrite"} <= given:
        raise UsageError("--resume keeps what --overwrite throws away; give one of them")


def _last_run(folder: Path, backend: Backend) -> tuple[Axes, tuple[str, ...], Effort]:
    """Axes, phases and effort of the last run in a folder, for a --resume that names none."""
    from dataclasses import fields

    from lab.bench.backend import Effort
    from lab.bench.points import Axes
    from lab.bench.results import device_to_continue, earlier_runs
    from lab.errors import UsageError

    runs: Sequence[Mapping[str, Any]] = earlier_runs(device_to_continue(folder))
    try:
        last = runs[-1]
        axes = Axes(
            tuple(last["methods"]), tuple((str(name), int(tp)) for name, tp in last["models"]),
            tuple(last["state_dtypes"]), tuple(last["batches"]), tuple(last["trees"]),
        )  # fmt: skip
        effort = Effort(*(last[field.name] for field in fields(Effort)))
        phases = _phases(",".join(last["phases"]))
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"--resume: {folder} does not say what it measured ({error}); give the axes, such as --method and --batch"
        ) from error
    return axes, phases, effort


def _backend(name: str, eager: bool) -> Backend:
    from lab.errors import UsageError

    if name == "cpu":
        from lab.bench.cpu_backend import CpuBackend

        if eager:
            raise UsageError("--eager is for --backend cuda: a CPU has no graphs, all its times are eager")
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
    from lab.methods.protocol import STATE_DTYPES

    axes = default_axes(backend.name, quick, backend.methods)
    if method is not None:
        methods = _words("--method", method, backend.methods)
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
        axes = replace(axes, state_dtypes=_words("--state-dtype", state_dtype, STATE_DTYPES))
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

    chosen = PHASES if text is None else _words("--phase", text, PHASES)
    for name in chosen:
        if name not in PHASES:
            raise UsageError(f"--phase is '{name}'; allowed are {', '.join(PHASES)}")
    return tuple(phase for phase in PHASES if phase in chosen)


def _folder(out: str | None, profile: str | None, operator_tables: str | None, date: str | None) -> Path | None:
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
    if out is not None and not out.strip():
        raise UsageError(f"--out is '{out}'; the name of a folder is needed")
    if profile is not None:
        return target_folder(profile)
    return Path(out) if out is not None else None


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
    if not errors:
        typer.echo(
            f"{folder} has no step with measured neighbours on both sides; add rows so that a method has three batches "
            "(--batch 1,4,16 --resume) or three sizes of chains or trees",
            err=True,
        )
        raise typer.Exit(1)
    if as_json:
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


def _words(flag: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The words of a list by commas, each once; an empty one is refused with what is allowed."""
    from lab.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{flag} is '{text}'; allowed are {', '.join(allowed)}, by single commas")
    return tuple(dict.fromkeys(words))


def _integers(flag: str, text: str) -> tuple[int, ...]:
    from lab.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} is '{text}'; positive whole numbers by single commas are needed")
    return tuple(dict.fromkeys(map(int, words)))
