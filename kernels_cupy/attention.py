"""Launches verify attention: the rows of draft trees against a paged bfloat16 KV cache, grouped-query heads of 256.

The cache already holds the rows' own keys and values: a sequence of `seq_len` tokens ends with them, root first. A row
sees all tokens before the tree, and the rows of its ancestor mask. Both launches (the attention and the combination of
what several CTAs shared) read lengths, masks and block tables on the GPU, so they can be captured into a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from kernels_cupy.compiler import kernel, load_cupy, multiprocessors, shared_bytes_per_cta, source_text
from kernels_cupy.cubin import cubin_kernel
from lab.errors import UsageError
from lab.trees import MAX_ROWS

SOURCE = "attention.cu"
HEAD_DIM = 256
#: The one architecture with warpgroup products (`wgmma`).
WARPGROUP_ARCH = "sm_90a"
#: A page of the cache holds whole groups of so many tokens.
PAGE_GROUP = 16
#: Shared memory that the GPU keeps of every resident CTA.
RESERVED_BYTES = 1024
MAX_SLOTS = 6


class SharedMemory(NamedTuple):
    """Bytes of shared memory of a multiprocessor, and the most that one CTA can take."""

    per_multiprocessor: int
    per_cta: int


#: Hopper's and datacenter Blackwell's; what a plan assumes without a GPU.
HOPPER = SharedMemory(233_472, 232_448)


@cache
def shared_memory() -> SharedMemory:
    """What the current GPU has."""
    attributes = load_cupy().cuda.Device().attributes
    return SharedMemory(int(attributes["MaxSharedMemoryPerMultiprocessor"]), shared_bytes_per_cta())


@dataclass(frozen=True, slots=True)
class Layout:
    """Warps of a CTA: `row_groups` groups of 16 `m_tiles` query rows, `group_warps` warps each.

    A warp multiplies its group's rows with `warp_keys` keys of a tile, then with 256 / `group_warps` value dims.
    """

    m_tiles: int
    row_groups: int
    group_warps: int
    warp_keys: int
    warpgroups: int = 0

    @classmethod
    def of_warpgroups(cls, number: int) -> Layout:
        """Warpgroups of 64 rows each, Hopper's own matrix products: no warp shares its rows."""
        return cls(1, 4 * number, 1, 64, number)

    @property
    def rows(self) -> int:
        return 16 * self.m_tiles * self.row_groups

    @property
    def tile(self) -> int:
        return self.group_warps * self.warp_keys

    @property
    def threads(self) -> int:
        return 32 * self.row_groups * self.group_warps


