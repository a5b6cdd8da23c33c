"""Sessions of any backend against the oracle, over as many speculative steps as asked.

Sessions of several methods can share one run: they see the same operands and the same accepted rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.bench.operands import MILD, Regime, random_operands, random_tree
from lab.bench.reference import relative_error
from lab.methods.protocol import Operands, Session, SessionSpec
from lab.oracle import OracleSession
from lab.trees import DraftTree

Step = tuple[Operands, NDArray[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class StepErrors:
    """Relative errors `[steps]` against the oracle, the worst live request of each step: |x - ref| / |ref|.

    `output` compares the outputs of all rows, `state` the committed state after the step.
    """

    output: NDArray[np.float64]
    state: NDArray[np.float64]


def random_steps(
    spec: SessionSpec,
    rng: np.random.Generator,
    steps: int,
    regime: Regime = MILD,
    *,
    tree: DraftTree | None = None,
    empty_commits: bool = True,
) -> Iterator[Step]:
    """Operands and accepted rows `[B]` of random steps.

    Every request verifies `tree`, or a random tree of its own and step (a chain where the spec says so). The
    accepted row is any row; with `empty_commits` also -1.
    """
    for _ in range(steps):
        trees = [_tree(spec, rng, tree) for _ in range(spec.batch)]
        operands = random_operands(spec, np.stack([each.parent_array() for each in trees]), rng, regime)
        accepted = rng.integers(-1 if empty_commits else 0, spec.rows, spec.batch)
        yield operands, accepted.astype(np.int32)


def _tree(spec: SessionSpec, rng: np.random.Generator, tree: DraftTree | None) -> DraftTree:
    if tree is not None:
        return tree
    return DraftTree.chain(spec.rows - 1) if spec.chain else random_tree(rng, spec.rows)


def run_beside_oracle(
    sessions: Mapping[str, Session],
    oracle: OracleSession,
    steps: Iterable[Step],
    *,
    place: Callable[[Operands], Operands] = lambda operands: operands,
    fetch: Callable[[Any], NDArray[Any]] = np.asarray,
) -> dict[str, StepErrors]:
    """Errors of every session over the same steps.

    `place` puts host operands where the sessions want them, `fetch` brings outputs back as NumPy values.
    """
    live = np.flatnonzero(oracle.state_indices >= 0).tolist()
    outputs: dict[str, list[float]] = {name: [] for name in sessions}
    states: dict[str, list[float]] = {name: [] for name in sessions}
    for operands, accepted in steps:
        expected = oracle.verify(operands)
        oracle.commit(accepted)
        placed = place(operands)
        for name, session in sessions.items():
            found = fetch(session.verify(placed))
            outputs[name].append(max(relative_error(found[r], expected[r]) for r in live))
            session.commit(accepted)
            states[name].append(max(relative_error(session.materialise(r), oracle.materialise_exact(r)) for r in live))
    return {name: StepErrors(np.array(outputs[name]), np.array(states[name])) for name in sessions}
