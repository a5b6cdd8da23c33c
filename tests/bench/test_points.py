"""The axes of a bench and the points they span."""

from __future__ import annotations

import pytest

from kernels_cupy.steps import Shape
from lab.bench.points import CHAINS, TREES, Axes, default_axes, unique_trees
from lab.errors import UsageError
from lab.methods import METHODS

ALL = tuple(METHODS)


def axes(**changed: object) -> Axes:
    values: dict[str, object] = {
        "methods": ALL, "models": (("Qwen3.5-35B-A3B", 1),), "state_dtypes": ("float32",), "batches": (1, 4),
        "trees": ("chain:0", "1,1,1", "2,2,2"),
    } | changed  # fmt: skip
    return Axes(**values)  # type: ignore[arg-type]


def test_every_method_meets_only_trees_that_it_verifies() -> None:
    found = {(point.method, point.tree_text) for point in axes().points()}
    assert {tree for method, tree in found if method == "recurrent"} == {"chain:0"}
    assert {tree for method, tree in found if method == "replayssm"} == {"chain:0", "chain:3"}
    assert {tree for method, tree in found if method == "treelog"} == {"chain:0", "chain:3", "2,2,2"}


def test_equal_heads_count_once_and_tensor_parallelism_divides_them() -> None:
    models = (("Qwen3.5-35B-A3B", 1), ("Qwen3.6-35B-A3B", 1), ("Qwen3.5-397B-A17B", 8))
    found = axes(methods=("treelog",), models=models, batches=(1,), trees=("2,2,2",)).points()
    assert [(point.heads.key_heads, point.heads.value_heads) for point in found] == [(16, 32), (2, 8)]


def test_a_chain_has_one_name_whatever_its_text() -> None:
    assert list(unique_trees(["1,1,1", "chain:3", "(2, 2)", "chain:0"])) == ["chain:3", "2,2", "chain:0"]


def test_the_profile_grid_covers_1_to_64_rows() -> None:
    trees = unique_trees((*CHAINS, *TREES))
    assert [tree.num_rows for tree in trees.values()] == [1, 2, 4, 8, 16, 15, 16, 32, 40, 64]
    full = default_axes("cuda", False, ALL)
    assert full.batches[0] == 1
    assert full.batches[-1] == 512
    heads = {(point.heads.key_heads, point.heads.value_heads) for point in full.points()}
    assert heads == {(16, 32), (16, 48), (16, 64), (2, 8)}


def test_rows_committed_are_those_that_the_kernels_step_assumes() -> None:
    for point in axes(trees=("chain:0", "chain:1", "chain:3", "chain:7", "2,2,2", "5,1", "3,4,4")).points():
        shape = Shape(point.method, point.heads, point.batch, point.tree)
        assert point.rows_committed == shape.rows_committed, point


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state_dtypes": ("int4",)}, "--state-dtype is 'int4'; allowed are float32, bfloat16"),
        ({"methods": ("magic",)}, "state_method is 'magic'"),
        ({"batches": (0,)}, "--batch is 0"),
        ({"models": (("Qwen3.5-35B-A3B", 5),)}, "tensor_parallel_size"),
        ({"models": (("Kimi-Linear-48B-A3B", 1),)}, "a gate per key channel"),
        ({"methods": ("recurrent",), "trees": ("2,2",)}, "no method of recurrent verifies a tree of 2,2"),
    ],
)
def test_axes_that_make_no_sense_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        axes(**changed).points()
