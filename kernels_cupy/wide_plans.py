"""How `wide.cu` cuts a verification: a CTA of one warpgroup takes some value heads of a key head, or a share of one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from kernels_cupy.plans import LONG_PATH, MULTIPROCESSOR_BYTES, SYSTEM_BYTES, Problem, VerifyPlan, check_heads

#: Most log rows and tree rows of `wide.cu`; fewer tree rows than the least would leave half of a product empty.
LOG_ROWS, LEAST_ROWS, MOST_ROWS = 16, 9, 64


@dataclass(frozen=True, slots=True)
class WidePlan(VerifyPlan):
    """`wide.cu`: a CTA takes `heads_per_cta` value heads one by one, or `value_shares` CTAs divide one head."""

    file: ClassVar[str] = "wide.cu"
    kernel: ClassVar[str] = "verify_wide"
    heads_per_cta: int = 1
    value_shares: int = 1
    resident: int = 2  # CTAs that the registers of a multiprocessor are divided among

    @property
    def name(self) -> str:
        return f"wide-h{self.heads_per_cta}-s{self.value_shares}-r{self.resident}"

    @property
    def rows(self) -> int:
        """Tree rows that the kernel is compiled for."""
        return next(rows for rows in (16, 32, 64) if self.problem.rows <= rows)

    @property
    def macros(self) -> dict[str, int]:
        problem = self.problem
        return {
            "ROWS": self.rows, "LOG_BLOCKS": problem.log_blocks, "DIM": problem.heads.key_dim,
            "STATE_BF16": int(problem.state_bytes == 2), "LOG_BF16": int(problem.log_bf16),
            "L_PARTS": self.l_parts, "HEADS": self.heads_per_cta,
            "SHARES": self.value_shares, "MIN_CTAS": self.resident,
        }  # fmt: skip

    @property
    def l_parts(self) -> int:
        """bf16 parts of L between blocks."""
        return 3 if self.rows > 32 and (self.problem.longest_path or self.problem.rows) > LONG_PATH else 2

    @property
    def shared_bytes(self) -> int:
        """The layout of `wide.cu`: keys and queries, the log's keys and weights, tiles, T, L and C, `Small`."""
        problem, rows, head_dim = self.problem, self.rows, self.problem.heads.key_dim
        log_rows, block = 16 * problem.log_blocks, min(rows, 32)
        keys = head_dim // 8 * (32 * rows + 16)
        tile = 16 * (4 * head_dim if problem.state_bytes == 4 else 2 * head_dim + 16)
        log = head_dim // 8 * 272 + 128 * rows if log_rows else 0
        parts = 2 if problem.log_bf16 else 3
        merged = rows == block and problem.state_bytes == 2
        inverse = max((4 if merged else 2) * parts * block, 4 * (block + 8)) * rows
        weights = 0 if merged else 4 * block * rows + (4 + 2 * self.l_parts) * block * block * (rows > block)
        small = (20 if rows > 32 else 16) * rows + 128
        head = 8 * (2 * rows + 16) + 16 * rows + 80
        return keys + log + 4 * tile + inverse + weights + small + self.heads_per_cta * head

    @property
    def requested_bytes(self) -> int:
        """So much that no more than `resident` CTAs fit: those of a small batch then spread over the GPU."""
        return max(self.shared_bytes, MULTIPROCESSOR_BYTES // (self.resident + 1) - SYSTEM_BYTES + 16)

    @property
    def warps(self) -> int:
        return 4

    @property
    def ctas_per_request(self) -> int:
        return self.problem.heads.value_heads * self.value_shares // self.heads_per_cta

    @property
    def resident_ctas(self) -> int:
        return self.resident

    @property
    def cut(self) -> tuple[int, ...]:
        return ()

    def grid(self, batch: int) -> tuple[int, ...]:
        """A CTA per share of a key head's value heads and request."""
        return self.problem.group * self.value_shares // self.heads_per_cta, self.problem.heads.key_heads, batch

    @property
    def fits(self) -> bool:
        """Whether a multiprocessor has the shared memory for as many CTAs as the registers are divided among."""
        return MULTIPROCESSOR_BYTES // (self.shared_bytes + SYSTEM_BYTES) >= self.resident


def wide_plans(problem: Problem) -> list[WidePlan]:
    """The ways that `wide.cu` cuts a verification; none if the tree or the log does not fit it."""
    check_heads(problem.heads)
    if not LEAST_ROWS <= problem.rows <= MOST_ROWS or problem.log_rows > LOG_ROWS:
        return []
    shapes = [(heads, 1) for heads in (1, 2, 3, 4) if problem.group % heads == 0]
    if problem.heads.key_dim == 128:
        shapes.append((1, 2))
    plans = [WidePlan(problem, *shape, resident) for shape, resident in itertools.product(shapes, (2, 3, 4, 5))]
    return [plan for plan in plans if plan.fits]
