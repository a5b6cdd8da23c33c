"""The `treewy` command: one file per verb; this one gathers them and turns errors into exit codes.

Exit codes: 0 done, 1 a check or comparison failed, 2 unusable input, 3 a needed device or extra is missing.
"""

from __future__ import annotations

import sys

import typer

import lab
from lab.cli import bench, calibrate, compare, doctor, ledger, models, plan, simulate, tree
from lab.errors import exit_code

app = typer.Typer(
    name="treewy",
    help="Kernel lab and serving simulator for Gated DeltaNet hybrids with speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for verb in (doctor, models, tree, ledger, bench, compare, calibrate, simulate, plan):
    app.command(verb.__name__.rpartition(".")[2])(verb.command)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"treewy {lab.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(exit_code(app))
