"""Measured steps of the kernels beside their targets, the strongest public kernels and the time of their bytes.

A cell is `treelog` with one tree and batch at heads 16/32 of 128: plain decoding, chains and binary trees. Targets and
public times are `lab/data/kernel_targets.csv`, measured times the rows of a profile: phase `step`, µs a layer, timer
`chained` where the profile has such rows, with those of timer `graph` beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lab.data import read_csv
from lab.profiles.rows import KernelRow
from lab.trees import parse_tree

Verdict = Literal["met", "missed", "slower than public", "not measured"]

#: State types as the page names them.
STATES = {"float32": "fp32", "bfloat16": "bf16"}
HEADS = (16, 32)
HEAD_DIM = 128
#: Heads that are held against `HEADS`, at these batches, and how much longer than there a byte may take.
OTHER_HEADS = ((16, 48), (16, 64), (2, 8))
HEADS_BATCHES = (64, 128, 256, 512)
HEADS_TOLERANCE = 0.15


def us(value: float) -> str:
    """Microseconds with three digits, a tenth at least."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the tables: what verifies how many tree rows, the root included."""

    method: str
    tree: str
    rows: int
    kind: str

    @property
    def title(self) -> str:
        return "plain decode" if self.kind == "decode" else f"{self.kind} of {self.rows} rows"

    @classmethod
    def of(cls, kind: str, rows: int) -> Kernel:
        """The kernel of a kind (`decode`, `chain` or `tree`) and number of rows."""
        return cls("treelog", f"{'binary' if kind == 'tree' else 'chain'}:{rows - 1}", rows, kind)

    @classmethod
    def of_tree(cls, text: str) -> Kernel:
        """The kernel that verifies a tree (`chain:0`, `binary:15`)."""
        tree = parse_tree(text)
        kind = "tree" if not tree.is_chain else "chain" if tree.num_rows > 1 else "decode"
        return cls("treelog", text, tree.num_rows, kind)


@dataclass(frozen=True, slots=True)
class Cell:
    """One kernel at one batch. Times are µs per layer; None where the profile has no time.

    `measured_us` is judged. `alone_us` is the time of launches one after another beside that of chained ones; None in a
    profile without chained steps, whose times are all of launches one after another.
    """

    kernel: Kernel
    state_dtype: str
    batch: int
    target_us: float
    public_us: float
    public_kernel: str
    measured_us: float | None
    bytes_moved: int
    alone_us: float | None = None

    @property
    def verdict(self) -> Verdict:
        return self._verdict(self.measured_us)

    @property
    def alone_verdict(self) -> Verdict:
        return self._verdict(self.alone_us)

    def _verdict(self, time_us: float | None) -> Verdict:
        if time_us is None:
            return "not measured"
        if time_us > self.public_us:
            return "slower than public"
        return "met" if time_us <= self.target_us else "missed"

    def floor_us(self, bytes_per_s: float) -> float:
        """Time of the cell's bytes at a bandwidth."""
        return self.bytes_moved / bytes_per_s * 1e6


class Steps:
    """Steps of a profile with one timer, by method, tree, state type, heads and batch."""

    def __init__(self, rows: Iterable[KernelRow], timer: str = "graph") -> None:
        self.rows = tuple(row for row in rows if (row.phase, row.timer, row.head_dim) == ("step", timer, HEAD_DIM))
        self._by_place: Mapping[tuple[object, ...], KernelRow] = {
            (row.method, row.tree, row.state_dtype, row.key_heads, row.value_heads, row.batch): row for row in self.rows
        }

    def at(
        self, method: str, tree: str, state_dtype: str, batch: int, heads: tuple[int, int] = HEADS
    ) -> KernelRow | None:
        """The row of a step; None where it has no time."""
        row = self._by_place.get((method, tree, state_dtype, *heads, batch))
        return row if row and row.latency_us_p50 is not None else None


def cells(alone: Steps, chained: Steps) -> list[Cell]:
    """All cells of `kernel_targets.csv`, in its order; those of `alone` are judged where the profile has no others."""
    found = []
    for line in read_csv("kernel_targets.csv").iter_rows(named=True):
        kernel = Kernel.of(line["kind"], line["rows"])
        place = (kernel.method, kernel.tree, line["state_dtype"], line["batch"])
        row, beside = (chained.at(*place), alone.at(*place)) if chained.rows else (alone.at(*place), None)
        found.append(
            Cell(
                kernel,
                line["state_dtype"],
                line["batch"],
                line["target_us"],
                line["public_us"],
                line["public_kernel"],
                row.latency_us_p50 if row else None,
                next((step.bytes_moved for step in (row, beside) if step), 0),
                beside.latency_us_p50 if beside else None,
            )
        )
    return found


def grid(found: Iterable[Cell], state_dtype: str) -> dict[Kernel, list[Cell]]:
    """Cells of a state type by kernel, one per batch."""
    lines: dict[Kernel, list[Cell]] = {}
    for cell in found:
        if cell.state_dtype == state_dtype:
            lines.setdefault(cell.kernel, []).append(cell)
    return lines


@dataclass(frozen=True, slots=True)
class OtherHeads:
    """How much longer a byte takes with other heads than with `HEADS` (`base_batch`); None where not measured."""

    kernel: Kernel
    state_dtype: str
    heads: tuple[int, int]
    batch: int
    ratio: float | None

    @property
    def within(self) -> bool:
        return self.ratio is not None and round(self.ratio, 2) <= 1 + HEADS_TOLERANCE


def base_batch(heads: tuple[int, int], batch: int) -> int:
    """Requests with `HEADS` that a batch with other heads is compared with.

    A rank with fewer value heads is compared with as few value heads in all, since a smaller load leaves a GPU idle
    whatever its heads; one with more, which can only gain from them, with as many requests.
    """
    return batch * min(heads[1], HEADS[1]) // HEADS[1]


def other_heads(steps: Steps, kernels: Iterable[Kernel], state_dtype: str) -> Iterator[OtherHeads]:
    """Times over floors with `OTHER_HEADS` against those with `HEADS`, kernel by kernel."""

    def per_byte(kernel: Kernel, batch: int, heads: tuple[int, int]) -> float | None:
        row = steps.at(kernel.method, kernel.tree, state_dtype, batch, heads)
        return row.latency_us_p50 / row.bytes_moved if row and row.latency_us_p50 else None

    for kernel in kernels:
        for heads in OTHER_HEADS:
            for batch in HEADS_BATCHES:
                ours, base = per_byte(kernel, batch, heads), per_byte(kernel, base_batch(heads, batch), HEADS)
                yield OtherHeads(kernel, state_dtype, heads, batch, ours / base if ours and base else None)
