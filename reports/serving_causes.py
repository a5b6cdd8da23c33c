"""Predicted rows simulated again with one setting changed, which isolates a cause of an error; nothing is fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reports.serving import GroupResult
from reports.serving_levels import level_of_row
from reports.serving_rows import sorted_rows

METRICS = ("median_ttft_ms", "median_tpot_ms", "output_throughput")
#: An acceptance at which nearly all requests emit alike, so that they end together.
ALIKE = 0.995
#: Row, what is changed, engine settings, constants.
CHANGES: tuple[tuple[str, str, dict[str, Any], dict[str, float]], ...] = (
    *(
        (row, label, settings, constants)
        for row in ("s358", "s116", "s004")
        for label, settings, constants in (
            ("requests end together", {}, {"acceptance": ALIKE}),
            ("no overlap", {"disable_overlap_schedule": True}, {}),
        )
    ),
    *((row, f"{n} running", {"max_running_requests": n}, {}) for row, n in (("s262", 6), ("s243", 9), ("s020", 10))),
)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Metrics of one row, by `METRICS`: measured, predicted, and predicted with the change."""

    row: str
    change: str
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    changed: tuple[float, ...]


def what_ifs(results: Sequence[GroupResult]) -> Iterator[WhatIf]:
    """The changes, with the constants of the row's group."""
    rows = {row["id"]: row for row in sorted_rows().usable}
    constants = {result.group: {each.name: each.value for each in result.constants} for result in results}
    for name, label, settings, changed in CHANGES:
        row = rows[name]
        values = constants[row["engine"], row["model"], row["gpu"]]
        usual, other = level_of_row(row), level_of_row(row, settings)
        found = (usual.measured, usual.predict(values), other.predict({**values, **changed}))
        measured, predicted, after = (tuple(each[metric] for metric in METRICS) for each in found)
        yield WhatIf(name, label, measured, predicted, after)
