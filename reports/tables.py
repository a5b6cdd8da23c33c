"""The tables of a report as rows of ready text: best configurations, knees, ratios, ledgers, cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.units import GIB, MIB
from reports.accuracy import TIE
from reports.answers import BASELINE, Knee, Mark, best_at, knees
from reports.data import Cell, Group
from reports.ledgers import LedgerEntry
from reports.text import DASH, number, percent, plain, quotient, ratio, significant

#: Columns of the ratio table; every ratio is above 1 where the method is better than storeall.
RATIO_COLUMNS = ("output throughput", "peak KV reduction", "p99 TTFT gain", "mean TPOT gain", "batch ratio")


@dataclass(frozen=True, slots=True)
class BestEntry:
    """The best configuration at one point: method and tree, methods tied with it, figure, ratio to storeall.

    `figure` is what ranks: output tokens/s, or mean TPOT in an open loop. `notes`: ties, a lowered running limit.
    """

    method: str
    tree: str
    notes: tuple[str, ...]
    figure: str
    gain: str
    mark: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio as text, with `better`, `worse` or `tie`."""

    text: str
    mark: str


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One method at one load against storeall with the same tree and budget; `span`: rows of this load, or 0."""

    load: str
    span: int
    method: str
    throughput: str
    ratios: tuple[Ratio, ...]
    records: str
    limit: str
    baseline_limit: str


@dataclass(frozen=True, slots=True)
class RatioBody:
    """The ratio rows of one budget and tree; `note` says why there are none."""

    budget: float
    tree: str
    rows: tuple[RatioRow, ...]
    note: str


def best_rows(group: Group, budget: float) -> list[tuple[str, BestEntry | None]]:
    """Per load: the best configuration at a memory budget; None where nothing finished, or nothing keeps up."""
    return [(load_text(group, load), _best_entry(group, budget, load)) for load in group.loads]


def knee_rows(group: Group) -> list[tuple[Knee, list[tuple[str, str]]]]:
    """Per method and tree: load and limit at each budget, as `answers.Mark` tells them."""
    return [(knee, [_mark_text(group, knee.marks.get(budget)) for budget in group.budgets]) for knee in knees(group)]


def ratio_bodies(group: Group) -> list[RatioBody]:
    """One body of ratio rows per memory budget and tree."""
    bodies = []
    for budget in group.budgets:
        for tree in group.trees:
            rows = tuple(row for load in group.loads for row in _ratio_rows(group, budget, tree, load))
            note = "" if rows else _why_no_ratios(group, budget, tree)
            bodies.append(RatioBody(budget, tree, rows, note))
    return bodies


#: Columns of the table of ledgers after method and tree, by engine.
LEDGER_COLUMNS: dict[str, tuple[str, ...]] = {
    "vllm": (
        "pool, GiB",
        "blocks",
        "tokens per block",
        "MiB per block",
        "blocks per request",
        "KV tokens",
        "maximum concurrency",
        "blocks from",
    ),
    "sglang": (
        "pools, GiB",
        "state slots",
        "MiB per slot",
        "slots per request",
        "running requests",
        "KV tokens",
        "maximum concurrency",
        "radix cache",
    ),
}


def ledger_columns(group: Group) -> tuple[str, ...]:
    """Columns of the table of a group's ledgers."""
    return LEDGER_COLUMNS.get(group.cells[0].engine, LEDGER_COLUMNS["vllm"])


def ledger_table(entries: Sequence[LedgerEntry]) -> list[tuple[LedgerEntry, list[str]]]:
    """Per ledger the columns of `LEDGER_COLUMNS`."""
    return [
        (
            entry,
            [
                number(entry.pool_bytes / GIB, 2),
                number(entry.num_gpu_blocks),
                number(entry.block_size_tokens),
                number(entry.bytes_per_block / MIB, 2),
                number(entry.blocks_per_request, 0 if float(entry.blocks_per_request).is_integer() else 1),
                number(entry.kv_cache_tokens),
                number(entry.max_concurrency, 2),
                entry.gpu_blocks_source,
            ]
            if entry.slots is None
            else [
                number(entry.pool_bytes / GIB, 2),
                number(entry.slots.max_mamba_cache_size),
                number(entry.slots.bytes_per_state_slot / MIB, 2),
                number(entry.slots.state_slots_per_request),
                number(entry.slots.max_running_requests),
                number(entry.kv_cache_tokens),
                number(entry.max_concurrency, 2),
                entry.slots.mamba_radix_cache_strategy,
            ],
        )
        for entry in entries
    ]


#: Columns of the table of all cells after method and tree; `load` stands for the axis of load.
CELL_COLUMNS = (
    "memory budget",
    "load",
    "counted",
    "output tokens/s",
    "p99 TTFT, ms",
    "mean TPOT, ms",
    "tokens a step",
    "may run",
    "peak running",
    "blocks at the peak, GiB",
    "records reserved, GiB",
    "preemptions",
    "waits for memory",
    "waits for running limit",
    "waits for token budget",
    "limit",
    "steps extrapolated",
)


