"""The bench's gate: two requests against the oracle, repeated over a batch, until every log has been flushed.

The oracle runs once per heads and tree; every method and state type is then compared with it, and every variant of its
kernels. Request b of a batch is a copy of template b mod 2, in a state slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lab.bench.operands import random_operands, random_states
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, Session, SessionSpec
from lab.methods.treelog import log_rows
from lab.oracle import OracleSession
from lab.trees import DraftTree

TEMPLATES = 2
#: Bytes of the oracle's runs that are kept: a bench with a time limit goes back and forth between heads and trees.
#: Those of a whole profile take 1 GiB.
KEPT_BYTES = 4 << 30


def relative_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Euclidean norm of the difference over that of `expected`; infinite when anything found is not finite."""
    expected = np.asarray(expected, np.float64)
    error = float(np.linalg.norm(found - expected))
    return error / max(float(np.linalg.norm(expected)), 1e-300) if np.isfinite(error) else float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Operands, accepted rows and what the oracle makes of them.

    `states` `[2, HV, V, K]` float32; per step: operands of two requests, accepted rows `[2]`, outputs `[2, N, HV, V]`.
    `final` `[2, HV, V, K]` float64 are the states after the last step.
    """

    tree: DraftTree
    states: NDArray[np.float32]
    operands: tuple[Operands, ...]
    accepted: tuple[NDArray[np.int32], ...]
    outputs: tuple[NDArray[np.float64], ...]
    final: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        operands = [getattr(x, name) for x in self.operands for name in ("q", "k", "v", "a", "b")]
        return sum(array.nbytes for array in (self.states, self.final, *self.outputs, *operands))


@dataclass(frozen=True, slots=True)
class GateErrors:
    """Largest relative errors over steps and requests: |x - ref| / |ref| of a request's outputs and state."""

    output: float
    state: float

    def excess(self, limits: GateErrors) -> str | None:
        """Which error exceeds its limit, in words; None for a green gate."""
        parts = [
            f"{name} error {found:.1e} > {limit:.1e}"
            for name, found, limit in (
                ("output", self.output, limits.output),
                ("state", self.state, limits.state),
            )
            if not found <= limit
        ]
        return ", ".join(parts) or None


class References:
    """The oracle's runs for the points of a bench, in their order: made when asked for, or ahead by other processes.

    Called with heads (their state type does not matter to the oracle) and a tree. Runs are kept, the last ones if all
    take more than `kept_bytes`.
    """

    def __init__(
        self,
        points: Iterable[tuple[LayerHeads, DraftTree]] = (),
        processes: int = 1,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._kept_bytes = kept_bytes
        keys = dict.fromkeys(_key(*point) for point in points)
        self._pool = None
        self._ahead: dict[tuple[LayerHeads, DraftTree], Future[Reference]] = {}
        if processes > 1 and len(keys) > 2:
            self._pool = ProcessPoolExecutor(processes, get_context("spawn"))
            self._ahead = {key: self._pool.submit(_reference, *key) for key in keys}
        self._last: dict[tuple[LayerHeads, DraftTree], Reference] = {}

    def __call__(self, heads: LayerHeads, tree: DraftTree) -> Reference:
        key = _key(heads, tree)
        found = self._last.pop(key, None)
        if found is None:
            ahead = self._ahead.pop(key, None)
            try:
                found = ahead.result() if ahead else _reference(*key)
            except BrokenProcessPool:  # a process was killed, say for its memory
                found = _reference(*key)
            left = self._kept_bytes - found.nbytes
            while self._last and sum(known.nbytes for known in self._last.values()) > left:
                del self._last[next(iter(self._last))]  # the one that was asked for the longest ago
        self._last[key] = found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:  # what is still being made is of no use now
            self._pool.shutdown(wait=False, cancel_futures=True)


def _key(heads: LayerHeads, tree: DraftTree) -> tuple[LayerHeads, DraftTree]:
    return replace(heads, state_dtype="float32"), tree


def _reference(heads: LayerHeads, tree: DraftTree) -> Reference:
    """Template 0 accepts the deepest row every step, template 1 random rows, until every log has been flushed."""
    spec = SessionSpec.for_tree(heads, tree, TEMPLATES)
    rng = np.random.default_rng([heads.key_heads, heads.value_heads, tree.num_rows, tree.max_depth])
    path = tree.max_depth + 1
    deepest = max(range(tree.num_rows), key=lambda row: tree.depth[row])
    steps = -(-(log_rows(tree.num_rows, path) - path + 1) // path) + 1
    states = random_states(spec, TEMPLATES, rng)
    oracle = OracleSession(spec, states, np.arange(TEMPLATES))
    operands, accepted, outputs = [], [], []
    for _ in range(steps):
        operands.append(random_operands(spec, tree.parent_array(), rng))
        accepted.append(np.array([deepest, rng.integers(tree.num_rows)], np.int32))
        outputs.append(oracle.verify(operands[-1]))
        oracle.commit(accepted[-1])
    return Reference(tree, states, tuple(operands), tuple(accepted), tuple(outputs), oracle.pool)


def gate_session(
    make: Callable[[SessionSpec, Any, NDArray[np.int32]], Session],
    heads: LayerHeads,
    batch: int,
    known: Reference,
    *,
    place: Callable[[Operands, NDArray[np.int32]], Operands],
    spread: Callable[[NDArray[np.float32], NDArray[np.int32]], Any],
    fetch: Callable[[Any], NDArray[Any]] = np.asarray,
    put: Callable[[NDArray[np.int32]], Any] = np.asarray,
) -> GateErrors:
    """Errors of a session of `batch` requests over the reference's steps, its state before and after a flush.

    `place(operands, template)` repeats the templates' operands over the batch where the session wants them,
    `spread(states, template)` the states over slots, `put` accepted rows; `fetch` brings outputs of one request back.
    """
    rng = np.random.default_rng(batch)
    template = (np.arange(batch) % TEMPLATES).astype(np.int32)
    slots = rng.permutation(batch + 1).astype(np.int32)
    template_of_slot = np.zeros(batch + 1, np.int32)
    template_of_slot[slots[:batch]] = template
    spec = SessionSpec.for_tree(heads, known.tree, batch)
    session = make(spec, spread(known.states, template_of_slot), slots[:batch])
    watched = sorted({0, min(1, batch - 1), batch // 2, batch - 1})
    output_error = 0.0
    for operands, accepted, expected in zip(known.operands, known.accepted, known.outputs, strict=True):
        found = session.verify(place(operands, template))
        errors = [relative_error(fetch(found[request]), expected[template[request]]) for request in watched]
        output_error = max(output_error, *errors)
        session.commit(put(accepted[template]))
    state_error = 0.0
    for flushed in (False, True):
        if flushed:
            session.flush()
        for request in watched if flushed else watched[:TEMPLATES]:  # a flush folds what waits in the others' logs
            found_state = session.materialise(request)
            state_error = max(state_error, relative_error(found_state, known.final[template[request]]))
    return GateErrors(output_error, state_error)
