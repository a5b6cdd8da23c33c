"""`treewy compare`: two benches or two runs, row by row."""

from __future__ import annotations

from pathlib import Path

import typer

from lab.cli.output import JSON_OPTION, print_json, print_table


def command(
    a: Path = typer.Argument(
        help="The old result: a bench folder or profile (kernels.csv), or a run directory (summary.csv)."
    ),
    b: Path = typer.Argument(help="The new result, of the same kind."),
    fail_on: str = typer.Option(None, "--fail-on", help="slower: exit with 1 when a row is slower in B."),
    tolerance: float = typer.Option(2.0, "--tolerance", min=0, max=100, help="Difference that does not matter, %."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Compare two results: SAME, FASTER, SLOWER or AMBIGUOUS per row; rows that one side lacks are listed.

    Benches are judged by their medians and the spread between the 20th and 80th percentile; a run's cells by output
    throughput, mean TTFT and mean TPOT. The ratio is time in B over time in A.
    """
    from dataclasses import asdict

    from lab.bench.compare import compare
    from lab.errors import UsageError

    if fail_on not in (None, "slower"):
        raise UsageError(f"--fail-on is '{fail_on}'; allowed is slower")
    result = compare(a, b, tolerance / 100)
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        record = asdict(result)
        record["rows"] = [row.to_json(result.columns) for row in result.rows]
        for side in ("only_a", "only_b"):
            record[side] = [dict(zip(result.columns, key, strict=True)) for key in getattr(result, side)]
        print_json(record)
    else:
        rows = [
            (*row.key, row.verdict, "-" if row.ratio is None else f"{row.ratio:.3f}", row.note) for row in result.rows
        ]
        print_table("", (*result.columns, "verdict", "ratio", "change"), rows, left=len(result.columns) + 1)
        for side, keys in (("A", result.only_a), ("B", result.only_b)):
            for key in keys:
                typer.echo(f"only in {side}: {', '.join(map(str, key))}")
        counts = [f"{result.count(verdict)} {verdict}" for verdict in ("SAME", "FASTER", "SLOWER", "AMBIGUOUS")]
        typer.echo(", ".join(counts), err=True)
    if fail_on == "slower" and result.any_worse:
        raise typer.Exit(1)
