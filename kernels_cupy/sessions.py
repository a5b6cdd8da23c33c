"""The state methods behind the protocol of all backends: one session is one layer of one batch.

Arrays stay on the GPU: operands and accepted rows may be CuPy arrays or anything with `__cuda_array_interface__` or
DLPack; outputs are bfloat16 bits. Values on the GPU are not checked (that would wait for it); shapes are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_cupy.arrays import as_device, host_floats, nan_bits, state_bits
from kernels_cupy.closed_form import Fold, Layer, Log, Verification, tree_masks
from kernels_cupy.compiler import load_cupy
from kernels_cupy.plans import VerifyPlan, check_heads
from kernels_cupy.serial import Recurrence, Scatter, commit_index
from lab.errors import UsageError
from lab.methods import deltalog, replayssm, treelog
from lab.methods.protocol import Operands, SessionSpec, check_state_indices


def _refuse_misread(operands: Operands) -> None:
    """Refuse arrays that the kernels read by a fixed type and layout and would misread as they are."""
    for name, dtype in (("A_log", np.float32), ("dt_bias", np.float32), ("parent", np.int32)):
        array = getattr(operands, name)
        if array is not None and (array.dtype != dtype or not array.flags.c_contiguous):
            raise UsageError(f"operand {name} is {array.dtype}; a contiguous {np.dtype(dtype).name} array is needed")


class CudaSession(ABC):
    """A session on the GPU; children run the kernels and keep what their method keeps.

    `plan` cuts closed-form verifications another way than the batch would (None: as the batch wants it). `early` is the
    share of their CTAs that work in the order of chained launches (`Verification`).
    """

    plan: VerifyPlan | None = None
    early: float = 0.0

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        cp, heads = load_cupy(), spec.heads
        check_heads(heads)
        self.spec = spec
        wanted = (heads.value_heads, heads.value_dim, heads.key_dim)
        if len(states.shape) != 4 or tuple(states.shape[1:]) != wanted:
            raise UsageError(f"states have shape {list(states.shape)}; slots x {list(wanted)} is needed")
        host = cp.asnumpy(state_indices) if isinstance(state_indices, cp.ndarray) else state_indices
        self.state_indices = check_state_indices(host, len(states), spec.batch)
        self.slots = cp.asarray(self.state_indices)
        self.pool = state_bits(states, heads.state_dtype)
        self.outputs = nan_bits((spec.batch, spec.rows, heads.value_heads, heads.value_dim))
        self._pending = False  # rows are verified and not yet committed

    def verify(self, operands: Operands) -> Any:
        operands.check_shapes(self.spec)
        on_device = replace(
            operands, A_log=as_device(operands.A_log), dt_bias=as_device(operands.dt_bias),
            parent=as_device(operands.parent),
        )  # fmt: skip
        _refuse_misread(on_device)
        self._discard()
        self._verify(on_device)
        self._pending = True
        return self.outputs

    def commit(self, accepted: Any) -> None:
        rows = as_device(accepted)
        if rows.shape != (self.spec.batch,) or rows.dtype != np.int32:
            raise UsageError(f"accepted is {rows.dtype}{list(rows.shape)}; int32[{self.spec.batch}] is needed")
        if not self._pending:
            raise UsageError("commit has no verified rows: it follows a verify, once")
        self._pending = False
        self._commit(rows)

    def flush(self) -> None:
        self._discard()
        self._flush()

    def materialise(self, request: int) -> NDArray[np.float32]:
        return host_floats(self.pool[self._slot(request)])

    def _slot(self, request: int) -> int:
        """The pool slot that holds the dense state of a request."""
        slot = int(self.state_indices[request])
        if slot < 0:
            raise UsageError(f"request {request} is padding; it has no state")
        return slot

    def _discard(self) -> None:
        """Forget rows that were verified and never committed."""
        if self._pending:
            self._commit(load_cupy().full(self.spec.batch, -1, np.int32))
            self._pending = False

    @abstractmethod
    def _verify(self, operands: Operands) -> None:
        """Launch the verification of all rows into `outputs`."""

    @abstractmethod
    def _commit(self, accepted: Any) -> None:
        """Commit rows `[B]` int32 on the GPU; -1 commits nothing."""

    def _flush(self) -> None:  # noqa: B027 - nothing waits in a method that writes every step
        """Fold what waits into the dense states."""


class RecurrentSession(CudaSession):
    """Plain decoding: `verify` updates the state in place, so that its one row is always committed."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        check_decode("recurrent", spec)
        super().__init__(spec, states, state_indices)

    def _verify(self, operands: Operands) -> None:
        slots = self.slots
        Recurrence(
            self.spec.heads, operands, self.outputs, self.pool, slots, self.pool, slots[:, None], None,
            self.spec.norm_eps,
        )()  # fmt: skip

    def _commit(self, accepted: Any) -> None:
        """`verify` has committed the row."""


