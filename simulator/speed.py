"""How fast the simulator is: engine steps per second of one core, and the memory it needs."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from simulator.requests import RequestBlock
from simulator.run import check, run_engine, step_cost
from simulator.scenario import Scenario


def measure_speed(running: int = 256, steps: int = 1_000_000) -> dict[str, Any]:
    """Simulate about `steps` engine steps with `running` requests running, after a warm-up that compiles.

    Requests of 256 prompt and 2,048 output tokens are replaced as they finish; records are made and dropped. Returns
    steps per second (wall clock, one process), the mean number running and the growth of the peak resident set between
    a tenth and the whole of the run, in MiB.
    """
    _run(running, min(steps, 20_000))
    _run(running, steps // 10)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    state = _run(running, steps)
    seconds = time.perf_counter() - started
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "engine_steps": int(state["num_steps"]),
        "seconds": round(seconds, 3),
        "steps_per_second": round(int(state["num_steps"]) / seconds),
        "mean_running": round(float(state["running_integral"] / state["busy_s"]), 1),
        "peak_rss_growth_mib": round(growth_kib / 1024, 1),
    }


def _run(running: int, steps: int) -> Any:
    scenario = Scenario.model_validate(
        {
            "model": "Qwen3.5-35B-A3B",
            "gpu": "b200",
            "speculation": {"state_method": "treewy", "tree": "1,1,1"},
            "engine": {"max_num_seqs": running, "max_model_len": 4096},
            "workload": {"lengths": "fixed:256/2048", "max_concurrency": running, "num_requests": running},
        }
    )
    cell = check(scenario)
    rounds = 2047 / cell.acceptance_length
    requests = max(running, round(steps / rounds * running))
    return run_engine(cell, step_cost(cell), _blocks(requests), lambda kind, records: None).state


def _blocks(requests: int) -> Iterator[RequestBlock]:
    for start in range(0, requests, 4096):
        count = min(4096, requests - start)
        yield RequestBlock(np.zeros(count), np.full(count, 256, np.int32), np.full(count, 2048, np.int32))
