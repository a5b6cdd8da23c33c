"""Launches of the closed-form family: verification over a log, the fold of rows into states, the cursors.

One layer's buffers are a `Layer`; what a batch keeps once for all layers (row lists, log lengths, masks) is a `Log`.
A step is `verify` for every layer, then one `advance` (or, without a log, one `fold` of all layers) for the model.
Nothing here waits for the GPU, so a step can be captured into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_cupy.arrays import bf16_operand, gate_operands, row_pitch
from kernels_cupy.compiler import kernel, load_cupy, multiprocessors, shared_bytes_per_cta
from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands

WARPS = 4
#: Dynamic shared memory of one CTA on sm_90 and sm_100 (sm_80 has 163 KiB).
MAX_SHARED_BYTES = 227 * 1024
#: Paths of more rows keep L to 24 bits: 17 bits cost 2.6e-5 on 64 rows that write nearly one key without decay.
LONG_PATH = 16
_NO_ARRAY = np.uint64(0)


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """How one verification is cut into CTAs: the macros, the grid and the shared memory of `verify.cu`."""

    tiles: int
    log_blocks: int
    heads_per_cta: int
    value_shares: int
    head_dim: int
    state_bytes: int  # of one element
    log_bf16: bool = False
    long_path: bool = False

    @classmethod
    def choose(
        cls,
        heads: LayerHeads,
        rows: int,
        log_rows: int,
        batch: int,
        log_bf16: bool = False,
        multiprocessors: int = 132,
        shared_bytes: int = MAX_SHARED_BYTES,
        longest_path: int = 0,
    ) -> VerifyPlan:
        """The plan that should end first: preparing a CTA costs about as much as three tiles of a warp.

        More value heads per CTA share keys and Grams, fewer fill a small batch's idle multiprocessors. The GPU has
        `multiprocessors`, and `shared_bytes` for one CTA; `longest_path` bounds the rows of a path (0: all rows).
        """
        plans = cls.possible(heads, rows, log_rows, log_bf16, longest_path)
        fits = [plan for plan in plans if plan.shared_bytes <= shared_bytes] or plans[-1:]

        def cost(plan: VerifyPlan) -> float:
            waves = -(-plan.ctas(heads, batch) // (multiprocessors * plan.ctas_per_multiprocessor))
            tiles_per_warp = plan.heads_per_cta * plan.head_dim / (16 * WARPS * plan.value_shares)
            return waves * (2.6 + tiles_per_warp)

        return min(fits, key=cost)

    @classmethod
    def for_device(
        cls, heads: LayerHeads, rows: int, log_rows: int, batch: int, log_bf16: bool = False, longest_path: int = 0
    ) -> VerifyPlan:
        """The choice for the current GPU."""
        limits = multiprocessors(), shared_bytes_per_cta()
        return cls.choose(heads, rows, log_rows, batch, log_bf16, *limits, longest_path)

    @classmethod
    def possible(
        cls, heads: LayerHeads, rows: int, log_rows: int, log_bf16: bool = False, longest_path: int = 0
    ) -> list[VerifyPlan]:
        """Every way to cut a verification: value heads per CTA, or a head shared by two CTAs (the last)."""
        check_heads(heads)
        tiles = 1 if rows <= 8 else 2 * -(-rows // 16)
        log_blocks = (0, 1, 2, 4, 4)[-(-log_rows // 16)]
        group = heads.value_heads // heads.key_heads
        state_bytes = 4 if heads.state_dtype == "float32" else 2
        shapes = [(d, 1) for d in (4, 3, 2, 1) if group % d == 0]
        if heads.key_dim > 64:
            shapes.append((1, heads.key_dim // 64))
        long_path = (longest_path or rows) > LONG_PATH
        return [cls(tiles, log_blocks, d, n, heads.key_dim, state_bytes, log_bf16, long_path) for d, n in shapes]

    @property
    def l_parts(self) -> int:
        """bf16 parts of L."""
        return 3 if self.long_path else 2

    @property
    def macros(self) -> dict[str, int]:
        return {
            "TILES": self.tiles, "LOG_BLOCKS": self.log_blocks, "DIM": self.head_dim,
            "STATE_BF16": int(self.state_bytes == 2), "LOG_BF16": int(self.log_bf16),
            "L_PARTS": self.l_parts, "MIN_CTAS": self.ctas_per_multiprocessor,
        }  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """The layout of `verify.cu`: state tiles, keys and queries, weights, `Common`, `Head`."""
        rows, log_rows = 16 * ((self.tiles + 1) // 2), 16 * self.log_blocks
        columns = rows + log_rows
        stage = WARPS * 16 * self.head_dim * self.state_bytes
        key_rows = 8 if self.tiles == 1 else rows
        spare = 8 if self.tiles == 1 and not log_rows else 0  # read past the queries, never used
        keys = (2 * key_rows + log_rows + spare) * self.head_dim * 2
        blocks = rows // 16
        weights = 2 * (self.l_parts + 2) * (16 * blocks * (log_rows + 24) + 128 * blocks * (blocks - 1))
        common = 12 * rows + 8 * columns
        head = 13 * columns + 16 * rows + 4 * log_rows + 16
        return stage + keys + common + self.heads_per_cta * (weights + head)

    @property
    def ctas_per_multiprocessor(self) -> int:
        """CTAs that share the 228 KiB of a multiprocessor (1 KiB of each is the system's) and its registers."""
        by_registers = 4 if self.tiles <= 2 else 3 if self.tiles <= 4 else 2
        return min(228 * 1024 // (self.shared_bytes + 1024), by_registers) or 1

    def ctas(self, heads: LayerHeads, batch: int) -> int:
        return batch * heads.value_heads // self.heads_per_cta * self.value_shares


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
    """One layer's operands, checked and ready: call it to launch, as often as wanted, also inside a graph capture."""

    def __init__(
        self, layer: Layer, slots: Any, operands: Operands, masks: Any, output: Any, log: Log | None,
        norm_eps: float = 1e-6, plan: VerifyPlan | None = None, longest_path: int = 0,
    ) -> None:  # fmt: skip
        heads = layer.heads
        q, k, v = (bf16_operand(getattr(operands, name), name) for name in "qkv")
        a, b = gate_operands(operands)
        batch, rows = q.shape[:2]
        log_rows = log.capacity if log else 0
        plan = plan or VerifyPlan.for_device(heads, rows, log_rows, batch, layer.log_bf16, longest_path)
        self.plan = plan
        if plan.shared_bytes > shared_bytes_per_cta():
            raise UsageError(f"{rows} rows with a log need {plan.shared_bytes} bytes of shared memory; fewer rows fit")
        cursors = (log.length, log.row_list) if log else (_NO_ARRAY, _NO_ARRAY)
        limits = (log.capacity, log.reserve) if log else (0, 0)
        self._kernel = kernel("verify.cu", "verify", plan.shared_bytes, **plan.macros)
        self._grid = (heads.value_heads // plan.heads_per_cta * plan.value_shares, batch)
        self._arguments = (
            q, k, v, np.int32(row_pitch(q, "q")), np.int32(row_pitch(k, "k")), np.int32(row_pitch(v, "v")),
            a, b, np.int32(a.dtype == np.uint16), operands.A_log, operands.dt_bias, masks, np.int32(_mask_pitch(masks)),
            layer.pool, slots, layer.u, layer.k, layer.g, np.int32(layer.record_rows), *cursors, output,
            np.int32(rows), np.int32(heads.key_heads), np.int32(heads.value_heads), np.int32(plan.heads_per_cta),
            np.int32(plan.value_shares), *map(np.int32, limits), np.float32(norm_eps),
        )  # fmt: skip

    def __call__(self) -> None:
        self._kernel(self._grid, (32 * WARPS,), self._arguments, shared_mem=self.plan.shared_bytes)


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
            (heads.value_heads, len(self._slots), len(self._layers)), (32 * WARPS,),
            (self._table, self._slots, np.int32(self._record_rows), length, row_list, accepted, masks, np.int32(pitch),
             np.int32(self._tree_rows), np.int32(heads.key_heads), np.int32(heads.value_heads),
             np.float32(self._norm_eps)),
            shared_mem=shared,
        )  # fmt: skip


def check_heads(heads: LayerHeads) -> None:
    """Raise `UsageError` for head dimensions that the kernels do not have."""
    if heads.key_dim != heads.value_dim or heads.key_dim not in (64, 128):
        raise UsageError(
            f"head dimensions K = {heads.key_dim}, V = {heads.value_dim}; the CUDA kernels have K = V = 64 and 128"
        )
