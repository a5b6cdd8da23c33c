"""What `treewy doctor` says of a profile's table of plans, whatever reason the profile gives for being kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.profiles.plans import PlanTable


def table_state(folder: Path, device: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any] | None:
    """`places` in the folder's table (None when it cannot be read) and `errors`; None where no table is needed.

    A table is needed where `device`, the profile's record, names it among its sources.
    """
    from lab.errors import UsageError
    from lab.profiles.plans import PLANS_FILE, read_plans

    path, errors = folder / PLANS_FILE, list(_missing(device))
    if not path.exists():
        return {"places": None, "errors": errors} if errors else None
    try:
        table = read_plans(path)
    except UsageError as error:
        return {"places": None, "errors": [*errors, str(error)]}
    return {"places": len(table.rows), "errors": [*errors, *_unknown(table, path)]}


def _missing(device: Mapping[str, Any]) -> list[str]:
    """One sentence for every shipped table that the profile was measured with and that is not there."""
    from lab.profiles.folders import SHIPPED
    from lab.profiles.plans import PLANS_FILE, shipped_tables

    sources, there = device.get("sources"), shipped_tables().values()
    names = sources if isinstance(sources, Mapping) else {}
    tables = [SHIPPED / name for name in names if name.endswith(f"/{PLANS_FILE}")]
    remedy = "and the profile was measured with it; put it back, or tune and measure again"
    return [f"{path} is missing, {remedy}" for path in tables if path not in there]


def _unknown(table: PlanTable, path: Path) -> list[str]:
    """A sentence on the rows whose plan the kernels do not have for such a verification: it would be passed over."""
    from kernels_cupy.covering import shipped_plans
    from lab.profiles.plans import PlanTable

    rows = [row for row in table.rows if next(shipped_plans([PlanTable([row])]), None) is None]
    if not rows:
        return []
    return [
        f"{path}: {len(rows)} of {len(table.rows)} rows name a plan that the kernels do not have there, such as "
        f"{rows[0].plan} for {rows[0].place}; tune again"
    ]
