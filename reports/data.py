"""A run directory in memory: the cells of summary.csv, the record of run.json, and their groups.

A group holds the cells that may be drawn in one chart: they differ only in state method, draft tree, memory budget and
load. Nothing is ever averaged over cells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import polars as pl

from lab.errors import UsageError
from lab.methods import METHODS

SCHEMA_VERSION = 1

#: Fields that set groups apart, besides the load axis: everything else that a scenario can sweep.
GROUP_FIELDS: tuple[str, ...] = (
    "engine",
    "engine_options",
    "model",
    "gpu",
    "tensor_parallel_size",
    "workload",
    "arrivals",
    "burstiness",
    "weight_dtype",
    "moe_routing",
    "kv_cache_dtype",
    "state_dtype",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "prefix_cache_retention_interval",
    "scheduling_policy",
    "async_scheduling",
    "num_requests",
    "seed",
)

#: Share of steps from which on max_num_seqs or the token budget count as what limits a cell.
LIMIT_SHARE = 0.10

#: What each engine calls the memory budget, the cap on running requests and the longest request.
ENGINE_NAMES: dict[str, tuple[str, str, str]] = {
    "vllm": ("gpu_memory_utilization", "max_num_seqs", "max_model_len"),
    "sglang": ("mem_fraction_static", "max_running_requests", "context_length"),
}

LoadField = Literal["max_concurrency", "request_rate", "none"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of summary.csv, as far as the report needs it; a value that is not a finite number is NaN."""

    cell: str
    model: str
    gpu: str
    tensor_parallel_size: int
    weight_dtype: str
    moe_routing: str
    kv_cache_dtype: str
    state_dtype: str
    state_method: str
    tree: str
    num_rows: int
    gpu_memory_utilization: float
    max_num_seqs: int
    running_limit: int
    max_model_len: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    prefix_cache_retention_interval: int | None
    scheduling_policy: str
    async_scheduling: bool
    workload: str
    arrivals: str
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    num_requests: int
    num_warmup_requests: int
    seed: int
    engine: str
    engine_options: str
    completed: int
    output_throughput: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    acceptance_length: float
    tokens_per_round: float
    mean_step_ms: float
    rows_share: float
    head_share: float
    state_share: float
    attention_share: float
    prefill_share: float
    draft_share: float
    host_share: float
    peak_running: float
    mean_running: float
    blocks_per_request: float
    num_gpu_blocks: float
    peak_kv_usage: float
    peak_kv_gib: float
    reserved_records_gib: float
    num_preemptions: float
    prefix_cache_hit_rate: float
    memory_bound: bool
    memory_limited_steps: float
    seqs_limited_steps: float
    budget_limited_steps: float
    saturated: bool
    modelled: bool
    extrapolated: bool
    extrapolated_steps: float

    @property
    def usable(self) -> bool:
        """Whether the cell finished requests, so that its figures mean something."""
        return self.completed > 0 and math.isfinite(self.output_throughput) and self.output_throughput > 0

    @property
    def limit(self) -> str:
        """What mostly keeps requests waiting: memory, max_num_seqs, running limit, token budget or none.

        Memory binds when the simulator says so (over 1 % of the steps, or a preemption). The others bind in more than
        `LIMIT_SHARE` of the steps, in a saturated cell at any share: a prompt that waits a step for the token budget
        is no limit of the service.
        """
        shares = {
            "memory": self.memory_limited_steps,
            "running limit" if self.lowered else self.running_name: self.seqs_limited_steps,
            "token budget": self.budget_limited_steps,
        }
        name = max(shares, key=lambda each: shares[each] if math.isfinite(shares[each]) else 0.0)
        if shares[name] > (0.0 if self.saturated else LIMIT_SHARE):
            return name
        return "memory" if self.memory_bound else "none"

    @property
    def running_name(self) -> str:
        """What the engine calls the cap on running requests."""
        return ENGINE_NAMES.get(self.engine, ENGINE_NAMES["vllm"])[1]

    @property
    def lowered(self) -> bool:
        """Whether fewer requests than max_num_seqs may run, because the method's records for so many do not fit."""
        return self.running_limit < self.max_num_seqs

    @property
    def blocks_gib(self) -> float:
        """Blocks of the pool that are held at the peak.

        `peak_kv_gib` counts the records of the requests that run at the peak too; they lie outside the pool.
        """
        if self.running_limit <= 0:
            return math.nan
        return self.peak_kv_gib - self.peak_running * self.reserved_records_gib / self.running_limit

    @property
    def committed_gib(self) -> float:
        """Blocks held at the peak and all records: a method reserves them at start-up, whatever runs."""
        return self.blocks_gib + self.reserved_records_gib

    @property
    def step_tokens(self) -> float:
        """Tokens that a request emits per step; one where nothing is drafted."""
        return 1.0 if self.num_rows == 1 else self.tokens_per_round


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that one chart may hold; they differ in method, tree, memory budget and load only.

    `label` names model, GPU and workload, and whatever sets this group apart from the others. `load_field` is the axis
    of load.
    """

    label: str
    load_field: LoadField
    cells: tuple[Cell, ...]

    def load(self, cell: Cell) -> float:
        """Load of a cell: concurrent requests, requests per second, or 0 when the trace's own clock sets it."""
        if self.load_field == "none":
            return 0.0
        value = getattr(cell, self.load_field)
        return 0.0 if value is None else float(value)

    @property
    def budget_name(self) -> str:
        """What the engine calls the memory budget."""
        return ENGINE_NAMES.get(self.cells[0].engine, ENGINE_NAMES["vllm"])[0]

    @property
    def running_name(self) -> str:
        """What the engine calls the cap on running requests."""
        return self.cells[0].running_name

    @property
    def length_name(self) -> str:
        """What the engine calls the longest request."""
        return ENGINE_NAMES.get(self.cells[0].engine, ENGINE_NAMES["vllm"])[2]

    @property
    def loads(self) -> list[float]:
        return sorted({self.load(cell) for cell in self.cells})

    @property
    def open_loop(self) -> bool:
        """Whether a clock sends the requests and sets the load, so that the service can fall behind."""
        return self.load_field != "max_concurrency"

    @property
    def caches(self) -> bool:
        """Whether its cells keep prefixes of earlier requests to hit."""
        return self.cells[0].enable_prefix_caching

    @property
    def budgets(self) -> list[float]:
        """Values of gpu_memory_utilization, the largest first."""
        return sorted({cell.gpu_memory_utilization for cell in self.cells}, reverse=True)

    @property
    def trees(self) -> list[str]:
        """Draft trees by number of rows, without "no draft" unless that is all there is."""
        return [tree for tree in self.all_trees if tree not in self.undrafted] or self.all_trees

    @property
    def all_trees(self) -> list[str]:
        """Draft trees by number of rows, with the name that plain decoding goes by."""
        rows = {cell.tree: cell.num_rows for cell in self.cells}
        return sorted(rows, key=lambda tree: (rows[tree], tree))

    @property
    def undrafted(self) -> set[str]:
        """The names that plain decoding goes by."""
        return {cell.tree for cell in self.cells if cell.num_rows == 1}

    @property
    def methods(self) -> list[str]:
        """State methods in the project's order; unknown ones last."""
        return sort_methods({cell.state_method for cell in self.cells})

    def find(self, method: str, tree: str, budget: float, load: float) -> Cell | None:
        """The cell at that point, if it was run; a method that drafts nothing answers for every tree."""
        for cell in self.at(budget, load):
            if cell.state_method == method and (cell.tree == tree or cell.num_rows == 1):
                return cell
        return None

    def at(self, budget: float, load: float) -> list[Cell]:
        """All cells at one memory budget and load."""
        return [c for c in self.cells if c.gpu_memory_utilization == budget and self.load(c) == load]


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory: groups of cells and the record of the run (`run.json` as it is)."""

    name: str
    groups: tuple[Group, ...]
    record: Mapping[str, Any]

    @property
    def cells(self) -> list[Cell]:
        return [cell for group in self.groups for cell in group.cells]

    def entries(self, key: str) -> list[Mapping[str, Any]]:
        """The mappings under a key of run.json: those of a list, or the one that stands there; empty when absent."""
        value = self.record.get(key)
        values = value if isinstance(value, list) else [value]
        return [entry for entry in values if isinstance(entry, Mapping)]


def load_run(run_dir: Path) -> Run:
    """Read a run directory; raises `UsageError` naming the file, column or value that cannot be used."""
    record = _read_record(run_dir / "run.json")
    cells = _read_cells(run_dir / "summary.csv")
    name = record.get("name")
    return Run(str(name) if name else run_dir.name, tuple(group_cells(cells)), record)


def group_cells(cells: list[Cell]) -> list[Group]:
    """Cells by everything but method, tree, memory budget and load, in the order of the file."""
    members: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        members.setdefault(tuple(getattr(cell, field) for field in GROUP_FIELDS), []).append(cell)
    split = [part for group in members.values() for part in _split_by_load(group)]
    firsts = [part[1][0] for part in split]
    differing = [f for f in (*GROUP_FIELDS, "max_concurrency") if len({getattr(c, f) for c in firsts}) > 1]
    return [Group(_label(part[0], differing, load), load, tuple(part)) for load, part in split]


def sort_methods(names: set[str]) -> list[str]:
    """Names of state methods in the project's order; unknown ones last."""
    order = list(METHODS)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def _split_by_load(cells: list[Cell]) -> list[tuple[LoadField, list[Cell]]]:
    """The load axis of cells that share all other fields; a swept rate is the axis, a swept cap beside it splits."""
    rates = {cell.request_rate for cell in cells} - {None}
    caps = {cell.max_concurrency for cell in cells}
    if len(rates) > 1 or (rates and len(caps) == 1):
        return [
            ("request_rate", [c for c in cells if c.max_concurrency == cap])
            for cap in sorted(caps, key=lambda cap: -1 if cap is None else cap)
        ]
    return [("max_concurrency" if caps - {None} else "none", cells)]


