"""`treewy tree`: build a draft tree, draw it, print its figures."""

from __future__ import annotations

import typer

from lab.cli.output import JSON_OPTION, print_json


def command(
    policy: str = typer.Argument(help="Widths per depth (2,2,2), chain:K, or a JSON file of rank paths."),
    acceptance: str = typer.Option("mtp-hybrid", "--acceptance", help="Acceptance preset for the expected lengths."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Build a draft tree, draw it, and print its rows, depth and expected acceptance length."""
    from lab.acceptance import acceptance_from
    from lab.trees import parse_tree

    tree = parse_tree(policy)
    model = acceptance_from(preset=acceptance)
    length = model.acceptance_length(tree)
    figures = {
        "num_rows": tree.num_rows,
        "num_drafts": tree.num_drafts,
        "max_depth": tree.max_depth,
        "width_by_depth": list(tree.width_by_depth),
        "is_chain": tree.is_chain,
        "acceptance": acceptance,
        "acceptance_length": round(length, 4),
    }
    if as_json:
        print_json({**figures, "parent": list(tree.parent), "rank": list(tree.rank)})
        return
    from rich.console import Console
    from rich.tree import Tree

    branches = [Tree("0 (root)")]
    for row in range(1, tree.num_rows):
        branches.append(branches[tree.parent[row]].add(f"{row} (rank {tree.rank[row]})"))
    console = Console(width=100)
    console.print(branches[0])
    for key, value in figures.items():
        typer.echo(f"{key.replace('_', ' ')}: {value}")
