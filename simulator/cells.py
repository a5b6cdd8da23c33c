"""One cell on disk: a folder that holds its records and, last of all, `result.json`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import lab
from lab.files import replace_text
from lab.profiles.attention import attention_record
from lab.profiles.digest import tables_digest
from lab.profiles.kernels import kernels_record
from simulator.check import CheckedCell, check
from simulator.records import part_files
from simulator.run import identity, simulate, step_cost
from simulator.scenario import Scenario
from simulator.stepcost import StepCost

#: Version of the layout of `result.json` and `run.json`.
SCHEMA_VERSION = 1

#: Fields of a cell that its ledger depends on, by their names in summary.csv.
_LEDGER_FIELDS = (
    "engine",
    "engine_options",
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
    "enable_prefix_caching",
)


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
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "row": row,
        "ledger": _ledger_record(cell),
        "step_cost": _cost_record(cell, costs),
        "acceptance": _acceptance(cell),
    }
    replace_text(folder / "result.json", json.dumps(result, allow_nan=True))


def load_result(folder: Path) -> dict[str, Any] | None:
    """A finished cell's result; None when there is none, or when it or its records are damaged."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in result["files"]}
        complete = sizes == result["files"] and {"row", "ledger", "step_cost", "acceptance"} <= set(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return result if complete else None


def cell_key(cell: Scenario, keep_steps: bool) -> str:
    """Hash of all that a cell's result depends on: the scenario, the files it names, the version."""
    digest = hashlib.sha256(f"{lab.__version__} {SCHEMA_VERSION} {keep_steps} {cell.model_dump_json()}".encode())
    digest.update(f"{tables_digest(cell.gpu)} {kernels_record(cell.gpu)} {attention_record(cell.gpu)}".encode())
    model_file = str(Path(cell.model) / "config.json")
    for name in (cell.model, model_file, cell.workload.trace, cell.speculation.tree, cell.calibration):
        if name is not None and Path(name).is_file():
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()[:24]


def _ledger_record(cell: CheckedCell) -> dict[str, Any]:
    fields = identity(cell)
    scratch = cell.ledger.layout.scratch_bytes_per_request
    named = {name: fields[name] for name in _LEDGER_FIELDS}
    return {**named, **cell.ledger.to_json(), "scratch_bytes_per_request": scratch}


def _cost_record(cell: CheckedCell, costs: StepCost) -> list[dict[str, Any]]:
    host, calibration = cell.scenario.host, cell.scenario.calibration
    origin = "constants of the scenario, the defaults fitted on published runs of vLLM 0.17"
    if calibration is not None:
        origin = f"calibrated on measured results ({Path(calibration).name})"
    hidden = "; the overlapped schedule hides it behind the GPU's time" if cell.engine.async_scheduling else ""
    sources = {
        **costs.sources,
        "host": f"fitted: {host.ms_per_step:.4g} ms a step and {host.ms_per_prompt_step:.4g} ms more with a prompt; "
        f"{origin}{hidden}",
    }
    return [
        {
            "gpu": costs.gpu,
            "model": cell.shape.name,
            "state_method": cell.method.name if term in ("state", "attention", "draft") else "all",
            "term": term,
            "source": source,
        }
        for term, source in sources.items()
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
