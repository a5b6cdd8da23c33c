"""The report of a run directory as one HTML file that needs no network.

Text from files is escaped by the template, data in the script is escaped JSON, and the page's own content security
policy forbids any load. Same run directory, same bytes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
import yaml
from markupsafe import Markup

from lab.files import replace_text
from lab.methods import METHODS
from reports.accuracy import CONFIDENCE, TIE_TEXT
from reports.chartparts import Figure
from reports.charts import cell_rows, figures
from reports.data import Cell, Group, Run, load_run, sort_methods
from reports.findings import findings
from reports.lead import caveats, lead
from reports.ledgers import LedgerEntry, group_ledgers, ledger_rows, limit_rows
from reports.metrics import first_burst
from reports.palette import METHOD_DASHES, method_colours
from reports.replications import replication_rows
from reports.sources import (
    cycled,
    extrapolation_rows,
    facts,
    modelled_terms,
    operator_tables,
    settings,
    skipped,
    skipped_rows,
    step_cost_rows,
    union_table,
    workloads,
)
from reports.tables import (
    RATIO_COLUMNS,
    best_rows,
    cell_columns,
    cell_table,
    knee_rows,
    ledger_columns,
    ledger_table,
    ratio_bodies,
)
from reports.text import LOAD_TITLES, counted, plain

#: Cells of one group that the page lists; summary.csv holds all.
MAX_LISTED_CELLS = 1000


@dataclass(frozen=True, slots=True)
class Section:
    """All that the template needs about one group."""

    anchor: str
    group: Group
    figures: Sequence[Figure]
    ledgers: Sequence[LedgerEntry]
    budget: float
    tree: str
    lead: str
    caveats: Sequence[str]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory from its summary.csv and run.json; returns the file's path.

    The file appears complete or not at all. Raises `UsageError` when the directory cannot be used.
    """
    target = Path(run_dir) / "report.html"
    replace_text(target, render(load_run(Path(run_dir))))
    return target


def render(run: Run) -> str:
    """The report as HTML text."""
    sections = [_section(run, number, group) for number, group in enumerate(run.groups)]
    methods = sort_methods({cell.state_method for cell in run.cells})
    has_charts = any(section.figures for section in sections)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            sections=sections,
            subtitle=_subtitle(run),
            summary=_summary(run),
            colours=method_colours(methods),
            dashes={name: METHOD_DASHES.get(name, [2, 1]) for name in methods},
            titles={name: METHODS[name].title for name in methods if name in METHODS},
            skipped=skipped_rows(run),
            step_cost=step_cost_rows(run),
            modelled=modelled_terms(run),
            workloads=workloads(run),
            extrapolation=extrapolation_rows(run),
            cycled=cycled(run),
            replications=replication_rows(run),
            settings=settings(run),
            operator_tables=operator_tables(run),
            max_listed=MAX_LISTED_CELLS,
            scenario=_scenario(run),
            seeds=_seeds(run),
            has_charts=has_charts,
            page_data=_page_data(sections),
            bundle=Markup(_bundle()) if has_charts else "",
            style=Markup(_asset("report.css")),
            script=Markup(_asset("report.js")),
        )
    )


def _section(run: Run, number: int, group: Group) -> Section:
    entries = group_ledgers(run, group)
    return Section(
        f"group-{number + 1}",
        group,
        figures(group, entries),
        entries,
        group.budgets[0],
        group.trees[0],
        lead(group),
        caveats(run, group),
    )


def _page_data(sections: Sequence[Section]) -> dict[str, Any]:
    """What the script reads: per section the data sets, the choices that are shown first, and every panel's spec."""
    return {
        section.anchor: {
            "tree": section.tree,
            "budget": section.budget,
            "data": {
                "cells": cell_rows(section.group),
                "limits": limit_rows(section.ledgers, section.group),
                "ledgers": ledger_rows(section.ledgers),
            },
            "specs": {figure.key: [panel.spec for panel in figure.panels] for figure in section.figures},
        }
        for section in sections
    }


def _summary(run: Run) -> str:
    """One sentence on what was run."""
    missing = len(skipped(run))
    cells: list[Cell] = run.cells
    if not cells:
        tail = (
            f"{counted(missing, 'combination')} skipped, for the reasons below." if missing else "The sweep was empty."
        )
        return f"No cell was run. {tail[0].upper()}{tail[1:]}"
    requests = sum(cell.completed for cell in cells)
    warm = any(cell.num_warmup_requests for cell in cells)
    text = f"{counted(len(cells), 'cell')} simulated, {counted(requests, 'request')} finished"
    text += ", warm-up not counted" if warm else ""
    return f"{text}; {counted(missing, 'combination')} skipped." if missing else f"{text}."


def _subtitle(run: Run) -> str:
    if len(run.groups) == 1:
        return run.groups[0].label
    return counted(len(run.groups), "group") + " of cells" if run.groups else ""


def _seeds(run: Run) -> str:
    seeds = sorted({cell.seed for cell in run.cells})
    return ", ".join(map(str, seeds)) or str(run.record.get("seed", "–"))


def _scenario(run: Run) -> str:
    """The scenario as the YAML that runs it again."""
    return yaml.safe_dump(run.record.get("scenario"), sort_keys=False, allow_unicode=True, default_flow_style=None)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"plain": plain, "facts": facts, "union_table": union_table, "json": _script_json}
    environment.globals |= {
        "best_rows": best_rows,
        "knee_rows": knee_rows,
        "ratio_bodies": ratio_bodies,
        "ledger_columns": ledger_columns,
        "ledger_table": ledger_table,
        "cell_columns": cell_columns,
        "cell_table": cell_table,
        "findings": findings,
        "counted": counted,
        "first_burst": first_burst,
        "CONFIDENCE": CONFIDENCE,
        "TIE": TIE_TEXT,
        "LOAD_TITLES": LOAD_TITLES,
        "RATIO_COLUMNS": RATIO_COLUMNS,
    }
    return environment


def _script_json(value: Any) -> Markup:
    """JSON that is safe inside a script element."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _asset(name: str) -> str:
    return files("reports").joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