class StoreAllSession(CudaSession):
    """A state for every row. A chain commits by index, a tree scatters the accepted state to the request's slot.

    A chain has N + 1 slots per request, one more than engines give it, so that a step that commits nothing finds its
    state intact: rows go to the N slots that do not hold the committed state.
    """

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        super().__init__(spec, states, state_indices)
        cp = load_cupy()
        nodes = (spec.batch * spec.rows, *self.pool.shape[1:])
        empty = nan_bits(nodes) if self.pool.dtype == np.uint16 else cp.full(nodes, np.nan, np.float32)
        first = 0
        if spec.chain:
            first = len(self.pool)
            self.pool = cp.concatenate([self.pool, empty])
            self.nodes = self.pool
        else:
            self.nodes = empty
            by_request = empty.reshape(spec.batch, spec.rows, *empty.shape[1:])
            self._scatter = Scatter([by_request], [self.pool], self.slots)
        table = np.empty((spec.batch, spec.rows + 1), np.int32)
        table[:, :-1] = first + np.arange(spec.batch * spec.rows).reshape(spec.batch, spec.rows)
        table[:, -1] = self.state_indices
        self.slot_table = cp.asarray(table)

    def _verify(self, operands: Operands) -> None:
        Recurrence(
            self.spec.heads, operands, self.outputs, self.pool, self.slot_table[:, -1], self.nodes, self.slot_table,
            None if self.spec.chain else operands.parent, self.spec.norm_eps,
        )()  # fmt: skip

    def _commit(self, accepted: Any) -> None:
        if self.spec.chain:
            commit_index(accepted, self.slot_table)
        else:
            self._scatter(accepted)

    def _slot(self, request: int) -> int:
        super()._slot(request)
        return int(self.slot_table[request, -1])


