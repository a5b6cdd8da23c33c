"""The calibration file: fitted constants that a scenario names with `calibration: FILE`.

JSON with `schema_version`, `constants` (name → value, low, high, default) and what they were fitted on. The scenario's
own fields take the constants' values when it is read, so that everything after that sees plain numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.errors import UsageError

SCHEMA_VERSION = 1

#: Constants that a file may hold, and their largest value: milliseconds of host time, factors of GPU time.
SCENARIO_CONSTANTS: dict[str, float] = {
    "host.ms_per_step": 1e6,
    "host.ms_per_prompt_step": 1e6,
    "gpu_time.decode_factor": 100.0,
    "gpu_time.prompt_factor": 100.0,
}


def find_calibration(name: str, folder: Path) -> str:
    """The file that a scenario in `folder` names: beside the scenario, else in the working directory."""
    beside = folder / name
    if beside.is_file():
        return str(beside)
    if Path(name).is_file():
        return name
    places = dict.fromkeys(str(path.absolute()) for path in (beside, Path(name)))
    raise UsageError(f"calibration = '{name}': there is no file {' and none '.join(places)}; correct the path")


def read_calibration(name: str) -> dict[str, Any]:
    """The file as written; raises `UsageError` that says what is wrong with it."""
    path = Path(name)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"calibration = '{name}': cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"calibration = '{name}' is not valid JSON: {error}") from error
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"calibration = '{name}': schema_version must be {SCHEMA_VERSION}; write the file with "
            "`treewy calibrate --fit --out`"
        )
    constants = record.get("constants")
    if not isinstance(constants, dict) or not constants:
        raise UsageError(f"calibration = '{name}' holds no constants")
    for key, entry in constants.items():
        if key not in SCENARIO_CONSTANTS:
            raise UsageError(f"calibration = '{name}': no constant '{key}'; known are {', '.join(SCENARIO_CONSTANTS)}")
        value = entry.get("value") if isinstance(entry, dict) else None
        if not _is_usable(key, value):
            most = SCENARIO_CONSTANTS[key]
            raise UsageError(f"calibration = '{name}': {key} = {value!r:.40}; allowed is a number up to {most:g}")
    return record


def _is_usable(key: str, value: Any) -> bool:
    """Whether a value can stand for a constant: times from 0, factors above it."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return False
    least = 1e-2 if "factor" in key else 0.0
    return least <= value <= SCENARIO_CONSTANTS[key]


def with_calibration(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario's mapping with the constants of the calibration it names in their fields.

    Raises `UsageError` when the scenario sets one of them itself: only one of the two can hold.
    """
    name = raw.get("calibration")
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    if name is None:
        return result
    if not isinstance(name, str):
        raise UsageError(f"calibration = {name!r:.60}: the path of a file that `treewy calibrate --fit --out` wrote")
    for key, entry in read_calibration(name)["constants"].items():
        section, _, field = key.partition(".")
        held = result.setdefault(section, {})
        if isinstance(held, dict):
            if field in held and held[field] != entry["value"]:
                raise UsageError(
                    f"{key} = {held[field]!r:.40}, but calibration '{name}' sets {entry['value']:g}; "
                    "remove one of the two"
                )
            held[field] = entry["value"]
    return result


def calibration_record(name: str, model: str, gpu: str) -> dict[str, Any]:
    """What run.json tells of a calibration: file, hash, constants, and whether it was fitted on this model and GPU."""
    record = read_calibration(name)
    fitted = record.get("fitted_on", {})
    same = isinstance(fitted, dict) and fitted.get("model") == model and fitted.get("gpu") == gpu
    return {
        "file": name,
        "sha256": hashlib.sha256(Path(name).read_bytes()).hexdigest(),
        "constants": {key: entry["value"] for key, entry in record["constants"].items()},
        "fitted_on": fitted,
        "same_model_and_gpu": same,
    }
