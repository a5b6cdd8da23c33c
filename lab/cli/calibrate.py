"""`treewy calibrate`: a measured engine result beside the simulated one; with `--fit`, fitted constants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.output import JSON_OPTION, print_json, print_table
from lab.cli.scenarios import PLACES, load

if TYPE_CHECKING:
    from simulator.calibration.compare import Error
    from simulator.calibration.report import Calibration


def command(
    scenario: Path = typer.Argument(help="Scenario file (YAML): the service that was measured."),
    engine_result: list[Path] = typer.Option(
        ...,
        "--engine-result",
        help="Result of `vllm bench serve`, SGLang bench_serving (JSON lines) or a CSV of request times; give it again "
        "for every further load level.",
    ),
    fit: bool = typer.Option(
        False, "--fit", help="Fit the named constants to all results, and leave each load out in turn."
    ),
    constants: str = typer.Option(None, "--constants", help="With --fit: names with commas (default: all that hold)."),
    out: Path = typer.Option(
        None, "--out", help="With --fit: write the constants, for `calibration: FILE` in scenarios."
    ),
    as_json: bool = JSON_OPTION,
    state_method: str = typer.Option(None, "--state-method", help="In place of the scenario's."),
    tree: str = typer.Option(None, "--tree", help="In place of the scenario's."),
    gpu_memory_utilization: float = typer.Option(None, "--gpu-memory-utilization", help="In place of the scenario's."),
    seed: int = typer.Option(None, "--seed", help="In place of the scenario's."),
) -> None:
    """Compare a simulated service with a measured one: error per metric, and with --fit constants that lower it.

    The load (rate, concurrency, lengths and send times where the result is detailed) is the result's own. Fields of the
    result are in the client's units: milliseconds where a name ends in _ms.
    """
    from lab.errors import InterruptedSweepError, UsageError
    from simulator.calibration.constants import DEFAULT_NAMES
    from simulator.calibration.report import calibrate, check_out, write_calibration

    given = locals()
    if not fit and (out is not None or constants is not None):
        raise UsageError("--out and --constants belong to --fit; add --fit, or leave them away")
    flags = {name: given[name] for name in PLACES if given.get(name) is not None}
    names = DEFAULT_NAMES if constants is None else tuple(name.strip() for name in constants.split(","))
    if out is not None:
        check_out(out, names)
    try:
        found = calibrate(load(scenario, flags, calibrated=not fit), engine_result, names if fit else ())
    except KeyboardInterrupt:
        raise InterruptedSweepError("nothing was written") from None
    if out is not None:
        write_calibration(found, out)
        typer.echo(f"wrote {out}", err=True)
    for text in found.notes:
        typer.echo(f"note: {text}", err=True)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def _print(found: Calibration) -> None:
    _errors("measured, and simulated with the scenario's constants", found.errors)
    if found.fit is None:
        return
    typer.echo()
    rows = [[c.name, f"{c.value:.4g}", f"{c.low:.4g} to {c.high:.4g}", f"{c.default:g}"] for c in found.fit.constants]
    print_table("constants", ["constant", "fitted", "95 % interval", "default"], rows)
    typer.echo()
    _errors("measured, and simulated with the fitted constants", found.fit.after)
    if found.left_out:
        typer.echo()
        _errors("each load predicted from the others", found.left_out)


def _errors(title: str, by_level: dict[str, list[Error]]) -> None:
    rows: list[list[Any]] = [
        [level, error.metric, f"{error.measured:.4g}", f"{error.predicted:.4g}", f"{100 * error.relative:+.1f} %"]
        for level, errors in by_level.items()
        for error in errors
    ]
    print_table(title, ["load", "metric", "measured", "simulated", "error"], rows, left=2)
