"""The memory ledgers of a run as rows for the chart and the table: one ledger per method, tree and memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lab.errors import UsageError
from lab.units import GIB
from reports.data import GROUP_FIELDS, Group, Run, sort_methods
from reports.palette import ledger_line, ledger_order


@dataclass(frozen=True, slots=True)
class StateSlots:
    """SGLang's second pool as its ledger names it; `state_pool_bytes` with the states beside the slots."""

    max_mamba_cache_size: int
    bytes_per_state_slot: int
    state_slots_per_request: int
    max_running_requests: int
    mamba_radix_cache_strategy: str
    state_pool_bytes: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One ledger of run.json; `lines` are bytes, `blocks_per_request` is for a request of max_model_len tokens."""

    state_method: str
    tree: str
    gpu_memory_utilization: float
    lines: Mapping[str, int]
    num_gpu_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    blocks_per_request: float
    block_size_tokens: int
    bytes_per_block: int
    gpu_blocks_source: str
    slots: StateSlots | None = None

    @property
    def pool_bytes(self) -> int:
        """Size of the block pool, or of SGLang's two pools."""
        states = 0 if self.slots is None else self.slots.state_pool_bytes
        return self.num_gpu_blocks * self.bytes_per_block + states

    @property
    def request_bytes(self) -> int:
        """All that requests can hold: the pool and the method's own records."""
        return self.pool_bytes + self.lines.get("method_scratch", 0)

    @property
    def label(self) -> str:
        return f"{self.state_method}  {self.tree}"


def group_ledgers(run: Run, group: Group) -> list[LedgerEntry]:
    """The ledgers that belong to a group, by method, rows of the tree and budget.

    An entry may name model, gpu and other fields of a group; then it belongs to groups that agree. Raises
    `UsageError` when an entry lacks a field.
    """
    sample = group.cells[0]
    mine = [
        entry
        for entry in run.entries("ledgers")
        if all(entry.get(name, value) == value for name in GROUP_FIELDS for value in [getattr(sample, name)])
    ]
    found = [_entry(raw) for raw in mine]
    methods = sort_methods({entry.state_method for entry in found})
    trees = group.all_trees
    return sorted(
        found,
        key=lambda e: (
            methods.index(e.state_method),
            trees.index(e.tree) if e.tree in trees else len(trees),
            e.gpu_memory_utilization,
        ),
    )


def ledger_rows(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    """Rows of the chart's data set: one per method, tree, budget and line that is not zero."""
    lines = ledger_titles(entries)
    return [
        {
            "configuration": entry.label,
            "state_method": entry.state_method,
            "tree": entry.tree,
            "budget": entry.gpu_memory_utilization,
            "line": title,
            "order": order,
            "gib": entry.lines[name] / GIB,
        }
        for entry in entries
        for order, (name, (title, _)) in enumerate(lines.items())
        if entry.lines.get(name)
    ]


def ledger_titles(entries: Sequence[LedgerEntry]) -> dict[str, tuple[str, str]]:
    """Title and colour of every line that is not zero in some entry, in drawing order."""
    names = ledger_order({name for entry in entries for name, nbytes in entry.lines.items() if nbytes})
    return {name: ledger_line(name, number) for number, name in enumerate(names)}


def limit_rows(entries: Sequence[LedgerEntry], group: Group) -> list[dict[str, Any]]:
    """What requests of each method can hold per tree and budget, pool and records, for the chart of peak memory."""
    return [
        {
            "state_method": entry.state_method,
            "tree": entry.tree,
            "drafted": entry.tree not in group.undrafted,
            "budget": entry.gpu_memory_utilization,
            "limit_gib": entry.request_bytes / GIB,
        }
        for entry in entries
    ]


def _entry(raw: Mapping[str, Any]) -> LedgerEntry:
    slots = StateSlots(**_picked(raw, StateSlots)) if "max_mamba_cache_size" in raw else None
    return LedgerEntry(**_picked(raw, LedgerEntry), slots=slots)


def _picked(raw: Mapping[str, Any], kind: type[LedgerEntry] | type[StateSlots]) -> dict[str, Any]:
    """The fields of a kind of entry that every run.json holds."""
    names = [field.name for field in fields(kind) if field.name != "slots"]
    missing = [name for name in names if name not in raw]
    if missing:
        raise UsageError(f"run.json: an entry of 'ledgers' lacks {', '.join(missing)}")
    return {name: raw[name] for name in names}
