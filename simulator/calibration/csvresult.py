"""Request times as CSV: one row per request, with its tokens, its send time, first and last token.

Columns: `input_tokens`, `output_tokens`; `arrival_s` or `arrival_ms`; `first_token_s` and `last_token_s` on the same
clock, or `ttft_s` and `e2el_s`; every time column may end in `_ms` instead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from lab.errors import UsageError
from simulator.calibration.measure import latency_metrics
from simulator.calibration.results import EngineResult, Floats
from simulator.calibration.units import LEAST_MS, check_units
from simulator.traces import MAX_TOKENS

_UNITS_S = {"_s": 1.0, "_ms": 1e-3}
#: Medians above these are milliseconds in a column that says seconds.
MOST_TTFT_S, MOST_TPOT_S = 600.0, 2.0


def read_csv_result(path: Path) -> EngineResult:
    """The requests of a CSV file as one result; raises `UsageError` naming column, row and what is needed."""
    try:
        frame = pl.read_csv(path, infer_schema=False, glob=False)
    except pl.exceptions.NoDataError:
        raise UsageError(f"engine result {path} is empty; its first line must name the columns") from None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UsageError(f"engine result {path} cannot be read as CSV: {str(error).splitlines()[0]}") from None
    header = frame.columns[0]
    if len(frame.columns) == 1 and (";" in header or "\t" in header):
        mark = "semicolons" if ";" in header else "tabs"
        raise UsageError(f"engine result {path}: the columns are separated by {mark}; use commas")
    if frame.is_empty():
        raise UsageError(f"engine result {path} holds no requests")
    prompts, outputs = (_tokens(frame, path, name) for name in ("input_tokens", "output_tokens"))
    arrival = _time_s(frame, path, "arrival")
    if arrival is None:
        raise _missing(path, "arrival_s or arrival_ms", frame)
    first, last = (
        _point_s(frame, path, arrival, *names) for names in (("first_token", "ttft"), ("last_token", "e2el"))
    )
    _check_order(arrival, first, last, path)
    _check_seconds(frame, outputs, arrival, first, last, path)
    order = np.argsort(arrival, kind="stable")
    start = float(arrival.min())
    arrival, first, last = ((times - start)[order] for times in (arrival, first, last))
    prompts, outputs = prompts[order], outputs[order]
    metrics = latency_metrics(arrival, first, last, prompts, outputs)
    check_units(metrics, len(prompts), float(outputs.sum()), str(path), apart=10.0)
    return EngineResult(
        path=str(path),
        client="CSV of request times",
        num_requests=len(prompts),
        mean_prompt_tokens=float(prompts.mean()),
        mean_output_tokens=float(outputs.mean()),
        request_rate=None,
        burstiness=1.0,
        max_concurrency=None,
        metrics=metrics,
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        arrival_s=arrival,
    )


def _point_s(frame: pl.DataFrame, path: Path, arrival: Floats, point: str, latency: str) -> Floats:
    """A point in time, given itself or as the time since the request was sent."""
    at = _time_s(frame, path, point)
    if at is not None:
        return at
    since = _time_s(frame, path, latency)
    if since is None:
        raise _missing(path, f"{point}_s, {point}_ms, {latency}_s or {latency}_ms", frame)
    if (since * 1e3 < LEAST_MS[latency]).all():
        unit = "milliseconds" if f"{latency}_ms" in frame.columns else "seconds"
        raise UsageError(
            f"{path}: {latency} is below {LEAST_MS[latency]:g} ms in every row, shorter than any engine's; the column "
            f"holds {unit} by its name: rename it to the unit that it holds, or multiply by 1000"
        )
    return arrival + since


def _check_order(arrival: Floats, first: Floats, last: Floats, path: Path) -> None:
    bad = np.flatnonzero((first < arrival - 1e-2) | (last < first))
    if bad.size:
        raise UsageError(
            f"{path}, row {int(bad[0]) + 1}: arrival, first and last token must follow each other on one clock and "
            f"in one unit; found {arrival[bad[0]]:.6g}, {first[bad[0]]:.6g}, {last[bad[0]]:.6g} s"
        )


def _check_seconds(
    frame: pl.DataFrame, outputs: Floats, arrival: Floats, first: Floats, last: Floats, path: Path
) -> None:
    """Columns that end in _s must not hold milliseconds: no service takes so long for a first or a further token."""
    several = outputs > 1
    per_token = (last - first)[several] / (outputs[several] - 1)
    for names, value, most, what in (
        (("ttft_s", "first_token_s"), float(np.median(first - arrival)), MOST_TTFT_S, "TTFT"),
        (
            ("e2el_s", "last_token_s"),
            float(np.median(per_token)) if several.any() else 0.0,
            MOST_TPOT_S,
            "time per further token",
        ),
    ):
        column = next((name for name in names if name in frame.columns), None)
        if column is not None and value > most:
            raise UsageError(
                f"{path}: by {column} the median {what} is {value:.4g} s, which looks like milliseconds; rename the "
                f"column to {column.removesuffix('_s')}_ms, or divide by 1000"
            )


def _time_s(frame: pl.DataFrame, path: Path, name: str) -> Floats | None:
    given = [ending for ending in _UNITS_S if name + ending in frame.columns]
    if not given:
        return None
    if len(given) > 1:
        raise UsageError(f"{path} has both {name}_s and {name}_ms; remove one of the two columns")
    column = name + given[0]
    values = _numbers(frame, path, column)
    bad = np.flatnonzero(values < 0)
    if bad.size:
        raise UsageError(
            f"{path}, row {int(bad[0]) + 1}: {column} = {values[bad[0]]:g} is negative; times count from 0 on"
        )
    return values * _UNITS_S[given[0]]


def _tokens(frame: pl.DataFrame, path: Path, name: str) -> Floats:
    if name not in frame.columns:
        raise _missing(path, name, frame)
    values = _numbers(frame, path, name)
    bad = np.flatnonzero((values < 1) | (values > MAX_TOKENS) | (values != np.floor(values)))
    if bad.size:
        raise UsageError(f"{path}, row {int(bad[0]) + 1}: {name} = {values[bad[0]]:g}; a whole number from 1 is needed")
    return values


def _numbers(frame: pl.DataFrame, path: Path, name: str) -> Floats:
    numbers = frame[name].str.strip_chars().cast(pl.Float64, strict=False)
    values = np.array(numbers.fill_null(float("nan")), dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise UsageError(f"{path}, row {int(bad[0]) + 1}: {name} = {frame[name][int(bad[0])]!r:.60} is not a number")
    return values


def _missing(path: Path, wanted: str, frame: pl.DataFrame) -> UsageError:
    return UsageError(f"engine result {path} has no column {wanted}; found {', '.join(frame.columns)}")
