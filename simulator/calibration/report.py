"""A whole calibration: results read, levels compared, constants fitted and written to the file that scenarios name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lab
from lab.errors import UsageError
from lab.files import replace_text
from simulator.calibration.compare import Error, errors
from simulator.calibration.constants import defaults
from simulator.calibration.file import SCENARIO_CONSTANTS, SCHEMA_VERSION
from simulator.calibration.fit import Fit, fit, leave_one_out
from simulator.calibration.levels import Level, level_of
from simulator.calibration.results import EngineResult, read_results
from simulator.run import identity

#: Fields of the service that a calibration was fitted on, by their names in summary.csv.
_SERVICE = ("model", "gpu", "tensor_parallel_size", "weight_dtype", "state_dtype", "state_method", "tree")


@dataclass(frozen=True)
class Calibration:
    """What was compared and, where asked for, fitted. `errors`, `left_out`: by level."""

    results: list[EngineResult]
    service: dict[str, Any]
    errors: dict[str, list[Error]]
    notes: list[str]
    fit: Fit | None = None
    left_out: dict[str, list[Error]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The file's layout; without a fit it has no constants and cannot be named by a scenario."""
        record: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "treewy_version": lab.__version__,
            "fitted_on": self.service,
            "results": [
                {
                    "file": Path(result.path).name,
                    "sha256": hashlib.sha256(Path(result.path).read_bytes()).hexdigest(),
                    "client": result.client,
                    "load": result.load,
                    "num_requests": result.num_requests,
                }
                for result in self.results
            ],
            "errors": _plain(self.errors),
        }
        if self.fit is not None:
            record["constants"] = {
                constant.name: {key: value for key, value in asdict(constant).items() if key != "name"}
                for constant in self.fit.constants
            }
            record["errors_fitted"] = _plain(self.fit.after)
            record["errors_leave_one_out"] = _plain(self.left_out or {})
        return record


def check_out(path: Path, names: Sequence[str]) -> None:
    """Refuse a file that could not be written, or would hold no constant, before the time of a fit is spent."""
    defaults(names)
    if not SCENARIO_CONSTANTS.keys() & set(names):
        raise UsageError(
            f"--out {path}: the file holds {', '.join(SCENARIO_CONSTANTS)}, and none of them is fitted; name one in "
            "--constants, or leave out --out"
        )
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"--out {path}: there is no folder {folder}; make it, or name another file")
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out {path}: the folder {folder} cannot be written to; name another file")


def calibrate(raw: Mapping[str, Any], files: Sequence[Path], names: Sequence[str]) -> Calibration:
    """Compare all results with the scenario; fit the named constants where names are given.

    A fit starts from the defaults, whatever host times or calibration the scenario has. Raises `UsageError`.
    """
    defaults(names)
    raw = dict(raw)
    if names:
        raw.pop("calibration", None)
    results = [result for file in files for result in read_results(file)]
    levels = _named([level_of(raw, result) for result in results])
    service = {name: value for name, value in identity(levels[0].cell).items() if name in _SERVICE}
    found = {level.name: errors(level.measured, level.predict({})) for level in levels}
    if not any(found.values()):
        raise UsageError("the engine results hold no metric to compare: throughput, TTFT, TPOT, ITL or E2EL are needed")
    notes = [note for level, result in zip(levels, results, strict=True) for note in _notes(level, result)]
    if not names:
        return Calibration(results, service, found, notes)
    if "acceptance" in names and not levels[0].cell.tree.num_drafts:
        raise UsageError("constant acceptance: the scenario drafts nothing; leave it out of --constants")
    if "acceptance" in names and all(level.acceptance_known for level in levels):
        raise UsageError("constant acceptance: every result tells its own; leave it out of --constants")
    solved = fit(levels, names)
    left_out = leave_one_out(levels, names, solved.values, [result.load for result in results])
    return Calibration(results, service, found, notes, solved, left_out)


def write_calibration(found: Calibration, path: Path) -> None:
    """Write the file; the acceptance is left to the scenario's own section, which knows trees."""
    record = found.to_json()
    fitted = record["constants"]
    record["constants"] = {name: entry for name, entry in fitted.items() if name in SCENARIO_CONSTANTS}
    if "acceptance" in fitted:
        record["acceptance"] = fitted["acceptance"]
    replace_text(path, json.dumps(record, indent=1) + "\n")


def _named(levels: Sequence[Level]) -> list[Level]:
    """Levels of equal load get a number, so that each has a name of its own."""
    seen: dict[str, int] = {}
    result = []
    for level in levels:
        count = seen[level.name] = seen.get(level.name, 0) + 1
        result.append(level if count == 1 else replace(level, name=f"{level.name} ({count})"))
    return result


def _notes(level: Level, result: EngineResult) -> list[str]:
    """What a reader must know about a level: which model, whose lengths and acceptance it has."""
    notes = []
    if result.model is not None and not _same_model(result.model, level.cell.scenario.model):
        notes.append(f"{level.name}: the result is of {result.model}, the scenario of {level.cell.scenario.model}")
    if result.prompt_tokens is None:
        notes.append(
            f"{level.name}: the result has no lengths; the scenario's were brought to its means, "
            f"{result.mean_prompt_tokens:.4g} in and {result.mean_output_tokens:.4g} out"
        )
    drafts = level.cell.tree.num_drafts
    if drafts and not level.acceptance_known:
        notes.append(f"{level.name}: the result tells no acceptance; the scenario's is used")
    if drafts and "mean_itl_ms" in level.measured:
        notes.append(f"{level.name}: ITL is the time between outputs, each of which may hold several tokens")
    return notes


def _same_model(one: str, other: str) -> bool:
    """Whether two names may mean one model: equal last parts of the path, or one with an ending such as -FP8."""
    a, b = (name.removesuffix("/config.json").rstrip("/").rpartition("/")[2].lower() for name in (one, other))
    return a == b or a.startswith(b + "-") or b.startswith(a + "-")


def _plain(by_level: Mapping[str, Sequence[Error]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        level: {
            error.metric: {
                "measured": error.measured,
                "simulated": error.predicted,
                "relative_error": error.relative,
            }
            for error in found
        }
        for level, found in by_level.items()
    }
