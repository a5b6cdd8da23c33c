"""Launches of the serial family: plain decoding, a state per row, the scatter of accepted states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_cupy.arrays import bf16_operand, gate_operands, row_pitch
from kernels_cupy.compiler import kernel, load_cupy
from kernels_cupy.launch import Launch
from kernels_cupy.plans import check_heads
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands

_NO_ARRAY = np.uint64(0)


class Recurrence:
    """Rows one after another, each row's state written to a slot of `write_pool`.

    `read_slots` `[B]` (a view of any stride) names the states to start from, `write_slots` `[B, >= N]` the slots of the
    rows. `parent` `[N]` or `[B, N]` on the GPU makes rows start from other rows than the one before; None is a chain.
    """

    def __init__(
        self, heads: LayerHeads, operands: Operands, output: Any, read_pool: Any, read_slots: Any, write_pool: Any,
        write_slots: Any, parent: Any = None, norm_eps: float = 1e-6,
    ) -> None:  # fmt: skip
        check_heads(heads)
        q, k, v = (bf16_operand(getattr(operands, name), name) for name in "qkv")
        a, b = gate_operands(operands)
        batch, rows = q.shape[:2]
        arguments = (
            q, k, v, np.int32(row_pitch(q, "q")), np.int32(row_pitch(k, "k")), np.int32(row_pitch(v, "v")),
            a, b, np.int32(a.dtype == np.uint16), operands.A_log, operands.dt_bias,
            _NO_ARRAY if parent is None else parent, np.int32(rows if parent is not None and parent.ndim == 2 else 0),
            read_pool, read_slots, np.int32(read_slots.strides[0] // 4), write_pool, write_slots,
            np.int32(write_slots.strides[0] // 4), output, np.int32(rows), np.int32(heads.key_heads),
            np.int32(heads.value_heads), np.float32(norm_eps),
        )  # fmt: skip
        macros = {"DIM": heads.key_dim, "STATE_BF16": int(heads.state_dtype == "bfloat16")}
        grid = (heads.value_heads * (heads.value_dim // 64), batch)
        self._launch = Launch(kernel("serial.cu", "recur", **macros), grid, 128, arguments)

    def __call__(self, chained: bool = False) -> None:
        self._launch(chained)


class Scatter:
    """Copies the accepted row's state of every request and layer to the request's pool slot, in one launch."""

    def __init__(self, node_states: Sequence[Any], pools: Sequence[Any], slots: Any) -> None:
        cp = load_cupy()
        self._keep = (node_states, pools)  # keeps the memory behind the pointers alive
        pairs = [[nodes.data.ptr, pool.data.ptr] for nodes, pool in zip(node_states, pools, strict=True)]
        self._table, self._slots = cp.asarray(np.array(pairs, np.uint64)), slots
        batch, self._rows = node_states[0].shape[:2]
        self._state_bytes = pools[0].nbytes // len(pools[0])
        self._grid = (-(-self._state_bytes // 16384), batch, len(pairs))

    def __call__(self, accepted: Any) -> None:
        kernel("serial.cu", "scatter_states")(
            self._grid, (128,),
            (self._table, self._slots, accepted, np.int32(self._rows), np.int64(self._state_bytes)),
        )  # fmt: skip


def commit_index(accepted: Any, slot_table: Any) -> None:
    """Swap the accepted row's slot with the committed one, the last column of `slot_table` `[B, N + 1]`."""
    batch, columns = slot_table.shape
    kernel("cursors.cu", "commit_index")(
        (-(-batch // 128),), (128,), (accepted, slot_table, np.int32(columns - 1), np.int32(batch))
    )
