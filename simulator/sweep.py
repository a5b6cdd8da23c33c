"""Sweeps: many cells in parallel processes, one run directory at the end.

Finished cells are kept beside the target under `<out>.partial` with a hash of what they depend on, so a sweep that was
interrupted continues with `resume`. The run directory appears under its name only when it is complete, and its data
files do not depend on how many processes made them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

import lab
from lab.errors import InfeasibleError, UsageError
from lab.profiles.attention import attention_record
from lab.profiles.digest import tables_digest
from lab.profiles.kernels import kernels_record
from lab.shapes import load_shape
from simulator.calibration.file import calibration_record
from simulator.cells import SCHEMA_VERSION, cell_key, load_result, run_cell
from simulator.check import CheckedCell, check
from simulator.ledger import TooManySeqsError
from simulator.records import merge_parts, part_files
from simulator.replications import paired, replicate, summarise
from simulator.run import identity, step_cost
from simulator.rundir import check_target, publish, unfinished
from simulator.scenario import Scenario
from simulator.settings import EngineSettings
from simulator.workers import run_all
from simulator.workload import describe

_VERSIONED = ("numpy", "numba", "simpy", "polars", "pydantic")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that cannot run, and why."""

    scenario: Scenario
    reason: str


def plan_cells(cells: Sequence[Scenario]) -> tuple[list[Scenario], list[Skipped]]:
    """Cells that can run, without repeats, and those that cannot.

    In a sweep a cell whose `max_num_seqs` does not fit gets the largest `running_limit` that does. Raises
    `InfeasibleError` when the only cell cannot run, and `UsageError` for impossible values.
    """
    _refuse_shared_block_count(cells)
    seen: set[str] = set()
    priced: set[tuple[str, ...]] = set()
    runnable: list[Scenario] = []
    skipped: list[Skipped] = []
    for cell in cells:
        key = cell.model_dump_json()
        if key in seen:
            continue
        seen.add(key)
        try:
            checked = _check_fitting(cell, lower=len(cells) > 1)
            if (tables := _table_key(checked)) not in priced:
                step_cost(checked)  # tells now, not in the middle of the sweep, when no table covers the cell
                priced.add(tables)
        except InfeasibleError as error:
            if len(cells) == 1:
                raise
            skipped.append(Skipped(cell, str(error)))
        else:
            runnable.append(checked.scenario)
    return runnable, skipped


def _check_fitting(cell: Scenario, lower: bool) -> CheckedCell:
    """Check a cell; with `lower`, run fewer requests at once where the engine refuses `max_num_seqs`."""
    try:
        return check(cell)
    except TooManySeqsError as error:
        if not lower or error.viable < 1:
            raise
        engine = cell.engine.model_copy(update={"running_limit": error.viable})
        return check(cell.model_copy(update={"engine": engine}))


def _table_key(cell: CheckedCell) -> tuple[str, ...]:
    """All that decides whether the operator tables cover a cell."""
    fields = identity(cell)
    names = ("model", "gpu", "tensor_parallel_size", "weight_dtype", "moe_routing", "kv_cache_dtype", "state_dtype")
    return tuple(str(fields[name]) for name in names)


def _refuse_shared_block_count(cells: Sequence[Scenario]) -> None:
    """A measured block count belongs to one method and tree: blocks of another have another size."""
    measured = {
        (cell.speculation.state_method, cell.speculation.tree)
        for cell in cells
        if isinstance(cell.engine, EngineSettings) and cell.engine.num_gpu_blocks_override is not None
    }
    if len(measured) > 1:
        raise UsageError(
            "engine.num_gpu_blocks_override counts blocks of one state method and tree, and this sweep has "
            f"{len(measured)}; give kv_cache_memory_bytes or runtime_and_activations_gib instead"
        )


