"""Launches of the closed-form family: verification over a log, the fold of rows into states, the cursors.

One layer's buffers are a `Layer`; what a batch keeps once for all layers (row lists, log lengths, masks) is a `Log`.
A step is `verify` for every layer, then one `advance` (or, without a log, one `fold` of all layers) for the model.
Nothing here waits for the GPU, so a step can be captured into a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_cupy.arrays import bf16_operand, gate_operands, row_pitch
from kernels_cupy.choice import plan_here
from kernels_cupy.compiler import kernel, load_cupy, multiprocessors, shared_bytes_per_cta
from kernels_cupy.launch import Launch
from kernels_cupy.plans import Problem, VerifyPlan
from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands

#: Warps of a CTA of `commit.cu`.
FOLD_WARPS = 4
_NO_ARRAY = np.uint64(0)


class Log:
    """Cursors of a batch, shared by all layers: which record rows are each request's log.

    `row_list` `[B, R]` is a permutation of a request's R record rows: its log first, then the rows that the next
    verification writes. `length` `[B]` counts the log rows. A request flushes inside a verification when
    `length > 0 and length + reserve > capacity`.
    """

    def __init__(self, batch: int, rows: int, capacity: int, reserve: int) -> None:
        if not 1 <= capacity <= 64:
            raise UsageError(f"a log of {capacity} rows; the CUDA kernels support 1 to 64")
        cp = load_cupy()
        self.rows, self.capacity, self.reserve = rows, capacity, reserve
        self.record_rows = capacity + rows
        self.row_list = cp.tile(cp.arange(self.record_rows, dtype=np.int32), (batch, 1))
        self.length = cp.zeros(batch, np.int32)

    def advance(self, accepted: Any, masks: Any) -> None:
        """Append the accepted paths after the verification of all layers; `accepted` `[B]` int32, -1 for none."""
        batch = len(self.length)
        kernel("cursors.cu", "advance")(
            (batch,), (32,),
            (accepted, masks, np.int32(_mask_pitch(masks)), self.row_list, self.length, np.int32(self.rows),
             np.int32(self.record_rows), np.int32(self.capacity), np.int32(self.reserve)),
        )  # fmt: skip


class Layer:
    """State pool and factor records of one layer: u `[B, R, HV, V]`, raw k `[B, R, HK, K]`, g `[B, R, HV]`."""

    def __init__(self, pool: Any, heads: LayerHeads, batch: int, record_rows: int, log_bf16: bool = False) -> None:
        cp = load_cupy()
        self.pool, self.heads, self.record_rows, self.log_bf16 = pool, heads, record_rows, log_bf16
        shape = (batch, record_rows, heads.value_heads, heads.value_dim)
        self.u = cp.full(shape, 0x7FC0, np.uint16) if log_bf16 else cp.full(shape, np.nan, np.float32)
        self.k = cp.full((batch, record_rows, heads.key_heads, heads.key_dim), 0x7FC0, np.uint16)
        self.g = cp.full(shape[:3], np.nan, np.float32)


def tree_masks(parent: Any) -> Any:
    """Ancestor masks `[T, N]` uint64 of parents `[N]` or `[T, N]` int32 on the GPU."""
    cp = load_cupy()
    parent = cp.ascontiguousarray(parent.reshape(-1, parent.shape[-1]), dtype=np.int32)
    masks = cp.empty(parent.shape, np.uint64)
    kernel("cursors.cu", "tree_masks")((len(parent),), (32,), (parent, masks, np.int32(parent.shape[1])))
    return masks


def _mask_pitch(masks: Any) -> int:
    """Elements between the masks of two requests: 0 when all requests share one tree."""
    return 0 if len(masks) == 1 else int(masks.shape[1])


class Verification:
    """One layer's operands, checked and ready: call it to launch, as often as wanted, also inside a graph capture.

    `chained` calls start beside the launch before (`Launch`). `early` is the share of the CTAs that work in the order
    of such launches in ordinary ones as well, for checks.
    """

    def __init__(
        self, layer: Layer, slots: Any, operands: Operands, masks: Any, output: Any, log: Log | None,
        norm_eps: float = 1e-6, plan: VerifyPlan | None = None, longest_path: int = 0, early: float = 0.0,
    ) -> None:  # fmt: skip
        heads = layer.heads
        q, k, v = (bf16_operand(getattr(operands, name), name) for name in "qkv")
        a, b = gate_operands(operands)
        batch, rows = q.shape[:2]
        log_rows = log.capacity if log else 0
        if plan is None:
            plan = plan_here(Problem(heads, rows, log_rows, layer.log_bf16, longest_path), batch)
        self.plan = plan
        pitches = [row_pitch(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        if max(2 * batch * rows * max(pitches), layer.u.nbytes, output.nbytes) >= 1 << 32:
            raise UsageError(
                f"a batch of {batch} with {rows} rows takes 4 GiB or more in one array; use a smaller batch"
            )
        if plan.requested_bytes > shared_bytes_per_cta():
            raise UsageError(
                f"{rows} rows with a log need {plan.requested_bytes} bytes of shared memory; fewer rows fit"
            )
        cursors = (log.length, log.row_list) if log else (_NO_ARRAY, _NO_ARRAY)
        limits = (log.capacity, log.reserve) if log else (0, 0)
        arguments = (
            q, k, v, *map(np.int32, pitches),
            a, b, np.int32(a.dtype == np.uint16), operands.A_log, operands.dt_bias, masks, np.int32(_mask_pitch(masks)),
            layer.pool, slots, layer.u, layer.k, layer.g, np.int32(layer.record_rows), *cursors, output,
            np.int32(rows), np.int32(heads.key_heads), np.int32(heads.value_heads),
            *map(np.int32, plan.arguments + limits), np.float32(norm_eps),
        )  # fmt: skip
        run = kernel(plan.file, plan.kernel, plan.requested_bytes, **plan.macros)
        grid, resident = plan.grid(batch), plan.resident_ctas
        ctas = None if resident is None else (round(early * math.prod(grid)), resident * multiprocessors())
        self._launch = Launch(run, grid, 32 * plan.warps, arguments, plan.requested_bytes, ctas)

    def __call__(self, chained: bool = False) -> None:
        self._launch(chained)


class Fold:
    """Folds rows of all layers into their states in one launch: an accepted path (bole) or the logs (flush)."""

    def __init__(
        self,
        layers: Sequence[Layer],
        slots: Any,
        tree_rows: int,
        norm_eps: float = 1e-6,
    ) -> None:
        cp = load_cupy()
        first = layers[0]
        self._layers = layers  # keeps the memory behind the pointers alive
        table = [[array.data.ptr for array in (layer.pool, layer.u, layer.k, layer.g)] for layer in layers]
        self._table = cp.asarray(np.array(table, np.uint64))
        self._slots, self._heads, self._tree_rows, self._norm_eps = slots, first.heads, tree_rows, norm_eps
        self._record_rows = first.record_rows
        self._macros = {
            "DIM": first.heads.key_dim, "STATE_BF16": int(first.heads.state_dtype == "bfloat16"),
            "LOG_BF16": int(first.log_bf16),
        }  # fmt: skip

    def path(self, accepted: Any, masks: Any) -> None:
        """Fold the path to each accepted row; record row t is tree row t."""
        self._launch(_NO_ARRAY, _NO_ARRAY, accepted, masks, _mask_pitch(masks), self._tree_rows)

    def log(self, log: Log) -> None:
        """Fold each request's log; the caller sets `log.length` to zero afterwards."""
        self._launch(log.length, log.row_list, _NO_ARRAY, _NO_ARRAY, 0, log.capacity)

    def _launch(self, length: Any, row_list: Any, accepted: Any, masks: Any, pitch: int, longest: int) -> None:
        heads = self._heads
        shared = 16 * -(-longest // 16) * heads.key_dim * 2
        kernel("commit.cu", "fold_rows", shared, **self._macros)(
            (heads.value_heads, len(self._slots), len(self._layers)), (32 * FOLD_WARPS,),
            (self._table, self._slots, np.int32(self._record_rows), length, row_list, accepted, masks, np.int32(pitch),
             np.int32(self._tree_rows), np.int32(heads.key_heads), np.int32(heads.value_heads),
             np.float32(self._norm_eps)),
            shared_mem=shared,
        )  # fmt: skip
