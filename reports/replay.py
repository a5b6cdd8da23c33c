"""Per-request replay of two vLLM logs: arrival by arrival, constants from the first half, the second half predicted.

The logs (casys-kaist/LLMServingSim, bench/examples) hold 300 requests each on RTX PRO 6000 GPUs, a type without
operator tables: the step cost comes from physical constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from lab.acceptance import acceptance_from
from lab.data import read_csv
from lab.methods import get_method
from lab.shapes import load_shape
from lab.trees import DraftTree
from lab.units import GIB
from simulator.calibration.constants import DEFAULT_NAMES, Values
from simulator.calibration.fit import Fitted, fit
from simulator.calibration.measure import latency_metrics, measure
from simulator.check import CheckedCell
from simulator.gputime import with_gpu_time
from simulator.ledger import build_ledger
from simulator.physicalcost import PhysicalGpu, Ranks, physical_cost
from simulator.requests import RequestBlock
from simulator.scenario import Scenario
from simulator.settings import EngineSettings
from simulator.stepcost import StepCost

#: NVIDIA RTX PRO 6000 Blackwell, data sheet: GDDR7 1,792 GB/s, bf16 503.8 TFLOP/s dense, PCIe 5.0 x16, 96 GB.
RTX_PRO_6000 = PhysicalGpu("rtx-pro-6000", 1.792e12, 503.8e12, 64e9, 96 * 10**9)
#: Default share of memory of vLLM 0.19, and what the engine keeps for itself.
UTILIZATION = 0.9
RUNTIME_BYTES = 4 * GIB
#: The requests of the first half are fitted in groups of consecutive arrivals.
GROUPS = 3
METRICS = ("ttft_ms", "tpot_ms", "e2el_ms")


@dataclass(frozen=True, slots=True)
class Log:
    """One log: its file, model, GPUs, and the engine's own arguments."""

    name: str
    model: str
    ranks: Ranks
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 40960


#: vLLM 0.19.0, bf16, KV auto. Two data-parallel replicas with shared experts run in lockstep: they are simulated as one
#: engine with the limits of both.
LOGS = (
    Log("qwen3_32b", "Qwen3-32B", Ranks(tensor_parallel=2)),
    Log("qwen3_30b_a3b", "Qwen3-30B-A3B-Instruct-2507", Ranks(data_parallel=2), 256, 4096),
)


@dataclass(frozen=True)
class Part:
    """Consecutive requests of a replay as a load level: `fit` sees their metrics only, the engine serves all."""

    name: str
    replay: Replay
    first: int
    end: int

    @property
    def measured(self) -> dict[str, float]:
        return self.replay.metrics_of(self.replay.logged, self.first, self.end)

    def predict(self, values: Values) -> dict[str, float]:
        return self.replay.metrics_of(self.replay.simulate(values), self.first, self.end)


