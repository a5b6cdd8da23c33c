"""How `lanes.cu` cuts a verification of one to four rows: tiles of value rows in the registers of a warp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels_cupy.plans import Problem, VerifyPlan, check_heads

#: Most tree rows and log rows of `lanes.cu`.
ROWS, LOG_ROWS = 4, 16
#: More rows than these have a warp each that makes what the row has with the others.
SPREAD_ROWS = 2


@dataclass(frozen=True, slots=True)
class LanesPlan(VerifyPlan):
    """`lanes.cu`: every warp takes some tiles of one value head; the warps of a CTA share a key head."""

    file: ClassVar[str] = "lanes.cu"
    kernel: ClassVar[str] = "verify_lanes"
    warps_per_cta: int = 4
    tile_rows: int = 16
    tiles_per_warp: int = 1
    resident_warps: int = 16  # that the registers of a multiprocessor are divided among

    @property
    def name(self) -> str:
        return f"lanes-w{self.warps}-r{self.tile_rows}-t{self.tiles_per_warp}-c{self.resident_warps}"

    @property
    def warps(self) -> int:
        return self.warps_per_cta

    @property
    def rows_per_cta(self) -> int:
        """Value rows of a CTA, of one value head or several."""
        return self.warps * self.tile_rows * self.tiles_per_warp

    @property
    def macros(self) -> dict[str, int]:
        problem = self.problem
        return {
            "ROWS": problem.rows, "LOG_BLOCKS": problem.log_blocks, "DIM": problem.heads.key_dim,
            "STATE_BF16": int(problem.state_bytes == 2), "LOG_BF16": int(problem.log_bf16),
            "WARPS": self.warps, "TILE_ROWS": self.tile_rows, "TILES": self.tiles_per_warp,
            "MIN_CTAS": max(self.resident_warps // self.warps, 1),
        }  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """The layout of `lanes.cu`: dots of the tree, dots and keys of the log, the log's u of each warp's tile."""
        rows = self.problem.rows
        tree = 32 * (rows + 1) if rows > SPREAD_ROWS else 0
        if not self.problem.log_blocks:
            return tree
        dots, keys = 4 * LOG_ROWS * (2 * rows + 1), 2 * LOG_ROWS * self.problem.heads.key_dim
        return tree + dots + keys + 4 * LOG_ROWS * self.warps * self.tile_rows

    @property
    def ctas_per_request(self) -> int:
        heads = self.problem.heads
        return heads.value_heads * heads.key_dim // self.rows_per_cta

    @property
    def cut(self) -> tuple[int, ...]:
        return (self.problem.group,)

    @property
    def divides(self) -> bool:
        """Whether whole warps make up a value head, whole CTAs the value heads of a key head."""
        head_dim = self.problem.heads.key_dim
        of_warp = self.tile_rows * self.tiles_per_warp
        whole = head_dim % of_warp == 0 and self.problem.group * head_dim % self.rows_per_cta == 0
        return whole and (self.problem.rows <= SPREAD_ROWS or self.warps >= self.problem.rows)

    def grid(self, batch: int) -> tuple[int, ...]:
        """A CTA per share of a key head's value heads and request."""
        key_heads = self.problem.heads.key_heads
        return self.ctas_per_request // key_heads, key_heads, batch


#: Cuts that have won somewhere, or nearly: warps, value rows of a tile, tiles of a warp, resident warps.
LANES_CUTS = ((4, 8, 1, 8), (4, 8, 2, 16), (4, 16, 1, 16), (4, 8, 4, 20), (8, 4, 1, 8))


def takes(problem: Problem) -> bool:
    """Whether `lanes.cu` has the problem's tree and log."""
    return problem.rows <= ROWS and problem.log_rows <= LOG_ROWS


def lanes_plans(problem: Problem) -> list[LanesPlan]:
    """The ways that `lanes.cu` cuts a verification; none if the tree or the log is too large for it."""
    check_heads(problem.heads)
    if not takes(problem):
        return []
    return [plan for cut in LANES_CUTS if (plan := LanesPlan(problem, *cut)).divides]
