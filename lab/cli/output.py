"""How verbs print: tables for people, JSON for programs, both on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

JSON_OPTION = typer.Option(False, "--json", help="Print JSON instead of a table.")


def print_json(value: Any) -> None:
    """Indented JSON on stdout."""
    typer.echo(json.dumps(value, indent=1))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> None:
    """A plain table on stdout: the first `left` columns to the left, numbers to the right; never cut off."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(header, *cells, strict=True)]

    def line(texts: Sequence[str]) -> str:
        parts = [
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(texts, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    if title:
        typer.echo(title)
    typer.echo(line(header))
    typer.echo("  ".join("-" * width for width in widths))
    for row in cells:
        typer.echo(line(row))