class Replay:
    """A log and the simulated engine that serves the same requests at the same times."""

    def __init__(self, log: Log) -> None:
        self.log = log
        frame = read_csv("published", f"vllm_requests_rtxpro6000_{log.name}.csv.gz").sort(
            "arrival_s", maintain_order=True
        )
        self.logged = _times(frame)
        self._blocks = RequestBlock(
            frame["arrival_s"].to_numpy(),
            frame["input_tokens"].cast(pl.Int32).to_numpy(),
            frame["output_tokens"].cast(pl.Int32).to_numpy(),
        )
        self._cell, self._cost = _cell(log)
        self.simulate = cache_by_values(self._simulate)

    def parts(self) -> list[Part]:
        """The first half in groups."""
        bounds = np.linspace(0, len(self.logged["arrival_s"]) // 2, GROUPS + 1).astype(int)
        return [Part(f"requests {a} to {b - 1}", self, int(a), int(b)) for a, b in itertools.pairwise(bounds)]

    def metrics_of(self, times: dict[str, Any], first: int, end: int) -> dict[str, float]:
        """Latencies of the requests numbered `first` to `end` - 1; no throughput, which belongs to the whole run."""
        chosen = {name: values[first:end] for name, values in times.items()}
        found = latency_metrics(**chosen)
        return {name: value for name, value in found.items() if name.endswith("_ms")}

    def _simulate(self, values: Values) -> dict[str, Any]:
        host = {name.partition(".")[2]: value for name, value in values.items() if name.startswith("host.")}
        factors = {name.partition(".")[2]: value for name, value in values.items() if name.startswith("gpu_time.")}
        scenario = self._cell.scenario
        scenario = scenario.model_copy(
            update={
                "host": scenario.host.model_copy(update=host),
                "gpu_time": scenario.gpu_time.model_copy(update=factors),
            }
        )
        cell = replace(self._cell, scenario=scenario)
        found = measure(cell, with_gpu_time(self._cost, scenario.gpu_time), self._requests()).requests
        return {
            "arrival_s": found["arrival_s"],
            "first_s": found["first_token_s"],
            "last_s": found["last_token_s"],
            "prompts": found["prompt_tokens"],
            "outputs": found["output_tokens"],
        }

    def _requests(self) -> Iterator[RequestBlock]:
        return iter([self._blocks])


def cache_by_values(function: Any) -> Any:
    """Remember results by the constants' values."""

    @cache
    def known(items: tuple[tuple[str, float], ...]) -> Any:
        return function(dict(items))

    return lambda values: known(tuple(sorted(values.items())))


def _times(frame: pl.DataFrame) -> dict[str, Any]:
    return {
        "arrival_s": frame["arrival_s"].to_numpy(),
        "first_s": frame["first_token_s"].to_numpy(),
        "last_s": frame["last_token_s"].to_numpy(),
        "prompts": frame["input_tokens"].to_numpy(),
        "outputs": frame["output_tokens"].to_numpy(),
    }


def _cell(log: Log) -> tuple[CheckedCell, StepCost]:
    shape, method, tree = load_shape(log.model), get_method("recurrent"), DraftTree.chain(0)
    tp, dp = log.ranks.tensor_parallel, log.ranks.data_parallel
    weights = shape.weight_bytes("bf16", tp * dp)
    pool = round((UTILIZATION * RTX_PRO_6000.memory_bytes - weights - RUNTIME_BYTES) * dp)
    engine = EngineSettings(
        max_num_seqs=log.max_num_seqs,
        max_num_batched_tokens=log.max_num_batched_tokens,
        max_model_len=log.max_model_len,
        kv_cache_memory_bytes=pool,
    )
    scenario = Scenario.model_validate(
        {
            "name": log.name,
            "model": log.model,
            "gpu": RTX_PRO_6000.name,
            "tensor_parallel_size": tp,
            "engine": engine,
            "speculation": {"state_method": "recurrent"},
            "workload": {"lengths": "fixed:1/1", "max_concurrency": None, "arrivals": "constant", "request_rate": 1},
        }
    )
    ledger = build_ledger(shape, None, tp, engine, method, tree)
    cost = physical_cost(shape, RTX_PRO_6000, log.ranks, engine)
    acceptance = acceptance_from(preset=None, per_depth=(0.0,))
    return CheckedCell(scenario, engine, shape, method, tree, ledger, acceptance, 1.0), cost


@dataclass(frozen=True, slots=True)
class MetricError:
    """One latency over the second half: measured and simulated means, spread over requests, errors request by request.

    `median_error` and `p90_error` are absolute relative errors of single requests; `explained` is one less the ratio of
    squared errors to the measured variance.
    """

    metric: str
    measured_mean: float
    measured_std: float
    simulated_mean: float
    median_error: float
    p90_error: float
    explained: float

    @property
    def mean_error(self) -> float:
        return self.simulated_mean / self.measured_mean - 1


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Fitted constants of one log and the errors of its second half."""

    log: Log
    requests: int
    constants: tuple[Fitted, ...]
    errors: tuple[MetricError, ...]


def replay(log: Log) -> ReplayResult:
    """Fit on the first half of the requests, predict the second."""
    run = Replay(log)
    fitted = fit(run.parts(), DEFAULT_NAMES)
    simulated = run.simulate(fitted.values)
    half = len(run.logged["arrival_s"]) // 2
    found = []
    for name in METRICS:
        measured, predicted = (per_request(times, name)[half:] for times in (run.logged, simulated))
        relative = np.abs(predicted / measured - 1)
        unexplained = float(((predicted - measured) ** 2).mean() / measured.var())
        found.append(
            MetricError(
                name,
                float(measured.mean()),
                float(measured.std()),
                float(predicted.mean()),
                float(np.median(relative)),
                float(np.percentile(relative, 90)),
                1 - unexplained,
            )
        )
    return ReplayResult(log, len(run.logged["arrival_s"]), fitted.constants, tuple(found))


def per_request(times: dict[str, Any], metric: str) -> Any:
    """A latency of every request, in milliseconds."""
    if metric == "ttft_ms":
        return (times["first_s"] - times["arrival_s"]) * 1e3
    if metric == "e2el_ms":
        return (times["last_s"] - times["arrival_s"]) * 1e3
    return (times["last_s"] - times["first_s"]) / (times["outputs"] - 1) * 1e3


def replays() -> list[ReplayResult]:
    """All logs."""
    return [replay(log) for log in LOGS]
