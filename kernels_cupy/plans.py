"""How one verification is cut into CTAs: the kernel, its macros, the grid and the shared memory.

Four kernels verify. `verify.cu` takes every tree and log (`BlockPlan`); `stream.cu` takes up to 16 rows over a log of
up to 16 rows, or 32 record rows in all, with warps that work alone (`StreamPlan`); `lanes.cu` takes up to 4 rows over a
log of up to 16, without tensor cores (`LanesPlan`, in `kernels_cupy.lanes_plans`); `wide.cu` takes larger trees on some
GPUs (`WidePlan`, in `kernels_cupy.wide_plans`). All read and write the same records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lab.errors import UsageError
from lab.methods.base import LayerHeads

#: Shared memory of a multiprocessor of sm_90 and sm_100; each CTA takes 1 KiB more than it asks for.
MULTIPROCESSOR_BYTES, SYSTEM_BYTES = 228 * 1024, 1024
#: Dynamic shared memory of one CTA there (sm_80 has 163 KiB).
MAX_SHARED_BYTES = MULTIPROCESSOR_BYTES - SYSTEM_BYTES
#: Paths of more rows keep L to 24 bits: 17 bits cost 2.6e-5 on 64 rows that write nearly one key without decay.
LONG_PATH = 16
#: Most tree rows of `stream.cu`, and most log rows beside so many tree rows.
STREAM_ROWS = 16
#: Most record rows, of tree and log, where the log has more: a lane holds one entry of the row list.
STREAM_RECORD_ROWS = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """What decides between plans beside the batch: heads, tree rows, rows of the log, the longest path."""

    heads: LayerHeads
    rows: int
    log_rows: int
    log_bf16: bool = False
    longest_path: int = 0  # 0: all rows

    @property
    def log_blocks(self) -> int:
        """Blocks of 16 log rows, as the kernels are compiled for."""
        return (0, 1, 2, 4, 4)[-(-self.log_rows // 16)]

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of a state."""
        return 4 if self.heads.state_dtype == "float32" else 2

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.heads.value_heads // self.heads.key_heads


@dataclass(frozen=True, slots=True)
class VerifyPlan(ABC):
    """One way to cut a verification."""

    file: ClassVar[str]
    kernel: ClassVar[str]
    problem: Problem

    @property
    @abstractmethod
    def name(self) -> str:
        """How a table of plans calls it, such as `block-h2-s1` or `stream-w4-t4-s1-r16`."""

    @property
    @abstractmethod
    def macros(self) -> dict[str, int]: ...

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, as the source lays it out."""

    @property
    def requested_bytes(self) -> int:
        """Dynamic shared memory that a CTA asks for: what it needs, or more to have fewer CTAs in a multiprocessor."""
        return self.shared_bytes

    @property
    @abstractmethod
    def warps(self) -> int: ...

    @property
    @abstractmethod
    def ctas_per_request(self) -> int: ...

    @property
    def resident_ctas(self) -> int | None:
        """CTAs that a multiprocessor runs at a time; None where the kernel takes no `early_ctas`."""
        return None

    def grid(self, batch: int) -> tuple[int, ...]:
        """CTAs of the launch."""
        return self.ctas_per_request, batch

    @property
    @abstractmethod
    def cut(self) -> tuple[int, ...]:
        """What of the kernel's arguments says how the work is cut, whatever the heads."""

    @property
    def arguments(self) -> tuple[int, ...]:
        """The kernel's arguments that say how the work is cut."""
        return self.cut


