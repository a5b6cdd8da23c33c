"""INV-1 on the CPU backend: outputs and committed states of every method equal the oracle's over several
steps."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from beside_oracle import random_steps, run_beside_oracle

from lab.bench.operands import (
    HOSTILE,
    MILD,
    WORST_SOLVE,
    Regime,
    random_operands,
    random_states,
    random_tree,
)
from lab.bench.reference import relative_error
from lab.cpu import SESSIONS
from lab.cpu.log_sessions import ReplaySSMSession, TreeLogSession, TreeWYSession, ancestor_masks
from lab.errors import UsageError
from lab.methods import METHODS
from lab.methods.base import LayerHeads
from lab.methods.protocol import SessionSpec
from lab.oracle import OracleSession
from lab.trees import DraftTree

TREE_METHODS = [name for name in SESSIONS if METHODS[name].topology == "tree"]
DECODE_METHODS = [name for name in SESSIONS if METHODS[name].topology == "decode"]
#: Relative error against float64 by state type; records of `replayssm` are bfloat16 whatever the state.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
REGIMES = {
    "mild": MILD,
    "hostile": HOSTILE,
    "worst-solve": WORST_SOLVE,
    "strong-decay": Regime(decay="strong"),
    "no-decay": Regime(decay="none"),
    "beta-0": Regime(beta_logit=-20.0),
    "beta-1": Regime(beta_logit=20.0),
}


def spec_for(method: str, batch: int, rows: int, dtype: str = "float32", group: int = 2) -> SessionSpec:
    if method in DECODE_METHODS:
        rows = 1
    heads = LayerHeads(2, 2 * group, 64, 64, dtype)
    return SessionSpec(heads, batch, rows, chain=method == "replayssm")


def steps_for(method: str) -> int:
    """Enough steps for a flush: a decoding log of 16 rows fills by one row a step."""
    return 20 if method in DECODE_METHODS else 8


def tolerance(method: str, dtype: str) -> float:
    return TOLERANCE["bfloat16" if method == "replayssm" else dtype]


def check(method: str, spec: SessionSpec, indices: list[int], steps: int, regime: Regime, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    states = random_states(spec, spec.batch + 1, rng)
    session, oracle = SESSIONS[method](spec, states, indices), OracleSession(spec, states, indices)
    todo = random_steps(spec, rng, steps, regime, empty_commits=method != "recurrent")
    errors = run_beside_oracle({method: session}, oracle, todo)[method]
    limit = tolerance(method, spec.heads.state_dtype)
    assert errors.output.max() <= limit
    assert errors.state.max() <= limit
    session.flush()
    for request in np.flatnonzero(np.array(indices) >= 0).tolist():
        assert relative_error(session.materialise(request), oracle.materialise_exact(request)) <= limit


def test_every_method_of_the_lab_but_lumotree_runs_here() -> None:
    assert set(METHODS) - set(SESSIONS) == {"lumotree"}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("method", SESSIONS)
def test_inv1_every_method_equals_the_oracle_in_every_regime(method: str, regime: str) -> None:
    check(method, spec_for(method, batch=3, rows=7), [2, 0, 3], steps_for(method), regime=REGIMES[regime])


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 40, 64])
@pytest.mark.parametrize("method", [name for name in SESSIONS if name not in DECODE_METHODS])
def test_inv1_every_number_of_rows(method: str, rows: int) -> None:
    check(method, spec_for(method, batch=1, rows=rows), [1], steps=5, regime=HOSTILE, seed=rows)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("method", SESSIONS)
def test_inv1_every_head_grouping(method: str, group: int) -> None:
    check(method, spec_for(method, batch=2, rows=5, group=group), [0, 1], steps=4, regime=MILD, seed=group)


@pytest.mark.parametrize("method", SESSIONS)
def test_inv1_bf16_states(method: str) -> None:
    check(method, spec_for(method, batch=3, rows=6, dtype="bfloat16"), [0, 3, 1], steps_for(method), regime=MILD)


@pytest.mark.parametrize("method", SESSIONS)
def test_inv1_heads_of_128(method: str) -> None:
    spec = spec_for(method, batch=1, rows=16)
    heads = LayerHeads(2, 6, 128, 128, "float32")
    spec = SessionSpec(heads, 1, spec.rows, chain=spec.chain)
    check(method, spec, [1], steps=6, regime=MILD)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inv1_storeall_on_chains_and_trees(dtype: str, chain: bool) -> None:
    heads = LayerHeads(2, 4, 64, 64, dtype)
    check("storeall", SessionSpec(heads, 3, 5, chain=chain), [1, 0, 2], steps=20, regime=MILD)


@pytest.mark.parametrize("method", SESSIONS)
def test_padding_is_skipped_and_other_slots_stay_untouched(method: str) -> None:
    spec = spec_for(method, batch=3, rows=5)
    rng = np.random.default_rng(4)
    states = random_states(spec, 5, rng)
    session = SESSIONS[method](spec, states, [4, -1, 2])
    for operands, accepted in random_steps(spec, rng, 25, empty_commits=False):
        operands.v[1] = np.nan
        outputs = session.verify(operands)
        assert np.isnan(outputs[1]).all(), "padding outputs are not written"
        assert np.isfinite(outputs[[0, 2]]).all(), "outputs start as NaN and every live one is written"
        session.commit(np.where([True, False, True], accepted, 99))
    session.flush()
    assert (session.pool[[0, 1, 3]] == states[[0, 1, 3]]).all()
    with pytest.raises(UsageError, match="padding"):
        session.materialise(1)


@pytest.mark.parametrize("method", [name for name in SESSIONS if name != "recurrent"])
def test_empty_commits_change_nothing(method: str) -> None:
    spec = spec_for(method, batch=1, rows=6)
    rng = np.random.default_rng(5)
    session = SESSIONS[method](spec, random_states(spec, 1, rng), [0])
    steps = list(random_steps(spec, rng, 6, empty_commits=False))
    for operands, accepted in steps:
        session.verify(operands)
        session.commit(accepted)
    before, operands = session.materialise(0), steps[0][0]
    outputs = session.verify(operands).copy()
    for _ in range(3):
        session.commit(np.array([-1]))
        again = session.verify(operands)
        np.testing.assert_allclose(again, outputs, rtol=0, atol=1e-6 * np.abs(outputs).max())
    session.verify(operands)  # a second verification discards the rows of the first
    session.commit(np.array([-1]))
    np.testing.assert_allclose(session.materialise(0), before, rtol=0, atol=1e-6 * np.abs(before).max())


@pytest.mark.parametrize("method", SESSIONS)
def test_flush_moves_the_committed_state_into_the_pool(method: str) -> None:
    spec = spec_for(method, batch=2, rows=4)
    rng = np.random.default_rng(6)
    session = SESSIONS[method](spec, random_states(spec, 2, rng), [1, 0])
    for operands, accepted in random_steps(spec, rng, 3, empty_commits=False):
        session.verify(operands)
        session.commit(accepted)
    before = session.materialise(0)
    session.flush()
    np.testing.assert_allclose(session.materialise(0), before, rtol=0, atol=1e-6 * np.abs(before).max())
    if method != "storeall":
        assert (session.pool[1] == session.materialise(0)).all()


@pytest.mark.parametrize("method", SESSIONS)
def test_results_do_not_depend_on_the_number_of_threads(method: str) -> None:
    spec = spec_for(method, batch=3, rows=5)
    rng = np.random.default_rng(14)
    states = random_states(spec, 3, rng)
    steps = list(random_steps(spec, rng, 4, empty_commits=False))
    results = []
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        session = SESSIONS[method](spec, states, [0, 1, 2])
        for operands, accepted in steps:
            outputs = session.verify(operands).copy()
            session.commit(accepted)
        results.append((outputs, session.materialise(1)))
    (outputs, state), (other_outputs, other_state) = results
    assert (outputs == other_outputs).all()
    assert (state == other_state).all()


@pytest.mark.parametrize("method", ["treelog", "bole", "deltalog"])
def test_materialise_reads_only(method: str) -> None:
    spec = spec_for(method, batch=1, rows=4)
    rng = np.random.default_rng(7)
    session = SESSIONS[method](spec, random_states(spec, 1, rng), [0])
    for operands, accepted in random_steps(spec, rng, 2, empty_commits=False):
        session.verify(operands)
        session.commit(accepted)
    pool = session.pool.copy()
    session.materialise(0)
    assert (session.pool == pool).all()


def test_treelog_flushes_each_request_by_its_own_cursor() -> None:
    """Capacity 16, paths of up to 4 rows: a request flushes when fewer than 4 log rows are free."""
    tree = DraftTree.from_widths((2, 2, 2))
    spec = SessionSpec.for_tree(LayerHeads(1, 2, 64, 64, "float32"), tree, batch=3)
    rng = np.random.default_rng(8)
    session = TreeLogSession(spec, random_states(spec, 3, rng), [0, 1, 2])
    deepest = tree.paths()[0][-1]
    counts, dense = [], []
    for operands, _ in random_steps(spec, rng, 6, tree=tree):
        session.verify(operands)
        session.commit(np.array([deepest, 0, -1]))
        counts.append(session.log.count.tolist())
        dense.append(session.pool.copy())
    assert counts == [[4, 1, 0], [8, 2, 0], [12, 3, 0], [16, 4, 0], [4, 5, 0], [8, 6, 0]]
    assert (dense[3] == dense[0]).all(), "no dense state is written before a flush"
    assert (dense[4][0] != dense[3][0]).any()
    assert (dense[5][1:] == dense[0][1:]).all()


def test_replayssm_flushes_by_its_published_rule() -> None:
    """T = 4, L = 20: a step flushes when h + 8 > 20."""
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, "float32"), 1, 4, chain=True)
    rng = np.random.default_rng(9)
    session = ReplaySSMSession(spec, random_states(spec, 1, rng), [0])
    counts = []
    for operands, _ in random_steps(spec, rng, 7):
        session.verify(operands)
        session.commit(np.array([2]))
        counts.append(int(session.log.count[0]))
    assert counts == [3, 6, 9, 12, 15, 3, 6]


def test_replayssm_records_hold_bf16_values() -> None:
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, "float32"), 1, 4, chain=True)
    rng = np.random.default_rng(10)
    session = ReplaySSMSession(spec, random_states(spec, 1, rng), [0])
    session.verify(random_operands(spec, DraftTree.chain(3).parent_array(), rng))
    for records in (session.log.u, session.log.k):
        assert (records[0, :4].view(np.uint32) & 0xFFFF == 0).all()


@pytest.mark.parametrize(("dtype", "rounded"), [("float32", False), ("bfloat16", True)])
def test_treelogs_u_is_rounded_as_its_state_is_and_keys_never(dtype: str, rounded: bool) -> None:
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, dtype), 1, 4)
    rng = np.random.default_rng(15)
    session = TreeLogSession(spec, random_states(spec, 1, rng), [0])
    session.verify(random_operands(spec, DraftTree.chain(3).parent_array(), rng))
    first, log = session.policy.node_row, session.log
    assert (log.u[0, first:].view(np.uint32) & 0xFFFF == 0).all() == rounded
    assert (log.k[0, first:].view(np.uint32) & 0xFFFF != 0).any()


def test_a_step_uses_its_own_rows_unrounded() -> None:
    """From one bf16 state, outputs of treelog's first step are those of bole, whose records are fp32."""
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, "bfloat16"), 1, 6)
    rng = np.random.default_rng(16)
    states, tree = random_states(spec, 1, rng), DraftTree.chain(5).parent_array()
    operands = random_operands(spec, tree, rng)
    outputs = [SESSIONS[method](spec, states, [0]).verify(operands) for method in ("treelog", "bole")]
    np.testing.assert_array_equal(*outputs)