def cell_columns(group: Group) -> tuple[str, ...]:
    """Columns of the table of a group's cells."""
    return (*CELL_COLUMNS, "prefix cache hit rate") if group.caches else CELL_COLUMNS


def cell_table(group: Group) -> list[tuple[Cell, list[str]]]:
    """Every cell with its main figures."""
    return [
        (
            cell,
            [
                plain(cell.gpu_memory_utilization),
                load_text(group, group.load(cell)),
                number(cell.completed),
                significant(cell.output_throughput),
                significant(cell.p99_ttft_ms),
                number(cell.mean_tpot_ms, 1),
                number(cell.step_tokens, 2),
                number(cell.running_limit),
                number(cell.peak_running),
                number(cell.blocks_gib, 1),
                number(cell.reserved_records_gib, 1),
                number(cell.num_preemptions),
                percent(cell.memory_limited_steps),
                percent(cell.seqs_limited_steps),
                percent(cell.budget_limited_steps),
                limit_text(cell),
                percent(cell.extrapolated_steps),
                *([percent(cell.prefix_cache_hit_rate)] if group.caches else []),
            ],
        )
        for cell in group.cells
    ]


def limit_text(cell: Cell) -> str:
    """What limits a cell, and whether it keeps up."""
    return f"{cell.limit}, saturated" if cell.saturated else cell.limit


def load_text(group: Group, load: float) -> str:
    return "trace" if group.load_field == "none" else plain(load)


def _best_entry(group: Group, budget: float, load: float) -> BestEntry | None:
    best = best_at(group, budget, load)
    if best is None:
        return None
    top, tied = best.top, [cell.state_method for cell in best.winners[1:]]
    fallen = best.by_latency and best.baseline is not None and best.baseline.saturated
    notes = [f"tie: {', '.join(tied)}"] if tied else []
    notes += [f"at most {top.running_limit} at once"] if top.lowered else []
    return BestEntry(
        top.state_method,
        top.tree,
        tuple(notes),
        number(top.mean_tpot_ms, 1) if best.by_latency else significant(top.output_throughput),
        "saturated" if fallen else ratio(best.gain),
        "better" if fallen else _mark(best.gain),
    )


def _mark_text(group: Group, mark: Mark | None) -> tuple[str, str]:
    """Load and limit of a knee."""
    if mark is None:
        return "not run", ""
    limit = "" if mark.limit == "none" else mark.limit
    if group.load_field == "none":
        return ("yes", "") if mark.load is not None else ("no", limit)
    if not group.open_loop:
        return (plain(mark.load), limit) if mark.load is not None else (f"> {plain(mark.highest)}", "")
    if mark.load is None:
        return f"< {plain(mark.lowest)}", limit
    return (plain(mark.load), limit) if limit else (f"≥ {plain(mark.load)}", "")


def _ratio_rows(group: Group, budget: float, tree: str, load: float) -> list[RatioRow]:
    base = group.find(BASELINE, tree, budget, load)
    if base is None or not base.usable:
        return []
    found = [group.find(method, tree, budget, load) for method in group.methods if method != BASELINE]
    others = [cell for cell in found if cell is not None and cell.usable]
    return [
        RatioRow(
            load_text(group, load),
            len(others) if position == 0 else 0,
            cell.state_method,
            significant(cell.output_throughput),
            tuple(
                Ratio(ratio(value), "tie" if column in _uncoloured(group, cell, base) else _mark(value))
                for column, value in zip(RATIO_COLUMNS, _ratios(cell, base), strict=True)
            ),
            number(cell.reserved_records_gib, 1) if cell.reserved_records_gib else DASH,
            limit_text(cell),
            limit_text(base),
        )
        for position, cell in enumerate(others)
    ]


def _ratios(cell: Cell, base: Cell) -> tuple[float, ...]:
    return (
        quotient(cell.output_throughput, base.output_throughput),
        quotient(base.blocks_gib, cell.blocks_gib),
        quotient(base.p99_ttft_ms, cell.p99_ttft_ms),
        quotient(base.mean_tpot_ms, cell.mean_tpot_ms),
        quotient(cell.peak_running, base.peak_running),
    )


def _uncoloured(group: Group, cell: Cell, base: Cell) -> tuple[str, ...]:
    """Columns that are neither better nor worse in an open loop.

    At a given rate a slower service holds more requests at once; latencies of a saturated one tell the run's length.
    """
    if not group.open_loop:
        return ()
    return RATIO_COLUMNS[2:] if cell.saturated or base.saturated else RATIO_COLUMNS[4:]


def _why_no_ratios(group: Group, budget: float, tree: str) -> str:
    cells = [c for c in group.cells if (c.gpu_memory_utilization, c.tree) == (budget, tree)]
    if not cells:
        return "No cell was run here."
    names = {cell.state_method for cell in cells}
    if BASELINE not in names:
        return f"{BASELINE} was not run here, so there is nothing to compare with."
    if names == {BASELINE}:
        return f"Only {BASELINE} was run here."
    return "No cell here finished a request."


def _mark(value: float) -> str:
    if not math.isfinite(value):
        return "tie"
    return "better" if value > 1 + TIE else "worse" if value < 1 - TIE else "tie"