def _label(cell: Cell, differing: list[str], load: LoadField) -> str:
    ranks = f" ×{cell.tensor_parallel_size}" if cell.tensor_parallel_size > 1 else ""
    parts = [
        f"{cell.model} on {cell.gpu.upper()}{ranks}",
        cell.workload,
        cell.arrivals.replace("-", " ") + " arrivals",
    ]
    if cell.arrivals == "closed-loop":
        parts[-1] = "closed loop"
    if cell.engine == "sglang":
        parts.insert(1, "SGLang")
    told = {"engine", "model", "gpu", "tensor_parallel_size", "workload", "arrivals", load}
    parts += [_setting(cell, field) for field in differing if field not in told]
    return ", ".join(parts)


def _setting(cell: Cell, field: str) -> str:
    """A field and its value, as a scenario writes them."""
    value = getattr(cell, field)
    if field == "engine_options":
        return f"{field} {value or 'default'}"
    return f"{field} {str(value).lower() if value is None or isinstance(value, bool) else value}"


def _read_record(path: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; a run directory holds run.json") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UsageError(f"{path} must hold a JSON object")
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(f"{path}: schema_version is {version!r}; this version reads {SCHEMA_VERSION}")
    return record


def _read_cells(path: Path) -> list[Cell]:
    try:
        frame = pl.read_csv(path, infer_schema=False)
    except OSError as error:
        raise UsageError(f"cannot read {path}; a run directory holds summary.csv") from error
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"{path} is not a CSV table: {str(error).splitlines()[0]}") from error
    missing = [field.name for field in fields(Cell) if field.name not in frame.columns]
    if missing:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)}")
    readers = {name: _READERS[hint] for name, hint in get_type_hints(Cell).items()}
    return [_cell(path, number, row, readers) for number, row in enumerate(frame.iter_rows(named=True), start=2)]


def _cell(path: Path, number: int, row: Mapping[str, str | None], readers: Mapping[str, Callable[[str], Any]]) -> Cell:
    values = {}
    for name, reader in readers.items():
        text = (row[name] or "").strip()
        try:
            values[name] = reader(text)
        except ValueError:
            raise UsageError(f"{path} line {number}: {name} must be {_WANTED[reader]}, not '{text}'") from None
    return Cell(**values)


def _integer(text: str) -> int:
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(value)


def _number(text: str) -> float:
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else math.nan


def _maybe_number(text: str) -> float | None:
    value = _number(text)
    return None if math.isnan(value) else value


def _maybe_integer(text: str) -> int | None:
    return _integer(text) if text else None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


_READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: _integer,
    float: _number,
    bool: _boolean,
    float | None: _maybe_number,
    int | None: _maybe_integer,
}
_WANTED: dict[Any, str] = {
    _integer: "a whole number",
    _number: "a number",
    _maybe_number: "a number",
    _maybe_integer: "a whole number",
    _boolean: "true or false",
}
