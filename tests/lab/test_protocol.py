"""Specs and operands are checked at the edge: one sentence that names the field, the value and what is
allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.bench.operands import random_operands
from lab.bf16 import from_bits, round_bf16, to_bits
from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.methods.protocol import SessionSpec, check_state_indices, path_lengths
from lab.trees import DraftTree

HEADS = LayerHeads(2, 4, 8, 8, "float32")
TREE = DraftTree.from_widths((2, 1))
SPEC = SessionSpec.for_tree(HEADS, TREE, batch=2)
LIVE = np.array([True, True])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": replace(HEADS, state_dtype="float16")}, "state_dtype is 'float16'"),
        ({"heads": replace(HEADS, value_heads=3)}, "value_heads = 3"),
        ({"batch": 0}, "batch = 0"),
        ({"rows": 65, "max_path": 0}, "rows = 65"),
        ({"rows": 0, "max_path": 0}, "rows = 0"),
        ({"max_path": 6}, "max_path = 6"),
        ({"log_rows": -1}, "log_rows = -1"),
        ({"batch": 2.0}, r"batch = 2\.0; a whole number from 1"),
        ({"batch": True}, "batch = True; a whole number from 1"),
        ({"rows": 5.5}, r"rows = 5\.5; a whole number from 1"),
        ({"max_path": -1}, "max_path = -1; a whole number from 0"),
        ({"log_rows": 16.0}, r"log_rows = 16\.0"),
        ({"norm_eps": float("inf")}, "norm_eps = inf; a finite number"),
        ({"norm_eps": float("nan")}, "norm_eps = nan"),
        ({"norm_eps": True}, "norm_eps = True"),
        ({"chain": 1}, "chain = 1; allowed are True and False"),
        ({"chain": True}, "max_path = 3; a chain of 5 rows is a path of as many"),
        ({"heads": replace(HEADS, key_heads=0)}, "key_heads = 0; a whole number from 1"),
        ({"heads": replace(HEADS, key_dim=0)}, "key_dim = 0; a whole number from 1"),
        ({"heads": replace(HEADS, value_dim=-8)}, "value_dim = -8"),
        ({"heads": replace(HEADS, value_heads=4.0)}, r"value_heads = 4\.0"),
    ],
)
def test_spec_names_what_no_kernel_supports(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(SPEC, **change)


def test_spec_takes_its_sizes_from_the_tree() -> None:
    assert (SPEC.rows, SPEC.max_path, SPEC.chain, SPEC.group) == (5, 3, False, 2)
    assert SessionSpec.for_tree(HEADS, DraftTree.chain(3), 1).chain
    assert SessionSpec(HEADS, 1, rows=1).chain
    assert SessionSpec(HEADS, 1, rows=7).max_path == 7


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("k", np.zeros((2, 5, 4, 8)), "operand k has shape"),
        ("A_log", np.zeros(3), "operand A_log has shape"),
        ("parent", np.zeros(4, np.int32), "operand parent has shape"),
    ],
)
def test_operands_name_the_array_of_the_wrong_shape(field: str, value: np.ndarray, message: str) -> None:
    operands = random_operands(SPEC, TREE.parent_array(), np.random.default_rng(0))
    with pytest.raises(UsageError, match=message):
        replace(operands, **{field: value}).check_shapes(SPEC)


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ([0, 0, 0, 1, 2], "-1 for row 0"),
        ([-1, 1, 0, 1, 2], "smaller row"),
        ([-1, -1, 0, 1, 2], "smaller row"),
        ([-1, 0, 1, 2, 3], "path of 5 rows"),
    ],
)
def test_operands_reject_parents_that_are_no_tree_or_too_deep(parent: list[int], message: str) -> None:
    operands = random_operands(SPEC, np.array(parent, np.int32), np.random.default_rng(0))
    with pytest.raises(UsageError, match=message):
        operands.check_values(SPEC, LIVE)


def test_chain_sessions_reject_trees() -> None:
    spec = replace(SPEC, chain=True, max_path=0)
    operands = random_operands(spec, TREE.parent_array(), np.random.default_rng(0))
    with pytest.raises(UsageError, match="not a chain"):
        operands.check_values(spec, LIVE)


@pytest.mark.parametrize("field", ["q", "k", "v", "a", "b", "A_log", "dt_bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_operands_reject_numbers_that_are_not_finite(field: str, value: float) -> None:
    operands = random_operands(SPEC, TREE.parent_array(), np.random.default_rng(0))
    getattr(operands, field)[-1] = value
    with pytest.raises(UsageError, match=f"operand {field} holds NaN"):
        operands.check_values(SPEC, LIVE)


def test_padding_may_hold_anything() -> None:
    operands = random_operands(SPEC, TREE.parent_array(), np.random.default_rng(0))
    operands.q[1] = np.nan
    operands.check_values(SPEC, np.array([True, False]))


def test_state_indices_are_slots_of_their_own() -> None:
    assert check_state_indices([3, -1, 0], slots=4, batch=3).tolist() == [3, -1, 0]
    with pytest.raises(UsageError, match="slot 4"):
        check_state_indices([4], slots=4, batch=1)
    with pytest.raises(UsageError, match="twice"):
        check_state_indices([1, 1], slots=4, batch=2)
    with pytest.raises(UsageError, match="shape"):
        check_state_indices([1, 2], slots=4, batch=3)
    with pytest.raises(UsageError, match="state_indices holds float64; whole numbers"):
        check_state_indices([0.9, 1.2, 2.0], slots=4, batch=3)
    with pytest.raises(UsageError, match="state_indices holds bool"):
        check_state_indices([True], slots=4, batch=1)
    with pytest.raises(UsageError, match="numbers of int32 are needed"):
        check_state_indices([2**32 + 1], slots=4, batch=1)


def test_parents_are_whole_numbers() -> None:
    operands = random_operands(SPEC, TREE.parent_array(), np.random.default_rng(0))
    halves = replace(operands, parent=np.array([-1, 0.5, 0.5, 1, 2]))
    with pytest.raises(UsageError, match="operand parent holds float64; whole numbers"):
        halves.check_values(SPEC, LIVE)


def test_path_lengths_count_the_root() -> None:
    assert path_lengths(np.array([[-1, 0, 0, 1, 3]], np.int32)).tolist() == [[1, 2, 2, 3, 4]]


def test_bf16_rounds_to_nearest_even() -> None:
    """8 significant bits: 1 + 2^-8 lies half way and goes to the even neighbour; larger magnitudes overflow
    to infinity."""
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3.4e38, np.inf, np.nan, 0.0])
    expected = [1.0, 1.0, 1 + 2**-6, -1 - 2**-7, np.inf, np.inf, np.nan, 0.0]
    np.testing.assert_array_equal(round_bf16(values), np.array(expected, np.float32))
    bits = np.arange(0, 0x7F80, 7, dtype=np.uint16)
    np.testing.assert_array_equal(to_bits(from_bits(bits)), bits)
