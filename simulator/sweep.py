"""Sweeps: many cells in parallel processes, one run directory at the end.

Finished cells are kept beside the target under `<out>.partial` with a hash of what they depend on, so a sweep that was
interrupted continues with `resume`. The run directory appears under its name only when it is complete, and its data
files do not depend on how many processes made them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

import lab
from lab.errors import InfeasibleError, UsageError
from lab.methods import get_method
from simulator.records import merge_parts, part_files
from simulator.run import CheckedCell, check, identity, simulate, step_cost
from simulator.scenario import Scenario
from simulator.stepcost import StepCost
from simulator.workload import describe

SCHEMA_VERSION = 1
#: How often a sweep replaces dead workers before it gives up.
WORKER_DEATHS = 3
_VERSIONED = ("numpy", "numba", "simpy", "polars", "pydantic")

#: Fields of a cell that its ledger depends on, by their names in summary.csv.
_LEDGER_FIELDS = (
    "model",
    "gpu",
    "tensor_parallel_size",
    "weight_dtype",
    "kv_cache_dtype",
    "state_dtype",
    "state_method",
    "tree",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_model_len",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that cannot run, and why."""

    scenario: Scenario
    reason: str


def plan_cells(cells: Sequence[Scenario]) -> tuple[list[Scenario], list[Skipped]]:
    """Cells that can run, without repeats, and those that cannot.

    Raises the first reason when no cell can run and there is only one, and `UsageError` for impossible values.
    """
    runnable: dict[str, Scenario] = {}
    priced: set[tuple[str, str, int]] = set()
    skipped: list[Skipped] = []
    for cell in cells:
        cell = _without_unused_tree(cell)
        key = cell.model_dump_json()
        if key in runnable:
            continue
        try:
            checked = check(cell)
        except InfeasibleError as error:
            if len(cells) == 1:
                raise
            skipped.append(Skipped(cell, str(error)))
        else:
            runnable[key] = cell
            hardware = (cell.model, cell.gpu, cell.tensor_parallel_size)
            if hardware not in priced:
                step_cost(checked)  # tells now, not in the middle of the sweep, when no table covers the model
                priced.add(hardware)
    return list(runnable.values()), skipped


def run_sweep(
    raw: Mapping[str, Any],
    cells: Sequence[Scenario],
    out: Path,
    *,
    jobs: int = 1,
    resume: bool = False,
    keep_steps: bool = False,
    progress: Progress | None = None,
    finish: Callable[[Path], object] | None = None,
) -> Path:
    """Run all cells and write the run directory `out`: summary.csv, requests.parquet, run.json (and steps.parquet).

    `progress(done, total)` is called after every cell, `finish(folder)` with the complete folder before it gets its
    name. Raises `UsageError` when `out` holds something else.
    """
    check_target(out)
    runnable, skipped = plan_cells(cells)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    if not resume:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    tasks = [(cell.model_dump_json(), partial / _key(cell, keep_steps)) for cell in runnable]
    for done, _ in enumerate(_run_all(tasks, jobs, keep_steps), start=1):
        if progress is not None:
            progress(done, len(tasks))
    results = [json.loads((folder / "result.json").read_text()) for _, folder in tasks]
    staging = partial / "run"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    _write_summary([result["row"] for result in results], staging / "summary.csv")
    folders = [folder for _, folder in tasks]
    for kind in ("requests", "steps") if keep_steps else ("requests",):
        merge_parts([(i, part_files(folder, kind)) for i, folder in enumerate(folders)], staging / f"{kind}.parquet")
    record = _run_record(raw, runnable, skipped, results)
    (staging / "run.json").write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    if finish is not None:
        finish(staging)
    _replace(staging, out)
    shutil.rmtree(partial, ignore_errors=True)
    return out


def check_target(out: Path) -> None:
    """Raise `UsageError` unless `out` is free, or an earlier run directory that may be replaced."""
    if out.exists() and not (out.is_dir() and ((out / "run.json").is_file() or not any(out.iterdir()))):
        raise UsageError(f"--out {out} exists and is not a run directory; give a new folder")


def _run_all(tasks: Sequence[tuple[str, Path]], jobs: int, keep_steps: bool) -> Iterator[None]:
    """Run what has no result yet; yields once per finished cell. A worker that dies is replaced a few times."""
    pending = _unfinished(tasks)
    yield from (None for _ in range(len(tasks) - len(pending)))
    if pending:
        run_cell(*pending[0], keep_steps)  # compiles once, so that workers find it in the cache on disk
        yield None
    if jobs == 1:
        for payload, folder in pending[1:]:
            run_cell(payload, folder, keep_steps)
            yield None
        return
    for attempt in range(WORKER_DEATHS + 1):
        unfinished = _unfinished(pending)
        if not unfinished:
            return
        try:
            yield from _run_parallel(unfinished, jobs, keep_steps)
        except BrokenProcessPool:
            if attempt == WORKER_DEATHS:
                raise UsageError(
                    f"worker processes died {attempt + 1} times (out of memory?); use --resume and fewer --jobs"
                ) from None


