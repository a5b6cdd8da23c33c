"""What all CPU sessions share (state pool, checked operands, outputs), and the serial family's sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.bf16 import from_bits, to_bits
from lab.cpu import serial
from lab.cpu.primitives import Inputs
from lab.errors import UsageError
from lab.methods.protocol import Operands, SessionSpec, check_state_indices, whole_numbers


class CpuSession(ABC):
    """A session on NumPy arrays; children run the kernels and keep what their method keeps.

    The pool holds float32 values, or bfloat16 as `uint16` bits, so a bfloat16 state takes two bytes here as
    well. Outputs are float32. Raises `UsageError` for a spec that the method does not support, for operands
    that do not fit or are not finite, and for accepted rows that do not exist.
    """

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        self.spec = spec
        heads = spec.heads
        wanted = (heads.value_heads, heads.value_dim, heads.key_dim)
        dense = np.asarray(states, dtype=np.float32)
        if dense.ndim != 4 or dense.shape[1:] != wanted:
            raise UsageError(f"states have shape {list(dense.shape)}; slots x {list(wanted)} is needed")
        self.state_indices = check_state_indices(state_indices, len(dense), spec.batch)
        self.live = self.state_indices >= 0
        if not np.isfinite(dense[self.state_indices[self.live]]).all():
            raise UsageError("states hold NaN or infinite numbers in a slot that state_indices names")
        bf16 = heads.state_dtype == "bfloat16"
        self.pool = to_bits(dense) if bf16 else dense.copy()
        self.parents = np.full((spec.batch, spec.rows), -1, np.int32)
        self._verified = False
        self.outputs = np.full((spec.batch, spec.rows, heads.value_heads, heads.value_dim), np.nan, np.float32)

    def verify(self, operands: Operands) -> NDArray[np.float32]:
        operands.check_shapes(self.spec)
        operands.check_values(self.spec, self.live)
        self.parents = operands.parents(self.spec)
        self._verify(Inputs(*(_single(getattr(operands, name)) for name in Inputs._fields)))
        self._verified = True
        return self.outputs

    def commit(self, accepted: Any) -> None:
        rows = whole_numbers("accepted", accepted)
        if rows.shape != self.state_indices.shape:
            raise UsageError(f"accepted has shape {list(rows.shape)}; [{self.spec.batch}] is needed")
        if ((rows < -1) | (rows >= self.spec.rows))[self.live].any():
            raise UsageError(f"accepted rows must be -1 (nothing) to {self.spec.rows - 1}")
        if not self._verified:
            raise UsageError("commit has no verified rows: it follows a verify, once")
        self._verified = False
        rows[~self.live] = -1
        self._commit(rows)

    def flush(self) -> None:
        self._verified = False
        self._flush()

    def materialise(self, request: int) -> NDArray[np.float32]:
        return self._dense(self._slot(request))

    def _slot(self, request: int) -> int:
        """The slot that holds the dense state of a request."""
        if isinstance(request, bool) or not isinstance(request, int | np.integer) or not 0 <= request < self.spec.batch:
            raise UsageError(f"request {request!r}; allowed are 0 to {self.spec.batch - 1}, places in the batch")
        slot = int(self.state_indices[request])
        if slot < 0:
            raise UsageError(f"request {request} is padding; it has no state")
        return slot

    def _dense(self, slot: int) -> NDArray[np.float32]:
        state = self.pool[slot]
        return from_bits(state) if state.dtype == np.uint16 else state.copy()

    @abstractmethod
    def _verify(self, inputs: Inputs) -> None:
        """Fill `outputs` from q, k, v, a, b, A_log, dt_bias and `parents`."""

    @abstractmethod
    def _commit(self, accepted: NDArray[np.int32]) -> None:
        """Commit checked rows `[B]`; -1 for padding."""

    def _flush(self) -> None:  # noqa: B027 - nothing waits in a method that writes every step
        """Fold what waits into the dense states."""


class RecurrentSession(CpuSession):
    """Plain decoding: `verify` updates the state in place, so that its one row is always committed."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        check_decode("recurrent", spec)
        super().__init__(spec, states, state_indices)

    def _verify(self, inputs: Inputs) -> None:
        slots, eps = self.state_indices, np.float32(self.spec.norm_eps)
        serial.verify(self.pool, slots, slots[:, None], inputs, self.parents, True, eps, self.outputs)

    def _commit(self, accepted: NDArray[np.int32]) -> None:
        """`verify` has committed the row."""


class StoreAllSession(CpuSession):
    """A state for every row in a pool slot of its own.

    A chain commits by index: the next step starts from the accepted row's slot. A tree scatters the accepted
    state back into the request's slot. Each request has N + 1 slots, one more than engines give a chain, so
    that a step that commits nothing finds its state intact; the rows go to the N slots that do not hold the
    committed state.
    """

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        super().__init__(spec, states, state_indices)
        slots, extra = len(self.pool), spec.batch * spec.rows
        rows = np.full(
            (extra, *self.pool.shape[1:]), 0x7FC0 if self.pool.dtype == np.uint16 else np.nan, self.pool.dtype
        )
        self.pool = np.concatenate([self.pool, rows])
        added = np.arange(slots, slots + extra, dtype=np.int32).reshape(spec.batch, spec.rows)
        self.block_table = np.concatenate([self.state_indices[:, None], added], axis=1)
        self.cursor = np.zeros(spec.batch, np.int32)

    def _columns(self) -> NDArray[np.int32]:
        """Column of the block table that row t writes: `[B, N]`."""
        return np.asarray((self.cursor[:, None] + 1 + np.arange(self.spec.rows)) % (self.spec.rows + 1), np.int32)

    def _slots(self, columns: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.take_along_axis(self.block_table, columns, axis=1)

    def _verify(self, inputs: Inputs) -> None:
        read = np.where(self.live, self._slots(self.cursor[:, None])[:, 0], np.int32(-1))
        write = self._slots(self._columns())
        eps = np.float32(self.spec.norm_eps)
        serial.verify(self.pool, read, write, inputs, self.parents, self.spec.chain, eps, self.outputs)

    def _commit(self, accepted: NDArray[np.int32]) -> None:
        taken = accepted >= 0
        column = np.take_along_axis(self._columns(), np.maximum(accepted, 0)[:, None], axis=1)
        if self.spec.chain:
            self.cursor = np.where(taken, column[:, 0], self.cursor)
        else:
            source = np.where(taken, self._slots(column)[:, 0], np.int32(-1))
            serial.scatter(self.pool, source, self.state_indices)

    def _slot(self, request: int) -> int:
        super()._slot(request)
        return int(self.block_table[request, self.cursor[request]])


def check_decode(method: str, spec: SessionSpec) -> None:
    """Raise `UsageError` unless the session decodes one row per step."""
    if spec.rows != 1:
        raise UsageError(f"state method '{method}' decodes one row per step; rows = {spec.rows}")


def _single(values: Any) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)
