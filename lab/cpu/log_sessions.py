"""Sessions of the closed-form family: one verification kernel, one write-back policy each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.cpu import closed_form
from lab.cpu.closed_form import Log, Policy
from lab.cpu.primitives import Inputs
from lab.cpu.sessions import CpuSession, check_decode
from lab.errors import UsageError
from lab.methods import deltalog, replayssm, treelog
from lab.methods.protocol import SessionSpec


class ClosedFormSession(CpuSession):
    """Records, log and cursors of the closed-form kernel; children set the policy."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any, policy: Policy) -> None:
        super().__init__(spec, states, state_indices)
        heads, batch = spec.heads, spec.batch
        records = policy.capacity if policy.node_row < 0 else policy.node_row + spec.rows
        self.policy = policy
        self.log = Log(
            u=np.full((batch, records, heads.value_heads, heads.value_dim), np.nan, np.float32),
            k=np.full((batch, records, heads.key_heads, heads.key_dim), np.nan, np.float32),
            g=np.full((batch, records, heads.value_heads), np.nan, np.float32),
            index=np.tile(np.arange(policy.capacity, dtype=np.int32), (batch, 1)),
            count=np.zeros(batch, np.int32),
        )

    def _verify(self, inputs: Inputs) -> None:
        slots, parents, masks = self.state_indices, self.parents, ancestor_masks(self.parents)
        eps = np.float32(self.spec.norm_eps)
        closed_form.verify(self.pool, slots, inputs, parents, masks, self.log, self.policy, eps, self.outputs)

    def _flush(self) -> None:
        closed_form.fold(self.pool, self.state_indices, self.log)

    def materialise(self, request: int) -> NDArray[np.float32]:
        state = super().materialise(request).astype(np.float64)
        rows = self.log.index[request, : self.log.count[request]]
        if len(rows):
            G = self.log.g[request, rows].astype(np.float64).cumsum(0)
            keys = np.repeat(self.log.k[request, rows], self.spec.group, axis=1)
            state *= np.exp(G[-1])[:, None, None]
            state += np.einsum("jh,jhv,jhk->hvk", np.exp(G[-1] - G), self.log.u[request, rows], keys)
        return state.astype(np.float32)


class _IndexingSession(ClosedFormSession):
    """The accepted path stays where `verify` left it; the commit lists its rows.

    Verified rows start at record 0, so the next `verify` must have folded them before it writes its own.
    """

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        super().__init__(spec, states, state_indices, Policy(spec.rows, spec.rows, 0, False))

    def _commit(self, accepted: NDArray[np.int32]) -> None:
        closed_form.index_path(self.parents, accepted, self.state_indices, self.log)


class TreeWYSession(_IndexingSession):
    """The next verification rebuilds, writes and uses the accepted state."""


class BoleSession(_IndexingSession):
    """Verification is read-only; the commit folds the accepted path into the state at once."""

    def _commit(self, accepted: NDArray[np.int32]) -> None:
        super()._commit(accepted)
        self._flush()


class _GatheringSession(ClosedFormSession):
    """The commit gathers the accepted path's records behind the log; verified rows have records of their own."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any, capacity: int) -> None:
        super().__init__(spec, states, state_indices, Policy(capacity, spec.max_path, capacity, False))

    def _commit(self, accepted: NDArray[np.int32]) -> None:
        closed_form.append(self.parents, accepted, self.state_indices, self.log, self.policy.node_row)


class SpecLASession(_GatheringSession):
    """The accepted path waits in a pending buffer of one path and is folded by the next verification, every step."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        super().__init__(spec, states, state_indices, spec.max_path)


class TreeLogSession(_GatheringSession):
    """Accepted paths pile up in the log; a request flushes when the longest path might not fit."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        capacity = spec.log_rows or treelog.log_rows(spec.rows, spec.max_path)
        _check_capacity("treelog", capacity, spec.max_path)
        super().__init__(spec, states, state_indices, capacity)


class _RingSession(ClosedFormSession):
    """Verified rows are written behind the log, so that a chain commits by moving its cursor."""

    def _commit(self, accepted: NDArray[np.int32]) -> None:
        self.log.count[:] += accepted + 1


class DeltaLogSession(_RingSession):
    """Plain decoding with a log that is merged when it is full."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        check_decode("deltalog", spec)
        super().__init__(spec, states, state_indices, Policy(spec.log_rows or deltalog.LOG_ROWS, 1, -1, False))


class ReplaySSMSession(_RingSession):
    """A ring of L = 16 + T rows with u and k rounded to bfloat16; a step flushes when h + 2 T > L.

    The records are float32 arrays here that hold bfloat16 values. The step that makes a row uses it unrounded.
    """

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        if not spec.chain:
            raise UsageError("state method 'replayssm' verifies chains only; the session's spec has chain = False")
        capacity = spec.log_rows or replayssm.HISTORY_ROWS + spec.rows
        _check_capacity("replayssm", capacity, spec.rows)
        super().__init__(spec, states, state_indices, Policy(capacity, 2 * spec.rows, -1, True))


def ancestor_masks(parents: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Ancestor masks `[B, N]`, each row included in its own, of parents `[B, N]`."""
    masks = np.ones(parents.shape, np.uint64)
    request = np.arange(len(parents))
    for row in range(1, parents.shape[1]):
        masks[:, row] = masks[request, parents[:, row]] | np.uint64(1) << np.uint64(row)
    return masks


def _check_capacity(method: str, capacity: int, needed: int) -> None:
    """Raise `UsageError` when one step does not fit an empty log."""
    if capacity < needed:
        raise UsageError(f"log_rows = {capacity}; state method '{method}' appends up to {needed} rows in a step")
