"""The oracle agrees with itself: the closed form equals the recurrence, node by node (INV-1, float64)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.bench.operands import HOSTILE, MILD, WORST_SOLVE, Regime, random_operands, random_states, random_tree
from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.methods.protocol import SessionSpec
from lab.oracle import (
    Log,
    OracleSession,
    Rows,
    ancestor_matrix,
    commit,
    gates,
    normalise,
    path_to,
    prepare,
    sequential,
    tree_wy,
    tree_wy_with_log,
)
from lab.trees import DraftTree

HEADS = LayerHeads(key_heads=1, value_heads=2, key_dim=8, value_dim=8, state_dtype="float32")
REGIMES = {
    "mild": MILD,
    "hostile": HOSTILE,
    "worst-solve": WORST_SOLVE,
    "strong-decay": Regime(decay="strong"),
    "no-decay": Regime(decay="none"),
    "beta-0": Regime(beta_logit=-20.0),
}


def draw(tree: DraftTree, regime: Regime, seed: int) -> tuple[np.ndarray, Rows]:
    rng = np.random.default_rng(seed)
    spec = SessionSpec.for_tree(HEADS, tree, 1)
    state = random_states(spec, 1, rng)[0].astype(np.float64)
    return state, prepare(random_operands(spec, tree.parent_array(), rng, regime), 0)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-12) -> bool:
    return float(np.abs(found - expected).max()) <= tolerance * max(1.0, float(np.abs(expected).max()))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    rows = draw(st.sampled_from([1, 2, 5, 15, 16, 17, 40, 64]))
    return random_tree(np.random.default_rng(draw(st.integers(0, 2**32))), rows)


@settings(max_examples=200, deadline=None)
@given(trees(), st.sampled_from(list(REGIMES)), st.integers(0, 2**32))
def test_inv1_closed_form_equals_the_recurrence(tree: DraftTree, regime: str, seed: int) -> None:
    state, rows = draw(tree, REGIMES[regime], seed)
    outputs, states, u = sequential(state, *rows, tree.parent_array())
    wy_outputs, wy_u, G = tree_wy(state, *rows, tree.mask_array())
    assert close(wy_outputs, outputs)
    assert close(wy_u, u)
    for row in {0, tree.num_rows // 2, tree.num_rows - 1}:
        assert close(commit(state, wy_u, rows.k, G, tree.path(row)), states[row])


@settings(max_examples=100, deadline=None)
@given(trees(), trees(), st.sampled_from(list(REGIMES)), st.integers(0, 2**32))
def test_inv1_log_rows_are_ancestors_of_every_node(before: DraftTree, tree: DraftTree, regime: str, seed: int) -> None:
    """A tree over base and log sees what it would see over the folded state."""
    base, old = draw(before, REGIMES[regime], seed)
    _, u, G = tree_wy(base, *old, before.mask_array())
    path = list(before.path(before.num_rows - 1))
    folded = commit(base, u, old.k, G, path)

    rows = draw(tree, REGIMES[regime], seed + 1)[1]
    expected_outputs, _, expected_u = sequential(folded, *rows, tree.parent_array())
    log = Log(u[path], old.k[path], old.g[path])
    outputs, new_u, new_G = tree_wy_with_log(base, log, *rows, tree.mask_array())
    assert close(outputs, expected_outputs)
    assert close(new_u, expected_u)

    # Log and tree rows together are one path from the base.
    leaf = list(tree.path(tree.num_rows - 1))
    all_u, all_k = np.concatenate([log.u, new_u[leaf]]), np.concatenate([log.k, rows.k[leaf]])
    all_G = np.concatenate([log.g.cumsum(0), new_G[leaf]])
    state = commit(base, all_u, all_k, all_G, list(range(len(all_u))))
    assert close(state, sequential(folded, *rows, tree.parent_array())[1][-1])


@pytest.mark.parametrize("depth", [8, 32, 63])
def test_closed_form_survives_repeated_keys_with_beta_one(depth: int) -> None:
    """The chain on which the Neumann sum loses everything: one key, beta = 1, no decay."""
    tree = DraftTree.chain(depth)
    state, rows = draw(tree, WORST_SOLVE, seed=3)
    rows = rows._replace(k=np.broadcast_to(rows.k[:1], rows.k.shape), beta=np.ones_like(rows.beta))
    outputs, states, u = sequential(state, *rows, tree.parent_array())
    wy_outputs, wy_u, G = tree_wy(state, *rows, tree.mask_array())
    assert close(wy_outputs, outputs)
    assert close(wy_u, u)
    assert close(commit(state, wy_u, rows.k, G, tree.path(depth)), states[-1])


def test_siblings_do_not_see_each_other() -> None:
    star = DraftTree((-1, 0, 0, 0))
    state, rows = draw(star, MILD, seed=5)
    outputs, _, _ = tree_wy(state, *rows, star.mask_array())
    for row in (1, 2, 3):
        alone = Rows(*(field[[0, row]] for field in rows))
        assert close(outputs[row], sequential(state, *alone, np.array([-1, 0]))[0][1])


def test_ancestor_matrix_reads_all_64_bits() -> None:
    matrix = ancestor_matrix(DraftTree.chain(63).mask_array())
    assert (matrix == np.tri(64, dtype=bool)).all()


def test_gates_follow_the_engines() -> None:
    a, b = np.array([[-2.0, 0.5, 21.0]]), np.array([[0.0, 50.0, -50.0]])
    A_log, dt_bias = np.array([0.0, np.log(2.0), 0.0]), np.array([1.0, 0.0, 0.5])
    g, beta = gates(a, b, A_log, dt_bias)
    assert g[0] == pytest.approx([-np.log1p(np.exp(-1.0)), -2 * np.log1p(np.exp(0.5)), -21.5], rel=1e-15)
    assert beta[0] == pytest.approx([0.5, 1.0, 0.0], abs=1e-15)


def test_norm_adds_eps_to_the_sum_inside_the_root() -> None:
    assert normalise(np.array([3.0, 4.0]), eps=11.0) == pytest.approx([0.5, 4 / 6])
    assert (normalise(np.zeros(4)) == 0).all()


def test_q_is_scaled_after_the_norm() -> None:
    _, rows = draw(DraftTree.chain(3), MILD, seed=1)
    assert np.linalg.norm(rows.q, axis=-1) == pytest.approx(8**-0.5, rel=1e-5)
    assert np.linalg.norm(rows.k, axis=-1) == pytest.approx(1.0, rel=1e-5)


def test_path_to_nothing_is_empty() -> None:
    assert path_to(np.array([-1, 0, 1]), -1) == []
    assert path_to(np.array([-1, 0, 0, 2]), 3) == [0, 2, 3]


def test_oracle_session_commits_the_accepted_row_and_leaves_padding_alone() -> None:
    rng = np.random.default_rng(2)
    tree = DraftTree.from_widths((2, 2))
    spec = SessionSpec.for_tree(HEADS, tree, batch=3)
    states = random_states(spec, 4, rng)
    session = OracleSession(spec, states, [2, -1, 0])
    operands = random_operands(spec, tree.parent_array(), rng)
    outputs = session.verify(operands)
    session.commit(np.array([4, 6, -1]))

    expected = sequential(states[2].astype(np.float64), *prepare(operands, 0), tree.parent_array())
    assert close(outputs[0], expected[0])
    assert np.isnan(outputs[1]).all()
    assert close(session.materialise_exact(0), expected[1][4])
    assert (session.pool[[0, 1, 3]] == states[[0, 1, 3]]).all(), "an empty commit and other slots change nothing"
    with pytest.raises(UsageError, match="padding"):
        session.materialise(1)