class BoleSession(CudaSession):
    """Read-only verification; the commit folds the accepted path into the state at once."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        super().__init__(spec, states, state_indices)
        self.layer = Layer(self.pool, spec.heads, spec.batch, spec.rows)
        self._fold = Fold([self.layer], self.slots, spec.rows, spec.norm_eps)

    def _verify(self, operands: Operands) -> None:
        self.masks = tree_masks(operands.parent)
        Verification(
            self.layer, self.slots, operands, self.masks, self.outputs, None, self.spec.norm_eps, self.plan,
            self.spec.max_path, self.early,
        )()  # fmt: skip

    def _commit(self, accepted: Any) -> None:
        self._fold.path(accepted, self.masks)


class LogSession(CudaSession):
    """Verification over a log; children choose its capacity, the rows that a step reserves, and the type of u."""

    def __init__(
        self,
        spec: SessionSpec,
        states: Any,
        state_indices: Any,
        capacity: int,
        reserve: int,
        log_bf16: bool = False,
    ) -> None:
        super().__init__(spec, states, state_indices)
        self.log = Log(spec.batch, spec.rows, capacity, reserve)
        self.layer = Layer(self.pool, spec.heads, spec.batch, self.log.record_rows, log_bf16)
        self._fold = Fold([self.layer], self.slots, spec.rows, spec.norm_eps)

    def _verify(self, operands: Operands) -> None:
        self.masks = tree_masks(operands.parent)
        Verification(
            self.layer, self.slots, operands, self.masks, self.outputs, self.log, self.spec.norm_eps, self.plan,
            self.spec.max_path, self.early,
        )()  # fmt: skip

    def _commit(self, accepted: Any) -> None:
        self.log.advance(accepted, self.masks)

    def _flush(self) -> None:
        self._fold.log(self.log)
        self.log.length.fill(0)

    def materialise(self, request: int) -> NDArray[np.float32]:
        state = super().materialise(request).astype(np.float64)
        rows = self.log.row_list[request, : int(self.log.length[request])]
        if len(rows):
            u, k = (host_floats(x[request, rows]).astype(np.float64) for x in (self.layer.u, self.layer.k))
            G = host_floats(self.layer.g[request, rows]).astype(np.float64).cumsum(0)
            k = np.repeat(k / np.sqrt((k * k).sum(-1, keepdims=True) + self.spec.norm_eps), self.spec.group, axis=1)
            state *= np.exp(G[-1])[:, None, None]
            state += np.einsum("jh,jhv,jhk->hvk", np.exp(G[-1] - G), u, k)
        return state.astype(np.float32)


class TreeWYSession(LogSession):
    """The commit keeps row ids; the next verification rebuilds, writes and uses the accepted state."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        super().__init__(spec, states, state_indices, spec.max_path, spec.max_path)


class TreeLogSession(LogSession):
    """Accepted paths pile up in the log; a request flushes when the longest path might not fit.

    With a bfloat16 state the log keeps u in bfloat16 too; the step that makes a row uses it unrounded.
    """

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        capacity = spec.log_rows or treelog.log_capacity(spec.rows, spec.max_path)
        check_capacity("treelog", capacity, spec.max_path)
        log_bf16 = treelog.rounds_records(spec.heads)
        super().__init__(spec, states, state_indices, capacity, spec.max_path, log_bf16)


class DeltaLogSession(LogSession):
    """Plain decoding with a log that is merged when it is full."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        check_decode("deltalog", spec)
        super().__init__(spec, states, state_indices, spec.log_rows or deltalog.LOG_ROWS, 1)


class ReplaySSMSession(LogSession):
    """A ring of L = 16 + T rows on chains, u and raw k in bfloat16; a step flushes when h + 2 T > L.

    At most L - T rows are history when a step starts, so the same rule reads h + T > L - T.
    """

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        if not spec.chain:
            raise UsageError("state method 'replayssm' verifies chains only; the session's spec has chain = False")
        ring = spec.log_rows or replayssm.HISTORY_ROWS + spec.rows
        check_capacity("replayssm", ring, spec.rows)
        super().__init__(spec, states, state_indices, max(ring - spec.rows, spec.rows), spec.rows, log_bf16=True)


#: State method -> its session class, called with `(spec, states, state_indices)`.
SESSIONS: dict[str, type[CudaSession]] = {
    "recurrent": RecurrentSession,
    "storeall": StoreAllSession,
    "replayssm": ReplaySSMSession,
    "treewy": TreeWYSession,
    "bole": BoleSession,
    "deltalog": DeltaLogSession,
    "treelog": TreeLogSession,
}


def check_decode(method: str, spec: SessionSpec) -> None:
    """Raise `UsageError` unless the session decodes one row per step."""
    if spec.rows != 1:
        raise UsageError(f"state method '{method}' decodes one row per step; rows = {spec.rows}")


def check_capacity(method: str, capacity: int, needed: int) -> None:
    """Raise `UsageError` when one step does not fit an empty log."""
    if capacity < needed:
        raise UsageError(f"log_rows = {capacity}; state method '{method}' appends up to {needed} rows in a step")