FEW_ROWS = (Layout(1, 1, 4, 16), Layout(2, 1, 4, 16))
#: Layouts by whether warpgroup products are there.
LAYOUTS = {
    False: (*FEW_ROWS, Layout(2, 2, 2, 32), Layout(2, 3, 2, 32), Layout(2, 4, 2, 32)),
    True: (*FEW_ROWS, Layout.of_warpgroups(1), Layout.of_warpgroups(2)),
}


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How `query_rows` = rows x (query heads per KV head) are cut into blocks, and the variant that serves them."""

    layout: Layout
    row_blocks: int
    slots: int
    ctas: int

    @classmethod
    def choose(cls, query_rows: int, shared: SharedMemory = HOPPER, warpgroups: bool = False) -> AttentionPlan:
        """The layout whose blocks cover the rows with the least work; a block's read of the cache counts as 96 rows."""
        plans = [plan for layout in LAYOUTS[warpgroups] if (plan := cls.of(layout, query_rows, shared)) is not None]
        return min(plans, key=lambda plan: (plan.row_blocks * (plan.layout.rows + 96), plan.layout.rows))

    @classmethod
    def of(cls, layout: Layout, query_rows: int, shared: SharedMemory = HOPPER) -> AttentionPlan | None:
        """Two CTAs of four warps on a multiprocessor where their tiles fit, one otherwise; None where none fits.

        A warpgroup overlaps its own scores and outputs if its ring is long, and does better alone.
        """
        for ctas in (2, 1) if layout.threads <= 128 and not layout.warpgroups else (1,):
            budget = min(shared.per_multiprocessor // ctas - RESERVED_BYTES, shared.per_cta)
            slots = min((budget - _fixed_bytes(layout)) // _slot_bytes(layout), MAX_SLOTS)
            if slots >= 2:
                return cls(layout, math.ceil(query_rows / layout.rows), slots, ctas)
        return None

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA; checked by the kernel's static_assert."""
        return _fixed_bytes(self.layout) + self.slots * _slot_bytes(self.layout)

    @property
    def macros(self) -> dict[str, int]:
        common = {"SLOTS": self.slots, "MIN_CTAS": self.ctas, "EXPECTED_SHARED_BYTES": self.shared_bytes}
        if self.layout.warpgroups:
            return {"WARPGROUPS": self.layout.warpgroups, **common}
        return {
            "M_TILES": self.layout.m_tiles,
            "ROW_GROUPS": self.layout.row_groups,
            "GROUP_WARPS": self.layout.group_warps,
            "WARP_KEYS": self.layout.warp_keys,
            **common,
        }

    def kernel(self, name: str) -> Any:
        """A kernel of this variant, compiled for the current GPU."""
        shared_bytes = self.shared_bytes if name == "verify_attention" else 0
        if self.layout.warpgroups:
            return cubin_kernel(SOURCE, name, WARPGROUP_ARCH, shared_bytes, **self.macros)
        return kernel(SOURCE, name, shared_bytes, **self.macros)


def _slot_bytes(layout: Layout) -> int:
    return layout.tile * 2 * HEAD_DIM


def _fixed_bytes(layout: Layout) -> int:
    """Queries, weights (warpgroups keep theirs in registers), masks and row maxima."""
    weights = 0 if layout.warpgroups else 2 * layout.tile
    return layout.rows * (2 * HEAD_DIM + weights + 8 + 4 * layout.group_warps)


def plan_here(query_rows: int) -> AttentionPlan:
    """The plan for the current GPU."""
    return AttentionPlan.choose(query_rows, shared_memory(), load_cupy().cuda.Device().compute_capability == "90")


def kernel_hash() -> str:
    """Hash of the CUDA text of this kernel: what a record of it holds for."""
    return sha256(source_text(SOURCE).encode()).hexdigest()


def block_rows() -> list[int]:
    """Sizes of the blocks that the current GPU's plans pad query rows to."""
    return sorted({plan_here(rows).layout.rows for rows in range(1, 129)})


def bytes_moved(q_heads: int, kv_heads: int, rows: int, seq_lens: Any) -> int:
    """Bytes that one layer must move: keys and values of all tokens once, queries and outputs."""
    tokens = int(np.sum(seq_lens))
    return int(2 * 2 * HEAD_DIM * (kv_heads * tokens + q_heads * rows * len(seq_lens)))


class VerifyAttention:
    """One layer's launch on arrays that are read again at every call.

    q, output   [B, N, H, 256] bfloat16 bits, contiguous; output may not overlap q
    k, v        [pages, page tokens, HKV, 256] bfloat16 bits; pages and tokens evenly strided, alike in both
    block_table [B, P] int32: page of tokens p * page tokens, …
    seq_lens    [B] int32, the N rows of the tree included; 0 marks padding, whose output is left alone
    masks       [B, N] or [1, N] uint64 ancestor masks
    """

    def __init__(
        self, q: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, masks: Any, output: Any, *,
        scale: float = HEAD_DIM**-0.5, min_tiles: int = 1, plan: AttentionPlan | None = None, scratch: Any = None,
    ) -> None:  # fmt: skip
        self.batch, self.rows, q_heads, _ = q.shape
        self.kv_heads = k.shape[2]
        self._check(q, k, v, block_table, seq_lens, masks, output)
        self.group = q_heads // self.kv_heads
        self.plan = plan or plan_here(self.rows * self.group)
        self.operands = (q, k, v, block_table, seq_lens, masks, output)
        self.scale, self.min_tiles = scale, min_tiles
        self.ctas = self.plan.ctas * multiprocessors()
        self.scratch = scratch if scratch is not None else Scratch(self.ctas, self.plan.layout.rows, self.batch)

    def _check(self, q: Any, k: Any, v: Any, table: Any, seq_lens: Any, masks: Any, output: Any) -> None:
        page_tokens = k.shape[1]
        if q.shape[3] != HEAD_DIM or k.shape[3] != HEAD_DIM:
            raise UsageError(f"heads are {q.shape[3]} and {k.shape[3]} wide; verify attention serves {HEAD_DIM}")
        if not 1 <= self.rows <= MAX_ROWS:
            raise UsageError(f"q has {self.rows} rows per request; allowed are 1 to {MAX_ROWS}")
        if q.shape[2] % self.kv_heads:
            raise UsageError(f"{q.shape[2]} query heads cannot share {self.kv_heads} KV heads evenly")
        if page_tokens % PAGE_GROUP:
            raise UsageError(f"a page holds {page_tokens} tokens; a multiple of {PAGE_GROUP} is needed")
        if k.shape != v.shape or k.strides != v.strides:
            raise UsageError(f"k and v differ: shapes {k.shape}, {v.shape}, strides {k.strides}, {v.strides}")
        if k.strides[3] != 2 or k.strides[2] != 2 * HEAD_DIM or k.strides[1] % 16 or k.strides[0] % 16:
            raise UsageError(f"the cache has strides {k.strides}; heads and dims must be contiguous, tokens 16-aligned")
        for name, x, dtype in (("q", q, np.uint16), ("output", output, np.uint16), ("block_table", table, np.int32),
                               ("seq_lens", seq_lens, np.int32), ("masks", masks, np.uint64)):  # fmt: skip
            if x.dtype != dtype or not x.flags.c_contiguous:
                raise UsageError(f"operand {name} is {x.dtype}; a contiguous array of {np.dtype(dtype)} is needed")
        if output.shape != q.shape or len(table) != self.batch or len(seq_lens) != self.batch:
            raise UsageError("output, block_table and seq_lens must have a row for every request of q")
        if masks.shape not in ((self.batch, self.rows), (1, self.rows)):
            raise UsageError(f"masks has shape {masks.shape}; ({self.batch} or 1, {self.rows}) is needed")

    def __call__(self) -> None:
        q, k, v, table, seq_lens, masks, output = self.operands
        plan, layout, scratch = self.plan, self.plan.layout, self.scratch
        self._attend(
            (self.ctas,), (layout.threads,),
            (
                q, np.int32(q.shape[2] * HEAD_DIM), k, v, np.int64(k.strides[0] // 2), np.int32(k.strides[1] // 2),
                np.int32(k.shape[1]), table, np.int32(table.shape[1]), seq_lens, masks,
                np.int32(0 if len(masks) == 1 else self.rows), output, scratch.part, scratch.sums, scratch.plan,
                np.int32(self.batch), np.int32(self.rows), np.int32(self.kv_heads), np.int32(self.group),
                np.int32(plan.row_blocks), np.int32(self.min_tiles), np.float32(self.scale / math.log(2)),
            ),
            shared_mem=plan.shared_bytes,
        )  # fmt: skip
        query_rows = self.batch * self.kv_heads * self.rows * self.group
        warps = self.warps_per_row
        self._combine(
            (math.ceil(query_rows * warps / 8),), (256,),
            (
                scratch.part, scratch.sums, scratch.plan, seq_lens, output, np.int32(self.batch), np.int32(self.rows),
                np.int32(self.kv_heads), np.int32(self.group), np.int32(plan.row_blocks), np.int32(warps),
            ),
        )  # fmt: skip

    @property
    def warps_per_row(self) -> int:
        """Warps that combine one row: as many as an item has parts, at most 8."""
        parts = self.ctas / (self.batch * self.kv_heads * self.plan.row_blocks)
        return int(min(8, 2 ** round(math.log2(max(parts / 4, 1)))))

    @cached_property
    def _attend(self) -> Any:
        return self.plan.kernel("verify_attention")

    @cached_property
    def _combine(self) -> Any:
        return self.plan.kernel("combine_attention")


class Scratch:
    """Parts of items that several CTAs share, and where each request begins; serves launches one after another."""

    def __init__(self, ctas: int, block_rows: int, batch: int) -> None:
        cp = load_cupy()
        self.part = cp.full((2 * ctas, block_rows, HEAD_DIM), np.nan, np.float32)
        self.sums = cp.full((2 * ctas, block_rows, 2), np.nan, np.float32)
        self.plan = cp.zeros(batch + 1, np.int32)
