"""Results of benchmark clients: `vllm bench serve` JSON, SGLang `bench_serving` JSON lines, CSV of request times.

All become an `EngineResult`: the load that was offered, the lengths of the requests, and metrics under the names of
summary.csv. Times are milliseconds, whatever the source's layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.errors import UsageError
from simulator.calibration.units import check_detail, check_units

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

#: Latencies by our names, and how a client's field calls them where it differs.
LATENCIES = ("ttft", "tpot", "itl", "e2el")
_STATISTICS = ("mean", "median", "p99")
_SGLANG_E2E = "e2e_latency"


@dataclass(frozen=True)
class EngineResult:
    """One measured run at one load.

    `metrics`: throughput per second and `mean_`, `median_`, `p99_` of ttft, tpot, itl, e2el in `_ms`, as far as given.
    `prompt_tokens`, `output_tokens` and `arrival_s` (send times from the first) are there for detailed results only;
    `mean_prompt_tokens` and `mean_output_tokens` always. `request_rate` is None when nothing paced the requests.
    `per_position` holds the share of verification steps that accepted at least 1, 2, … drafts. `model` is what
    the client calls the model, where it does.
    """

    path: str
    client: str
    num_requests: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    metrics: dict[str, float]
    prompt_tokens: Ints | None = None
    output_tokens: Ints | None = None
    arrival_s: Floats | None = None
    acceptance_length: float | None = None
    per_position: tuple[float, ...] = field(default=())
    model: str | None = None

    @property
    def load(self) -> str:
        """The load in words: what paces the requests."""
        parts = [] if self.request_rate is None else [f"{self.request_rate:g} req/s"]
        if self.max_concurrency is not None:
            parts.append(f"{self.max_concurrency} clients")
        if not parts:
            parts.append("its own clock" if self.arrival_s is not None else "all at once")
        return ", ".join(parts)


def read_results(path: Path) -> list[EngineResult]:
    """All results in a file: one for `vllm bench serve` and CSV, one per line for SGLang's JSON lines.

    Raises `UsageError` that names the file, the field and what to change.
    """
    if path.suffix == ".csv" or path.name.endswith(".csv.gz"):
        from simulator.calibration.csvresult import read_csv_result

        return [read_csv_result(path)]
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise UsageError(f"cannot read engine result {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"engine result {path} is not text: {error.reason}; give JSON or CSV") from error
    return [_from_json(raw, path) for raw in _json_objects(text, path)]


def _json_objects(text: str, path: Path) -> list[Mapping[str, Any]]:
    """One JSON object, or one per line."""
    try:
        found = [json.loads(text)]
    except (ValueError, RecursionError):
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise UsageError(f"engine result {path} is neither JSON nor JSON lines: {error}") from None
    if not found or not all(isinstance(item, dict) for item in found):
        raise UsageError(f"engine result {path} must hold JSON objects, one per run")
    return found


def _from_json(raw: Mapping[str, Any], path: Path) -> EngineResult:
    sglang = f"mean_{_SGLANG_E2E}_ms" in raw or "accept_length" in raw
    if not sglang and "mean_ttft_ms" not in raw:
        raise UsageError(
            f"engine result {path} has neither mean_ttft_ms nor mean_{_SGLANG_E2E}_ms: give the result file of "
            "`vllm bench serve --save-result`, of SGLang's bench_serving (--output-file), or a CSV of request times"
        )
    reader = _Fields(raw, path)
    metrics = _metrics(reader)
    completed = reader.count("completed")
    prompt_total, output_total = reader.number("total_input_tokens"), reader.number("total_output_tokens")
    duration = reader.number("duration")
    metrics["duration_s"] = duration
    check_units(metrics, completed, output_total, str(path))
    lengths = _lengths(reader)
    burstiness = reader.number("burstiness", 1.0)
    result = EngineResult(
        path=str(path),
        client="SGLang bench_serving" if sglang else "vllm bench serve",
        num_requests=completed,
        mean_prompt_tokens=prompt_total / completed,
        mean_output_tokens=output_total / completed,
        request_rate=reader.rate(),
        burstiness=burstiness,
        max_concurrency=reader.maybe_count("max_concurrency"),
        metrics=metrics,
        acceptance_length=reader.maybe_number("accept_length" if sglang else "spec_decode_acceptance_length"),
        per_position=reader.shares("spec_decode_per_position_acceptance_rates"),
        model=reader.text("model_id"),
        **lengths,
    )
    _check_detail(result, reader)
    return result


def _metrics(reader: _Fields) -> dict[str, float]:
    """Metrics under our names, milliseconds and per second."""
    found: dict[str, float] = {}
    for ours in LATENCIES:
        for statistic in _STATISTICS:
            theirs = [f"{statistic}_{ours}_ms"]
            if ours == "e2el":
                theirs.append(f"{statistic}_{_SGLANG_E2E}_ms")
            if statistic == "median":
                theirs.append(f"p50_{ours}_ms")
            values = [reader.maybe_number(name) for name in theirs]
            given = [value for value in values if value is not None]
            if given and given[0] > 0:  # clients write 0 for what they did not measure
                found[f"{statistic}_{ours}_ms"] = given[0]
    for name, theirs_name in (
        ("request_throughput", "request_throughput"),
        ("output_throughput", "output_throughput"),
        ("total_token_throughput", "total_token_throughput"),
        ("total_token_throughput", "total_throughput"),
    ):
        value = reader.maybe_number(theirs_name)
        if value:
            found[name] = value
    return found


def _lengths(reader: _Fields) -> dict[str, Any]:
    """Lengths and send times of the requests that finished, where the result is detailed."""
    prompts, outputs = reader.array("input_lens"), reader.array("output_lens")
    if prompts is None or outputs is None:
        return {}
    reader.same_length("input_lens", prompts, "output_lens", outputs)
    done = (outputs > 0) & (prompts > 0)
    if not done.any():
        raise UsageError(f"engine result {reader.path}: no request has both input and output tokens")
    starts = reader.array("start_times")
    arrival: Floats | None = None
    if starts is not None:
        reader.same_length("input_lens", prompts, "start_times", starts)
    totals = ("completed", "total_input_tokens", "total_output_tokens", "duration")
    check_detail(prompts, outputs, starts, {name: reader.number(name) for name in totals}, str(reader.path))
    if starts is not None:
        arrival = starts[done] - starts[done].min()
    order = np.arange(int(done.sum())) if arrival is None else np.argsort(arrival, kind="stable")
    return {
        "prompt_tokens": prompts[done].astype(np.int32)[order],
        "output_tokens": outputs[done].astype(np.int32)[order],
        "arrival_s": None if arrival is None else arrival[order],
    }


def _check_detail(result: EngineResult, reader: _Fields) -> None:
    """Per-request times (seconds) must give the mean that the result states in milliseconds."""
    ttfts = reader.array("ttfts")
    stated = result.metrics.get("mean_ttft_ms")
    if ttfts is None or stated is None or not (ttfts > 0).any():
        return
    found = float(ttfts[ttfts > 0].mean()) * 1e3
    if not 0.5 < found / stated < 2.0:
        raise UsageError(
            f"{result.path}: ttfts average {found / 1e3:.4g}, mean_ttft_ms is {stated:.4g}: ttfts must be seconds and "
            "mean_ttft_ms milliseconds; convert one of them"
        )


class _Fields:
    """Checked access to the fields of one result."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw = raw
        self.path = path

    def maybe_number(self, name: str) -> float | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise UsageError(f"engine result {self.path}: {name} = {value!r:.60}; a number of 0 or more is needed")
        return float(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.maybe_number(name)
        if value is None and default is None:
            raise UsageError(f"engine result {self.path} has no {name}; it must come from the client's own result file")
        return float(value if value is not None else default or 0.0)

    def count(self, name: str) -> int:
        value = self.number(name)
        if value < 1 or not value.is_integer():
            raise UsageError(f"engine result {self.path}: {name} = {value:g}; at least one finished request is needed")
        return int(value)

    def maybe_count(self, name: str) -> int | None:
        return None if self._raw.get(name) is None else self.count(name)

    def rate(self) -> float | None:
        """Requests per second; None when all were sent at once (`inf`)."""
        value = self._raw.get("request_rate")
        if value is None or (isinstance(value, str) and value.lower() in ("inf", "infinity")) or value == math.inf:
            return None
        return self.number("request_rate") or None

    def array(self, name: str) -> Floats | None:
        value = self._raw.get(name)
        if value is None or (isinstance(value, list) and not value):
            return None
        try:
            found = np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.array([np.nan])
        if found.ndim != 1 or not np.isfinite(found).all():
            raise UsageError(f"engine result {self.path}: {name} must be a list of numbers, one per request")
        return found

    def text(self, name: str) -> str | None:
        value = self._raw.get(name)
        return value if isinstance(value, str) and value else None

    def shares(self, name: str) -> tuple[float, ...]:
        value = self.array(name)
        if value is None:
            return ()
        shares = value / 100 if (value > 1).any() else value
        if (shares < 0).any() or (shares > 1).any() or (np.diff(shares) > 1e-9).any():
            raise UsageError(f"engine result {self.path}: {name} must be shares from 0 to 1 that do not rise")
        return tuple(float(share) for share in shares)

    def same_length(self, one: str, a: Floats, other: str, b: Floats) -> None:
        if len(a) != len(b):
            raise UsageError(
                f"engine result {self.path}: {one} has {len(a)} entries and {other} {len(b)}; "
                "give lists of the same requests, or leave them out"
            )
