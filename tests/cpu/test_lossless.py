"""INV-1, end to end: greedy speculative decoding emits the tokens of plain greedy decoding, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.bf16 import round_bf16
from lab.cpu import SESSIONS
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, Session, SessionSpec
from lab.oracle import OracleSession, path_to
from lab.trees import DraftTree

HEADS = LayerHeads(1, 2, 32, 32, "float32")
VOCABULARY = 24
ROOT = DraftTree.chain(0)
TREES = {
    "chain": DraftTree.chain(3),
    "binary": DraftTree.from_widths((2, 2, 2)),
    "star": DraftTree((-1, 0, 0, 0)),
}


class ToyModel:
    """One gated delta rule layer between a table of operands per token and a head of logits."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        heads = HEADS
        self.q = round_bf16(rng.standard_normal((VOCABULARY, heads.key_heads, heads.key_dim)))
        self.k = round_bf16(rng.standard_normal((VOCABULARY, heads.key_heads, heads.key_dim)))
        self.v = round_bf16(rng.standard_normal((VOCABULARY, heads.value_heads, heads.value_dim)))
        self.a = round_bf16(rng.normal(-3, 0.5, (VOCABULARY, heads.value_heads)))
        self.b = round_bf16(rng.standard_normal((VOCABULARY, heads.value_heads)))
        self.position = round_bf16(rng.standard_normal((64, heads.value_heads, heads.value_dim)))
        self.head = rng.standard_normal((heads.value_heads * heads.value_dim, VOCABULARY))

    def operands(self, tokens: list[int], tree: DraftTree, position: int) -> Operands:
        """Operands of one request's rows with these tokens; the root stands at `position` of the sequence."""
        rows = np.array([tokens])
        place = (position + np.array([tree.depth])) % len(self.position)
        zero = np.zeros(HEADS.value_heads, np.float32)
        v = self.v[rows] + self.position[place]
        return Operands(self.q[rows], self.k[rows], v, self.a[rows], self.b[rows], zero, zero, tree.parent_array())

    def argmax(self, outputs: Any) -> np.ndarray:
        """Greedy next token of every row: `[B, N]` from outputs `[B, N, HV, V]`."""
        return np.asarray((outputs.reshape(*outputs.shape[:2], -1) @ self.head).argmax(-1))


def greedy(model: ToyModel, session: Session, root: int, tokens: int) -> list[int]:
    """Plain decoding: one row a step."""
    emitted = [root]
    while len(emitted) <= tokens:
        operands = model.operands([emitted[-1]], ROOT, len(emitted) - 1)
        emitted.append(int(model.argmax(session.verify(operands))[0, 0]))
        session.commit(np.array([0]))
    return emitted[1:]


def speculative(
    model: ToyModel,
    session: Session,
    tree: DraftTree,
    root: int,
    expected: list[int],
    rng: np.random.Generator,
) -> tuple[list[int], int]:
    """Tree decoding with drafts that are right about half the time; returns tokens and accepted drafts."""
    emitted, accepted_drafts = [root], 0
    while len(emitted) <= len(expected):
        tokens = draft(tree, emitted, expected, rng)
        operands = model.operands(tokens, tree, len(emitted) - 1)
        chosen = model.argmax(session.verify(operands))[0]
        row = 0
        while (following := [c for c in tree.children(row) if tokens[c] == chosen[row]]) != []:
            row = following[0]
        path = path_to(tree.parent_array(), row)
        session.commit(np.array([row]))
        emitted += [tokens[r] for r in path[1:]] + [int(chosen[row])]
        accepted_drafts += len(path) - 1
    return emitted[1 : len(expected) + 1], accepted_drafts


def draft(tree: DraftTree, emitted: list[int], expected: list[int], rng: np.random.Generator) -> list[int]:
    """Tokens of a tree; siblings differ, and one child of a row on the right path is often right."""
    tokens = np.full(tree.num_rows, emitted[-1])
    right = {0}
    for row in range(tree.num_rows):
        children = tree.children(row)
        drawn = rng.permutation(VOCABULARY)[: len(children)]
        place = len(emitted) - 1 + tree.depth[row]
        if children and row in right and place < len(expected) and rng.random() < 0.8:
            lucky = int(rng.integers(len(children)))
            if expected[place] not in drawn:
                drawn[lucky] = expected[place]
            right.add(children[int(np.flatnonzero(drawn == expected[place])[0])])
        tokens[list(children)] = drawn
    return tokens.tolist()


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("method", ["storeall", "treewy", "bole", "specla", "treelog", "oracle"])
def test_inv1_greedy_speculation_is_lossless(method: str, shape: str) -> None:
    tree = TREES[shape]
    model, rng = ToyModel(seed=17), np.random.default_rng(19)
    states = np.zeros((1, HEADS.value_heads, HEADS.value_dim, HEADS.key_dim))
    plain = greedy(model, OracleSession(SessionSpec(HEADS, 1, 1), states, [0]), root=3, tokens=250)
    sessions: dict[str, Any] = {**SESSIONS, "oracle": OracleSession}
    session = sessions[method](SessionSpec.for_tree(HEADS, tree, 1), states, [0])
    tokens, accepted_drafts = speculative(model, session, tree, 3, plain, rng)
    assert tokens == plain
    assert accepted_drafts > 50, "the drafts are good enough to exercise the commit"


def test_replayssm_emits_greedy_tokens_up_to_near_ties() -> None:
    """Its bfloat16 records move logits by less than 2 %, so that only near-ties can fall the other way."""
    model, tree = ToyModel(seed=17), TREES["chain"]
    states = np.zeros((1, HEADS.value_heads, HEADS.value_dim, HEADS.key_dim))
    spec = SessionSpec(HEADS, 1, 1)
    plain = greedy(model, OracleSession(spec, states, [0]), root=3, tokens=250)
    session = SESSIONS["replayssm"](SessionSpec.for_tree(HEADS, tree, 1), states, [0])
    tokens, _ = speculative(model, session, tree, 3, plain, np.random.default_rng(19))

    oracle = OracleSession(spec, states, [0])
    for position, following in enumerate(tokens):
        outputs = oracle.verify(model.operands([[3, *tokens][position]], ROOT, position))
        logits = (outputs.reshape(1, -1) @ model.head)[0]
        assert logits.max() - logits[following] <= 0.02 * np.abs(logits).max()
        oracle.commit(np.array([0]))


@pytest.mark.parametrize("method", ["recurrent", "deltalog"])
def test_inv1_plain_decoding_methods_emit_the_oracle_tokens(method: str) -> None:
    model = ToyModel(seed=23)
    spec = SessionSpec(HEADS, 1, 1)
    states = np.zeros((1, HEADS.value_heads, HEADS.value_dim, HEADS.key_dim))
    plain = greedy(model, OracleSession(spec, states, [0]), root=5, tokens=250)
    assert greedy(model, SESSIONS[method](spec, states, [0]), root=5, tokens=250) == plain