@dataclass(frozen=True, slots=True)
class BlockPlan(VerifyPlan):
    """`verify.cu`: a CTA of 4, 8 or 16 warps takes some value heads of a key head, or half of one."""

    file = "verify.cu"
    kernel = "verify"
    heads_per_cta: int = 1
    value_shares: int = 1
    warps_per_cta: int = 4

    @property
    def name(self) -> str:
        return f"block-h{self.heads_per_cta}-s{self.value_shares}" + (f"-w{self.warps}" if self.warps > 4 else "")

    @property
    def tiles(self) -> int:
        """Tiles of 8 tree rows."""
        rows = self.problem.rows
        return 1 if rows <= 8 else 2 * -(-rows // 16)

    @property
    def l_parts(self) -> int:
        """bf16 parts of L."""
        return 3 if (self.problem.longest_path or self.problem.rows) > LONG_PATH else 2

    @property
    def warps(self) -> int:
        return self.warps_per_cta

    @property
    def macros(self) -> dict[str, int]:
        problem = self.problem
        return {
            "TILES": self.tiles, "LOG_BLOCKS": problem.log_blocks, "DIM": problem.heads.key_dim,
            "STATE_BF16": int(problem.state_bytes == 2), "LOG_BF16": int(problem.log_bf16),
            "L_PARTS": self.l_parts, "WARPS": self.warps, "MIN_CTAS": self.ctas_per_multiprocessor,
        }  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """The layout of `verify.cu`: state tiles, keys and queries, weights, `Common`, `Head`."""
        head_dim = self.problem.heads.key_dim
        rows, log_rows = 16 * ((self.tiles + 1) // 2), 16 * self.problem.log_blocks
        columns = rows + log_rows
        stage = self.warps * 16 * head_dim * self.problem.state_bytes
        key_rows = 8 if self.tiles == 1 else rows
        spare = 8 if self.tiles == 1 and not log_rows else 0  # read past the queries, never used
        keys = (2 * key_rows + log_rows + spare) * head_dim * 2
        blocks = rows // 16
        weights = 2 * (self.l_parts + 2) * (16 * blocks * (log_rows + 24) + 128 * blocks * (blocks - 1))
        common = 12 * rows + 12 * columns
        head = 13 * columns + 16 * rows + 4 * log_rows + 16
        return stage + keys + common + self.heads_per_cta * (weights + head)

    @property
    def ctas_per_multiprocessor(self) -> int:
        """CTAs that share the shared memory and the registers of a multiprocessor."""
        by_registers = (16 if self.tiles <= 4 else 8) // self.warps
        return min(MULTIPROCESSOR_BYTES // (self.shared_bytes + SYSTEM_BYTES), by_registers) or 1

    @property
    def ctas_per_request(self) -> int:
        return self.problem.heads.value_heads // self.heads_per_cta * self.value_shares

    @property
    def cut(self) -> tuple[int, ...]:
        return self.heads_per_cta, self.value_shares


@dataclass(frozen=True, slots=True)
class StreamPlan(VerifyPlan):
    """`stream.cu`: every warp takes some tiles of one value head; the warps of a CTA share a key head."""

    file = "stream.cu"
    kernel = "verify_stream"
    warps_per_cta: int = 4
    tiles_per_warp: int = 1
    stages: int = 1
    resident_warps: int = 16
    halved: int = 0  # CTAs that become two with half as many tiles: those of the last requests

    @property
    def name(self) -> str:
        name = f"stream-w{self.warps}-t{self.tiles_per_warp}-s{self.stages}-r{self.resident_warps}"
        return f"{name}-h{self.halved}" if self.halved else name

    @property
    def groups(self) -> int:
        """Groups of four tree rows, as the kernel is compiled for."""
        return (1, 2, 4, 4)[(self.problem.rows - 1) // 4]

    @property
    def warps(self) -> int:
        return self.warps_per_cta

    @property
    def warp_bytes(self) -> int:
        """A warp's own: state tiles, and places of v and of the log's u for a tile."""
        tile = 16 * self.problem.heads.key_dim * self.problem.state_bytes
        side = 128 * self.groups + 16 * self.problem.log_blocks * (32 if self.problem.log_bf16 else 64)
        return self.stages * tile + max(self.stages, 2) * side

    @property
    def heads_per_cta(self) -> int:
        """Value heads of a CTA; 1 also for a share of a head."""
        return max(16 * self.warps * self.tiles_per_warp // self.problem.heads.key_dim, 1)

    @property
    def macros(self) -> dict[str, int]:
        problem = self.problem
        return {
            "GROUPS": self.groups, "LOG_BLOCKS": problem.log_blocks, "DIM": problem.heads.key_dim,
            "STATE_BF16": int(problem.state_bytes == 2), "LOG_BF16": int(problem.log_bf16),
            "WARPS": self.warps, "STAGES": self.stages, "MIN_CTAS": self.resident_ctas,
            **({"HALVED": 1} if self.halved else {}),
        }  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """The layout of `stream.cu`: tiles of each warp, keys, `Scales`, `Head` of each value head, fold weights."""
        rows, head_dim = 4 * self.groups, self.problem.heads.key_dim
        log_rows = 16 * self.problem.log_blocks
        keys = (2 * rows + log_rows) * head_dim * 2 + 8 * rows + max(4 * log_rows, 64)
        blocks = 6 if self.groups == 4 else self.groups
        head = 16 * rows + 512 * blocks + 8 * rows * rows + 512 * self.groups * self.problem.log_blocks
        fold = 4 * (log_rows + 4) if log_rows else 0
        return self.warps * (self.warp_bytes + fold) + keys + self.heads_per_cta * head

    @property
    def ctas_per_request(self) -> int:
        heads = self.problem.heads
        return heads.value_heads * (heads.key_dim // 16) // (self.warps * self.tiles_per_warp)

    @property
    def cut(self) -> tuple[int, ...]:
        return self.problem.group, self.tiles_per_warp

    @property
    def arguments(self) -> tuple[int, ...]:
        return *self.cut, self.halved_requests

    @property
    def halved_requests(self) -> int:
        """The last requests, whose CTAs are halved; of a smaller batch all are."""
        return -(-self.halved // self.ctas_per_request)

    @property
    def divides(self) -> bool:
        """Whether the CTAs, and halves of them, take whole value heads of a key head or shares of one."""
        head_tiles = self.problem.heads.key_dim // 16

        def whole(tiles: int) -> bool:
            heads = self.warps * tiles // head_tiles if tiles < head_tiles else 0
            return heads <= 2 and (self.warps * tiles % head_tiles == 0 or head_tiles % (self.warps * tiles) == 0)

        tiles = self.tiles_per_warp
        cuts = whole(tiles) and self.problem.group * head_tiles % (self.warps * tiles) == 0
        return cuts and (not self.halved or (tiles % 2 == 0 and whole(tiles // 2)))

    @property
    def resident_ctas(self) -> int:
        return max(self.resident_warps // self.warps, 1)

    @property
    def fits(self) -> bool:
        """Whether a multiprocessor has the shared memory for as many warps as the registers are divided among."""
        return MULTIPROCESSOR_BYTES // (self.shared_bytes + SYSTEM_BYTES) >= self.macros["MIN_CTAS"]

    def grid(self, batch: int) -> tuple[int, ...]:
        """A CTA per share of a key head and request, two for the last requests."""
        key_heads = self.problem.heads.key_heads
        return self.ctas_per_request // key_heads, key_heads, batch + min(self.halved_requests, batch)


def block_plans(problem: Problem) -> list[BlockPlan]:
    """Every way that `verify.cu` cuts a verification: value heads per CTA, or a head shared by two CTAs (the last)."""
    check_heads(problem.heads)
    shapes = [(d, 1) for d in (4, 3, 2, 1) if problem.group % d == 0]
    head_rows = problem.heads.key_dim
    if head_rows > 64:
        shapes.append((1, head_rows // 64))
    return [
        BlockPlan(problem, heads, shares, warps)
        for warps in ((16, 8, 4) if problem.rows > 16 else (4,))
        for heads, shares in shapes
        if heads * head_rows // shares % (16 * warps) == 0
    ]


#: Cuts of `stream.cu` that have won somewhere, or nearly: warps and tiles per warp, stages and resident warps, CTAs
#: that are halved (most often best: some 500, as many as run at a time).
STREAM_CUTS = (
    (4, 4, 1, 16), (4, 4, 1, 12), (4, 4, 2, 16), (4, 4, 2, 12), (4, 4, 1, 20), (3, 8, 1, 15), (3, 8, 1, 12),
    (2, 4, 1, 16), (2, 4, 1, 12), (2, 2, 1, 16), (4, 2, 1, 16), (4, 2, 1, 12), (4, 1, 1, 16), (4, 1, 1, 12),
    (2, 1, 1, 12), (8, 1, 1, 8), (4, 4, 1, 20, 512), (4, 4, 1, 16, 512), (4, 4, 1, 16, 256), (4, 4, 2, 16, 512),
    (4, 4, 1, 12, 512), (4, 4, 1, 24), (4, 4, 1, 24, 512), (4, 4, 1, 24, 256),
    (2, 4, 1, 20), (2, 4, 1, 24), (4, 2, 1, 20), (4, 2, 1, 24), (3, 8, 1, 24),
)  # fmt: skip


def stream_plans(problem: Problem) -> list[StreamPlan]:
    """The ways that `stream.cu` cuts a verification; none if the tree or the log is too large for it.

    A CTA takes whole value heads of one key head, or a share of one; the kernel has barriers for two that are shared.
    """
    check_heads(problem.heads)
    most_log_rows = max(STREAM_ROWS, STREAM_RECORD_ROWS - problem.rows)
    if problem.rows > STREAM_ROWS or problem.log_rows > most_log_rows:
        return []
    head_tiles = problem.heads.key_dim // 16
    plans = []
    for warps, tiles, *rest in STREAM_CUTS:
        plan = StreamPlan(problem, warps, min(tiles, head_tiles), *rest)
        if plan.divides and plan.fits and plan not in plans:
            plans.append(plan)
    return plans


def check_heads(heads: LayerHeads) -> None:
    """Raise `UsageError` for head dimensions that the kernels do not have."""
    if heads.key_dim != heads.value_dim or heads.key_dim not in (64, 128):
        raise UsageError(
            f"head dimensions K = {heads.key_dim}, V = {heads.value_dim}; the CUDA kernels have K = V = 64 and 128"
        )