def run_sweep(
    raw: Mapping[str, Any],
    cells: Sequence[Scenario],
    out: Path,
    *,
    jobs: int = 1,
    resume: bool = False,
    seeds: int = 1,
    keep_steps: bool = False,
    progress: Progress | None = None,
    finish: Callable[[Path], object] | None = None,
) -> Path:
    """Run all cells and write the run directory `out`: summary.csv, requests.parquet, run.json (and steps.parquet).

    With several `seeds` every cell is run with that many; summary.csv holds means and 95 % intervals, replications.csv
    the single runs, paired.csv the ratios of methods under equal seeds.
    `progress(done, total)` is called when cells start and after every cell, `finish(folder)` with the complete folder
    before it gets its name. Raises `UsageError` when `out` holds something else, and `InfeasibleError` when no cell can
    run.
    """
    if not out.is_symlink():
        out = out.resolve()
    check_target(out, str(raw.get("name", "scenario")))
    if seeds > 1 and len(own := {cell.seed for cell in cells}) > 1:
        raise UsageError(
            f"--seeds {seeds} runs every cell with that many seeds, and the scenario sweeps {len(own)} itself: give "
            "`seed` one value, the first of them, or leave --seeds away"
        )
    runnable, skipped = plan_cells(cells)
    if not runnable:
        raise InfeasibleError(f"none of {len(skipped)} cells can run; the first: {skipped[0].reason}")
    runnable = replicate(runnable, seeds)
    with unfinished(out, resume) as partial:
        tasks = [(cell.model_dump_json(), partial / cell_key(cell, keep_steps), keep_steps) for cell in runnable]
        if progress is not None:
            progress(0, len(tasks))
        finished = run_all(run_cell, tasks, lambda task: load_result(task[1]) is not None, jobs)
        for done, _ in enumerate(finished, start=1):
            if progress is not None:
                progress(done, len(tasks))
        staging = partial / "run"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _write_run(staging, raw, runnable, skipped, [folder for _, folder, _ in tasks], keep_steps, seeds)
        if finish is not None:
            finish(staging)
        publish(staging, out)
    return out


def _write_run(
    folder: Path,
    raw: Mapping[str, Any],
    cells: Sequence[Scenario],
    skipped: Sequence[Skipped],
    parts: Sequence[Path],
    keep_steps: bool,
    seeds: int,
) -> None:
    """The files of a run directory from the folders of its cells."""
    results = [result for part in parts if (result := load_result(part)) is not None]
    rows = [{"cell": i // seeds, **result["row"]} for i, result in enumerate(results)]
    record = _run_record(raw, cells, skipped, results)
    if seeds > 1:
        fields = ("cell", *identity(check(cells[0])))
        _write_csv(rows, folder / "replications.csv")
        ratios = paired(rows, seeds, fields)
        if ratios:
            _write_csv(ratios, folder / "paired.csv")
        record["replications"] = {"seeds": seeds, "paired": ratios}
        rows = summarise(rows, seeds, fields)
    _write_csv(rows, folder / "summary.csv")
    own_seeds = [cell.seed for cell in cells] if seeds > 1 else None
    for kind in ("requests", "steps") if keep_steps else ("requests",):
        found = [(i // seeds, part_files(part, kind)) for i, part in enumerate(parts)]
        merge_parts(found, folder / f"{kind}.parquet", own_seeds)
    (folder / "run.json").write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


def _write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    pl.DataFrame(rows, infer_schema_length=None).fill_nan(None).write_csv(path)


def _calibrations(cells: Sequence[Scenario]) -> list[dict[str, Any]]:
    """The calibration that the cells name, once per model and GPU."""
    used = dict.fromkeys((cell.calibration, cell.model, cell.gpu) for cell in cells if cell.calibration is not None)
    return [calibration_record(str(name), load_shape(model).name, gpu) for name, model, gpu in used]


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
        "first_cell": cells[0].model_dump(mode="json") if cells else None,
        "operator_tables": {gpu: tables_digest(gpu) for gpu in sorted({cell.gpu for cell in cells})},
        "kernel_profiles": {gpu: kernels_record(gpu) for gpu in sorted({cell.gpu for cell in cells})},
        "attention_profiles": {gpu: attention_record(gpu) for gpu in sorted({cell.gpu for cell in cells})},
        "workload": [describe(workload) for workload in workloads.values()],
        "acceptance": list(unique["acceptance"].values()),
        "step_cost": list(unique["step_cost"].values()),
        "ledgers": list(unique["ledger"].values()),
        "calibration": _calibrations(cells),
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