def test_treewy_writes_the_state_one_step_late() -> None:
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, "float32"), 1, 4, chain=True)
    rng = np.random.default_rng(11)
    session = TreeWYSession(spec, random_states(spec, 1, rng), [0])
    (first, accepted), (second, _) = random_steps(spec, rng, 2, empty_commits=False)
    start = session.pool.copy()
    session.verify(first)
    session.commit(accepted)
    assert (session.pool == start).all()
    committed = session.materialise(0)
    session.verify(second)
    np.testing.assert_allclose(session.pool[0], committed, rtol=0, atol=1e-6 * np.abs(committed).max())


def test_ancestor_masks_of_a_batch_are_those_of_its_trees() -> None:
    trees = [random_tree(np.random.default_rng(seed), 64) for seed in range(6)]
    masks = ancestor_masks(np.stack([tree.parent_array() for tree in trees]))
    assert (masks == np.stack([tree.mask_array() for tree in trees])).all()


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("recurrent", {}, "one row per step; rows = 5"),
        ("deltalog", {}, "one row per step; rows = 5"),
        ("replayssm", {}, "verifies chains only"),
        ("treelog", {"log_rows": 4}, "log_rows = 4"),
    ],
)
def test_sessions_reject_specs_that_they_cannot_run(method: str, change: dict, message: str) -> None:
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, "float32"), 1, 5, **change)
    with pytest.raises(UsageError, match=message):
        SESSIONS[method](spec, np.zeros((1, 2, 64, 64)), [0])


