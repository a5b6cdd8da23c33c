"""Draft trees: shapes, order, masks and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.data import data_path
from lab.errors import UsageError
from lab.trees import DraftTree, parse_tree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any tree of up to 64 rows."""
    rows = draw(st.integers(1, 64))
    return DraftTree((-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows))))


@given(trees())
def test_masks_depths_and_paths_agree(tree: DraftTree) -> None:
    for row in range(len(tree)):
        path = tree.path(row)
        assert path[0] == 0
        assert path[-1] == row
        assert tree.depth[row] == len(path) - 1
        assert tree.ancestor_masks[row] == sum(1 << node for node in path)
    assert sum(tree.width_by_depth) == tree.num_drafts
    assert {node for path in tree.paths() for node in path} == set(range(len(tree)))
    assert tree.is_chain == (len(tree.paths()) == 1 and tree.path(len(tree) - 1) == tuple(range(len(tree))))


@given(trees())
def test_rank_paths_rebuild_the_tree_up_to_row_order(tree: DraftTree) -> None:
    paths = [[tree.rank[node] for node in tree.path(row)[1:]] for row in range(1, len(tree))]
    rebuilt = DraftTree.from_rank_paths(paths)
    assert rebuilt.width_by_depth == tree.width_by_depth
    assert sorted(rebuilt.depth) == sorted(tree.depth)


@pytest.mark.parametrize(("widths", "drafts"), [((1, 1, 1), 3), ((2, 2, 2), 14), ((3, 3, 3), 39)])
def test_widths_give_the_published_node_counts(widths: tuple[int, ...], drafts: int) -> None:
    tree = DraftTree.from_widths(widths)
    assert tree.num_drafts == drafts
    assert tree.num_rows == drafts + 1
    assert tree.max_depth == len(widths)


def test_depth_first_order_keeps_subtrees_together() -> None:
    assert DraftTree.from_widths((2, 1)).parent == (-1, 0, 1, 0, 3)


def test_shipped_medusa_tree_has_63_drafts_and_four_depths() -> None:
    shipped = json.loads(data_path("draft_trees.json").read_text())["medusa:mc_sim_7b_63"]
    tree = DraftTree.from_rank_paths(shipped["paths"])
    assert tree.num_drafts == 63
    assert list(tree.width_by_depth) == list(
        shipped["nodes_per_depth"].values()
        if isinstance(shipped["nodes_per_depth"], dict)
        else shipped["nodes_per_depth"]
    )


def test_text_forms() -> None:
    assert parse_tree("2, 2, 2") == DraftTree.from_widths((2, 2, 2))
    assert parse_tree("[1,1]") == DraftTree.chain(2)
    assert parse_tree("chain:7") == DraftTree.chain(7)
    assert parse_tree("chain:0").num_rows == 1


def test_json_rank_paths(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"paths": [[0], [1], [0, 0]]}')
    assert parse_tree(str(path)).parent == (-1, 0, 0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2,x", "give widths like 2,2,2"),
        ("0,2", "every width must be at least 1"),
        ("4,4,4", "more than 64 rows"),
        ("chain:64", "65 rows"),
        ("missing.json", "cannot be read"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_tree(text)


@pytest.mark.parametrize("content", ["[[0], [1, 0]]", '{"tree": 1}', "[[0.5]]", "[[-1]]", "[[]]"])
def test_bad_rank_paths_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"rank path"):
        parse_tree(str(path))


@pytest.mark.parametrize("parent", [(), (0,), (-1, 1), (-1, -1), (-1, 0, 2)])
def test_rows_that_are_no_tree_are_refused(parent: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        DraftTree(parent)


def test_published_trees_go_by_their_names() -> None:
    assert parse_tree("medusa:mc_sim_7b_63").num_drafts == 63
    with pytest.raises(UsageError, match="shipped are medusa:mc_sim_7b_63"):
        parse_tree("medusa:none")
