"""The generated parts of `docs/kernels.md`, each a piece of Markdown made from a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lab.data import read_csv
from lab.profiles.folders import ROWS_FILE
from lab.profiles.rows import KernelRow, read_rows
from reports import evidence, kernelcounters
from reports.kernelcells import (
    HEADS,
    HEADS_BATCHES,
    HEADS_TOLERANCE,
    OTHER_HEADS,
    STATES,
    Cell,
    Steps,
    cells,
    grid,
    other_heads,
    us,
)
from reports.roofline import TENSOR_FLOPS

NONE = "–"
#: What the times of a profile with chained steps are.
CHAINED = (
    "These are times of *chained* launches: the launch before is that of another layer, of the same kernel, and a "
    "layer's launch starts before it ends. State and log are asked for by then, q, k, v and gates only when it has "
    "ended. *Alone* is the time of the same launches one after another. The public kernels' times are of launches "
    "without it."
)
#: What the gate judges: the factors u, the outputs of a verification, the committed states.
ERROR_KINDS = ("u", "output", "state")


@dataclass(frozen=True)
class Record:
    """A profile's folder and what the parts read of it."""

    folder: Path = evidence.H200

    @cached_property
    def device(self) -> dict[str, Any]:
        return evidence.device(self.folder)

    @property
    def bandwidth(self) -> float:
        """Copy bandwidth, bytes per second."""
        return float(self.device["copy_bandwidth_bytes_per_s"])

    @cached_property
    def rows(self) -> tuple[KernelRow, ...]:
        return read_rows(self.folder / ROWS_FILE)

    @cached_property
    def steps(self) -> Steps:
        """Steps whose launches run one after another."""
        return Steps(self.rows)

    @cached_property
    def chained_steps(self) -> Steps:
        return Steps(self.rows, "chained")

    @cached_property
    def cells(self) -> list[Cell]:
        return cells(self.steps, self.chained_steps)

    @property
    def chained(self) -> bool:
        """Whether cells are judged by chained steps, and have a time alone beside that."""
        return bool(self.chained_steps.rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    ruler = f"|{'---|' * len(header)}"
    head, *body = (f"| {' | '.join(line)} |" for line in (header, *rows))
    return "\n".join((head, ruler, *body))


def ceilings(record: Record) -> str:
    device, copied = record.device, record.bandwidth
    rows = [("copy bandwidth, read and written", f"{copied / 1e12:.2f} TB/s", "measured with the profile")]
    if read := device.get("read_bandwidth_bytes_per_s"):
        rows.append(("read bandwidth", f"{read / 1e12:.2f} TB/s", "measured with the profile"))
    rows.append(("bf16 tensor cores, dense", f"{TENSOR_FLOPS / 1e12:.0f} TFLOP/s", "data sheet"))
    rows.append(("both bind at", f"{TENSOR_FLOPS / copied:.0f} FLOP per byte", "tensor cores over copy bandwidth"))
    where = [device["name"], f"driver {device['driver']}" if device.get("driver") else "", device.get("date") or ""]
    text = f"{', '.join(filter(None, where))}, sources `{device['source_hash'][:12]}`."
    if reason := device.get("stale_reason"):
        text += f" Stale in part: {reason}."
    return f"{table(('ceiling', 'value', 'source'), rows)}\n\n{text}"


def score(record: Record) -> str:
    found = Counter(cell.verdict for cell in record.cells)
    text = (
        f"**{found['met']} of {len(record.cells)} cells meet their target, {found['slower than public']} of "
        f"{len(record.cells)} are slower than the strongest public kernel.**"
    )
    if missing := found["not measured"]:
        text += f" {missing} have no time in this profile."
    if record.chained:
        alone = Counter(cell.alone_verdict for cell in record.cells)
        text += f" Alone, {alone['met']} meet it and {alone['slower than public']} are slower.\n\n{CHAINED}"
    rows = []
    for state, name in STATES.items():
        for kernel, line in grid(record.cells, state).items():
            verdicts = Counter(cell.verdict for cell in line)
            gains = [cell.public_us / cell.measured_us for cell in line if cell.measured_us]
            gain = f"{min(gains):.2f} to {max(gains):.2f}" if gains else NONE
            counts = {
                "met": verdicts["met"],
                "missed, faster than public": verdicts["missed"],
                "slower than public": verdicts["slower than public"],
                "not measured": verdicts["not measured"],
            }
            if record.chained:
                counts["met alone"] = sum(cell.alone_verdict == "met" for cell in line)
            rows.append((f"{name} state, {kernel.title}", *(str(count or NONE) for count in counts.values()), gain))
    return f"{text}\n\n{table(('cells', *counts, 'public time over ours'), rows)}"


def targets(state: str) -> Callable[[Record], str]:
    """The table of cells of a state type."""

    def over_target(cell: Cell, time_us: float) -> str:
        ratio = f"{time_us / cell.target_us:.2f}"
        return f"{time_us / cell.target_us:.3f}" if ratio == "1.00" else ratio

    def cell_text(cell: Cell) -> str:
        public = f"{cell.public_us:g} {cell.public_kernel}"
        alone = f"<br>alone {us(cell.alone_us)} = {over_target(cell, cell.alone_us)}" if cell.alone_us else ""
        if cell.measured_us is None:
            return f"not measured / {cell.target_us:g}{alone}<br>{public}"
        ratio = over_target(cell, cell.measured_us)
        return f"**{us(cell.measured_us)}** / {cell.target_us:g} = {ratio}{alone}<br>{cell.verdict}<br>{public}"

    def part(record: Record) -> str:
        lines = grid(record.cells, state)
        return _by_batch(lines, cell_text)

    return part


def floors(record: Record) -> str:
    def cell_text(cell: Cell) -> str:
        if not cell.bytes_moved:
            return NONE
        floor = cell.floor_us(record.bandwidth)
        return f"{us(floor)}, {100 * floor / cell.measured_us:.0f} %" if cell.measured_us else f"{us(floor)}, {NONE}"

    parts = [f"{name} state:\n\n{_by_batch(grid(record.cells, state), cell_text)}" for state, name in STATES.items()]
    return "\n\n".join(parts)


def heads(record: Record) -> str:
    header = [
        "kernel",
        *(f"{keys}/{values}<br>batch {batch}" for keys, values in OTHER_HEADS for batch in HEADS_BATCHES),
    ]
    parts, all_found = [], []
    for state, name in STATES.items():
        rows = []
        for kernel in grid(record.cells, state):
            found = [other for other in other_heads(record.steps, [kernel], state) if other.ratio is not None]
            all_found += found
            by_place = {(other.heads, other.batch): other for other in found}
            line = [kernel.title]
            for pair in OTHER_HEADS:
                for batch in HEADS_BATCHES:
                    other = by_place.get((pair, batch))
                    text = f"{other.ratio:.2f}" if other else NONE
                    line.append(text if not other or other.within else f"**{text}**")
            rows.append(line)
        parts.append(f"{name} state:\n\n{table(header, rows)}")
    within = sum(other.within for other in all_found)
    others = "; the others are bold" if within < len(all_found) else ""
    goal = (
        f"**{within} of {len(all_found)} take at most {100 * HEADS_TOLERANCE:.0f} % longer per byte than heads "
        f"{HEADS[0]}/{HEADS[1]}**{others}."
    )
    return "\n\n".join([goal, *parts])


def errors(record: Record) -> str:
    limits = {(row["method"], row["state_dtype"]): row for row in read_csv("gate_limits.csv").iter_rows(named=True)}
    rows = []
    for worst in evidence.gate(record.folder):
        method, state = worst["name"].split()
        values = (
            f"{worst[kind]:.1e} / {limits[method, state][kind]:.1e}".replace(".0e-", "e-") if kind in worst else NONE
            for kind in ERROR_KINDS
        )
        rows.append((method, STATES[state], *values, str(worst["trees"])))
    found = table(("method", "state", *(f"{kind}: worst / limit" for kind in ERROR_KINDS), "trees"), rows)
    notes = (read(record.folder) for read in (evidence.chained, evidence.for_older_gpus))
    return "\n\n".join(filter(None, [found, *notes]))


def counters(record: Record) -> str:
    found = evidence.counters(record.folder)
    if not found:
        return "This profile has no counters: `python -m kernels_cupy.counters --out counters.json` takes them."
    lines = table(kernelcounters.HEADER, map(kernelcounters.line, found["cells"]))
    sentences = (kernelcounters.held_down(found), kernelcounters.lost(found, record.cells))
    return "\n\n".join(filter(None, [lines, " ".join(filter(None, sentences))]))


def _by_batch(lines: dict[Any, list[Cell]], text: Callable[[Cell], str]) -> str:
    batches = [str(cell.batch) for cell in next(iter(lines.values()))]
    header = ("kernel", *(f"batch {batch}" for batch in batches))
    return table(header, ([kernel.title, *map(text, line)] for kernel, line in lines.items()))


#: Parts by the name that their markers have on the page.
PARTS: dict[str, Callable[[Record], str]] = {
    "ceilings": ceilings,
    "score": score,
    "cells, fp32 state": targets("float32"),
    "cells, bf16 state": targets("bfloat16"),
    "floors": floors,
    "heads": heads,
    "errors": errors,
    "counters": counters,
}