def test_sessions_reject_states_and_accepted_rows_that_do_not_fit() -> None:
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, "float32"), 1, 5)
    with pytest.raises(UsageError, match="states have shape"):
        TreeLogSession(spec, np.zeros((1, 2, 64, 32)), [0])
    rng = np.random.default_rng(12)
    session = TreeLogSession(spec, random_states(spec, 1, rng), [0])
    with pytest.raises(UsageError, match="follows a verify"):
        session.commit([0])
    ((operands, _),) = random_steps(spec, rng, 1)
    session.verify(operands)
    with pytest.raises(UsageError, match=r"-1 \(nothing\) to 4"):
        session.commit([5])
    with pytest.raises(UsageError, match="accepted has shape"):
        session.commit([0, 0])
    session.commit([0])
    with pytest.raises(UsageError, match="follows a verify"):
        session.commit([0])


@pytest.mark.parametrize("method", ["storeall", "treelog"])
def test_sessions_reject_what_would_be_rounded_wrapped_or_spread(method: str) -> None:
    spec = SessionSpec(LayerHeads(1, 2, 64, 64, "float32"), 2, 5)
    rng = np.random.default_rng(13)
    states = random_states(spec, 3, rng)
    with pytest.raises(UsageError, match="state_indices holds float64"):
        SESSIONS[method](spec, states, [0.7, 1.2])
    states[2] = np.nan
    with pytest.raises(UsageError, match="states hold NaN"):
        SESSIONS[method](spec, states, [0, 2])
    session = SESSIONS[method](spec, states, [0, 1])  # a slot that nobody uses may hold anything
    ((operands, _),) = random_steps(spec, rng, 1)
    session.verify(operands)
    with pytest.raises(UsageError, match="accepted holds float64"):
        session.commit([0.5, 1.0])
    with pytest.raises(UsageError, match="accepted holds bool"):
        session.commit([True, False])
    session.commit([1, 0])
    for request in (-1, 2, 0.0, True):
        with pytest.raises(UsageError, match=f"request {request!r}; allowed are 0 to 1"):
            session.materialise(request)  # type: ignore[arg-type]
