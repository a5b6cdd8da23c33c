"""The `treewy` command: one file per verb; this one gathers them and turns errors into exit codes.

Exit codes: 0 done, 1 a check or comparison failed, 2 unusable input, 3 a needed device or extra is missing.
"""

from __future__ import annotations

import sys

import typer

import lab
from lab.cli import bench, calibrate, compare, doctor, ledger, models, plan, simulate, tree
from lab.errors import InterruptedSweepError, MissingError, UsageError

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
    """Run the command line; a known error becomes one sentence on stderr and its exit code."""
    try:
        app()
    except UsageError as error:
        _fail(f"error: {error}", 2)
    except MissingError as error:
        _fail(f"missing: {error}", 3)
    except InterruptedSweepError as error:
        _fail(f"interrupted: {error}", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout is gone; there is nobody to tell
        sys.exit(1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"error: {place}{error.strerror or error}", 2)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)
