"""The bench's gate: green for every CPU method, red for a kernel that is a little wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.bench.reference import GateErrors, References, gate_session
from lab.cpu import SESSIONS
from lab.methods import get_method
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, SessionSpec
from lab.trees import DraftTree

HEADS = LayerHeads(1, 2, 32, 32, "float32")
TREES = {"root": DraftTree.chain(0), "chain": DraftTree.chain(3), "tree": DraftTree.from_widths((2, 2))}


def place(operands: Operands, template: np.ndarray) -> Operands:
    fields = {name: getattr(operands, name)[template] for name in ("q", "k", "v", "a", "b")}
    return Operands(**fields, A_log=operands.A_log, dt_bias=operands.dt_bias, parent=operands.parent)


def gate(make: Any, tree: DraftTree, batch: int = 5) -> GateErrors:
    known = References()(HEADS, tree)
    return gate_session(make, HEADS, batch, known, place=place, spread=lambda states, template: states[template])


def verifies(method: str, shape: str) -> bool:
    topology = get_method(method).topology
    return shape == "root" or (topology != "decode" and (shape == "chain" or topology == "tree"))


@pytest.mark.parametrize(
    ("method", "shape"), [(method, shape) for method in SESSIONS for shape in TREES if verifies(method, shape)]
)
def test_every_cpu_method_is_green(method: str, shape: str) -> None:
    tree = TREES[shape]
    limit = 2e-2 if method == "replayssm" else 1e-5
    assert gate(SESSIONS[method], tree).excess(GateErrors(limit, limit)) is None


@pytest.mark.parametrize(("method", "shape"), [("treelog", "chain"), ("treelog", "tree"), ("replayssm", "chain"),
                                               ("deltalog", "root")])  # fmt: skip
def test_enough_steps_run_for_every_log_to_be_flushed(method: str, shape: str) -> None:
    flushed = []

    class Watched(SESSIONS[method]):  # type: ignore[name-defined, misc]
        def _verify(self, inputs: Any) -> None:
            before = self.log.count.copy()
            super()._verify(inputs)
            flushed.append((self.log.count < before).any())

    gate(Watched, TREES[shape])
    assert any(flushed)


class WrongOutput(SESSIONS["treelog"]):  # type: ignore[misc]
    def verify(self, operands: Operands) -> Any:
        outputs = super().verify(operands)
        outputs[-1] *= 1.001  # in the last request alone
        return outputs


class WrongCommit(SESSIONS["bole"]):  # type: ignore[misc]
    def commit(self, accepted: Any) -> None:
        super().commit(np.maximum(accepted - 1, 0))


class NotFinite(SESSIONS["treewy"]):  # type: ignore[misc]
    def verify(self, operands: Operands) -> Any:
        outputs = super().verify(operands)
        outputs[0, 0, 0, 0] = np.nan
        return outputs


def test_the_error_that_is_too_large_is_named() -> None:
    limits = GateErrors(1e-5, 1e-5)
    assert gate(WrongOutput, TREES["tree"]).excess(limits) == "output error 1.0e-03 > 1.0e-05"
    wrong = gate(WrongCommit, TREES["chain"])
    assert wrong.state > 0.1
    assert "state error" in str(wrong.excess(limits))
    assert gate(NotFinite, TREES["chain"]).output == np.inf


def test_the_reference_does_not_depend_on_the_state_type() -> None:
    bf16 = LayerHeads(1, 2, 32, 32, "bfloat16")
    known = References()
    assert known(HEADS, TREES["chain"]) is known(bf16, TREES["chain"])


def test_a_batch_of_one_is_gated_too() -> None:
    seen = []

    def make(spec: SessionSpec, states: Any, indices: Any) -> Any:
        seen.append(spec.batch)
        return SESSIONS["treelog"](spec, states, indices)

    assert gate(make, TREES["tree"], batch=1).excess(GateErrors(1e-5, 1e-5)) is None
    assert seen == [1]


def test_runs_made_ahead_by_other_processes_are_the_same() -> None:
    points = [(LayerHeads(1, value_heads, 32, 32, "float32"), DraftTree.chain(1)) for value_heads in (1, 2, 3)]
    with References(points, 2) as ahead:
        for point in points:
            np.testing.assert_array_equal(ahead(*point).final, References()(*point).final)
        assert ahead(*points[-1]) is ahead(*points[-1]), "the last one is kept"


def test_runs_are_kept_as_long_as_their_memory_allows_those_asked_for_last() -> None:
    known, trees = References(), [DraftTree.chain(drafts) for drafts in range(6)]
    first = [known(HEADS, tree) for tree in trees]
    assert all(known(HEADS, tree) is run for tree, run in zip(trees, first, strict=True))
    few = References(kept_bytes=2 * max(run.nbytes for run in first))
    runs = [few(HEADS, tree) for tree in trees[:2]]
    few(HEADS, trees[0])  # makes it the last
    few(HEADS, trees[5])
    assert few(HEADS, trees[0]) is runs[0]
    assert few(HEADS, trees[1]) is not runs[1]
    assert References(kept_bytes=0)(HEADS, trees[0]).nbytes > 0, "one that is too large is used all the same"