def _run_parallel(tasks: Sequence[tuple[str, Path]], jobs: int, keep_steps: bool) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        futures = [pool.submit(run_cell, payload, folder, keep_steps) for payload, folder in tasks]
        try:
            for future in as_completed(futures):
                future.result()
                yield None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _unfinished(tasks: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    return [task for task in tasks if not (task[1] / "result.json").is_file()]


def run_cell(payload: str, folder: Path, keep_steps: bool) -> None:
    """Run one cell (a scenario as JSON) into `folder`; `result.json` appears last."""
    shutil.rmtree(folder, ignore_errors=True)
    cell = check(Scenario.model_validate_json(payload))
    costs = step_cost(cell)
    row = simulate(cell, costs, folder)
    for kind in ("gaps_s",) if keep_steps else ("gaps_s", "steps"):
        for part in part_files(folder, kind):
            part.unlink()
    result = {
        "row": row,
        "ledger": _ledger_record(cell),
        "step_cost": _cost_record(cell, costs),
        "acceptance": _acceptance(cell),
    }
    temporary = folder / "result.json.tmp"
    temporary.write_text(json.dumps(result), encoding="utf-8")
    os.replace(temporary, folder / "result.json")


def _key(cell: Scenario, keep_steps: bool) -> str:
    """Hash of all that a cell's result depends on: the scenario, the files it names, the version."""
    digest = hashlib.sha256(f"{lab.__version__} {SCHEMA_VERSION} {keep_steps} {cell.model_dump_json()}".encode())
    for name in (cell.model, cell.workload.trace, cell.speculation.tree):
        if name is not None and Path(name).is_file():
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()[:24]


def _without_unused_tree(cell: Scenario) -> Scenario:
    """A method that drafts nothing has one cell, whatever the sweep's trees."""
    if get_method(cell.speculation.state_method).topology != "decode":
        return cell
    speculation = cell.speculation.model_copy(update={"tree": "chain:0"})
    return cell.model_copy(update={"speculation": speculation})


def _write_summary(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    frame = pl.DataFrame([{"cell": i, **row} for i, row in enumerate(rows)], infer_schema_length=None)
    frame.write_csv(path)


def _run_record(
    raw: Mapping[str, Any],
    cells: Sequence[Scenario],
    skipped: Sequence[Skipped],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    workloads = {cell.workload.trace or cell.workload.lengths: cell.workload for cell in cells}
    unique: dict[str, dict[str, Any]] = {"ledger": {}, "step_cost": {}, "acceptance": {}}
    for result in results:
        for kind, seen in unique.items():
            records = result[kind] if kind == "step_cost" else [result[kind]]
            seen.update((json.dumps(record, sort_keys=True), record) for record in records)
    return {
        "schema_version": SCHEMA_VERSION,
        "treewy_version": lab.__version__,
        "name": raw.get("name", "scenario"),
        "scenario": raw,
        "versions": {name: version(name) for name in _VERSIONED},
        "seed": raw.get("seed", 0),
        "workload": [describe(workload) for workload in workloads.values()],
        "acceptance": list(unique["acceptance"].values()),
        "step_cost": list(unique["step_cost"].values()),
        "ledgers": list(unique["ledger"].values()),
        "skipped": [
            {
                "model": item.scenario.model,
                "state_method": item.scenario.speculation.state_method,
                "tree": item.scenario.speculation.tree,
                "gpu_memory_utilization": item.scenario.engine.gpu_memory_utilization,
                "max_concurrency": item.scenario.workload.max_concurrency,
                "request_rate": item.scenario.workload.request_rate,
                "reason": item.reason,
            }
            for item in skipped
        ],
    }


def _ledger_record(cell: CheckedCell) -> dict[str, Any]:
    fields = identity(cell)
    scratch = cell.ledger.layout.scratch_bytes_per_request
    named = {name: fields[name] for name in _LEDGER_FIELDS}
    return {**named, **cell.ledger.to_json(), "scratch_bytes_per_request": scratch}


def _cost_record(cell: CheckedCell, costs: StepCost) -> list[dict[str, Any]]:
    return [
        {
            "gpu": costs.gpu,
            "model": cell.shape.name,
            "state_method": cell.method.name if term in ("state", "attention", "draft") else "all",
            "term": term,
            "source": source,
        }
        for term, source in costs.sources.items()
        if cell.tree.num_drafts or term != "draft"
    ]


def _acceptance(cell: CheckedCell) -> dict[str, Any]:
    return {
        "preset": cell.acceptance.name,
        "source": cell.acceptance.source,
        "tree": cell.tree_name,
        "drafts": cell.tree.num_drafts,
        "acceptance_length": cell.acceptance_length,
    }


def _replace(staging: Path, out: Path) -> None:
    """Move a finished folder to its name; an earlier one is moved aside first, so that one of them is always there."""
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(staging, out)
    shutil.rmtree(old, ignore_errors=True)
