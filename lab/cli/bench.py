"""`treewy bench`: measure. So far the simulator's own speed; kernels follow."""

from __future__ import annotations

import typer

from lab.cli.output import JSON_OPTION, print_json, print_table


def command(
    simulator: bool = typer.Option(False, "--simulator", help="Measure engine steps per second of the simulator."),
    running: int = typer.Option(256, "--running", min=1, max=4096, help="Running requests."),
    steps: int = typer.Option(1_000_000, "--steps", min=1000, help="Engine steps to simulate."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Measure the simulator's speed on one core: `treewy bench --simulator`."""
    from lab.errors import UsageError

    if not simulator:
        raise UsageError("nothing to measure: give --simulator")
    from simulator.speed import measure_speed

    typer.echo(f"simulating {steps:,} engine steps with {running} running requests …", err=True)
    result = measure_speed(running, steps)
    if as_json:
        print_json(result)
        return
    print_table("", ("figure", "value"), [(key.replace("_", " "), f"{value:,}") for key, value in result.items()])
