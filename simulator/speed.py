"""How fast the simulator is: engine steps per second of one core, and the memory it needs."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from simulator.check import check
from simulator.requests import PrefixIds, RequestBlock
from simulator.run import run_engine, step_cost
from simulator.scenario import Scenario

#: Prompt tokens without and with prefix caching, and how many of the latter all requests have in common.
PROMPT, CACHED_PROMPT, SHARED = 256, 2304, 2200
OUTPUT = 2048


def measure_speed(running: int = 256, steps: int = 1_000_000) -> dict[str, Any]:
    """Simulate about `steps` engine steps with `running` requests running, after a warm-up that compiles.

    Requests of 256 prompt and 2,048 output tokens are replaced as they finish; records are made and dropped. Returns
    steps per second (of processor time), the mean number running and the growth of the peak resident set between
    a tenth and the whole of the run, in MiB. `prefix_caching_steps_per_second` is that of as many steps with prefix
    caching and prompts of 2,304 tokens, 2,200 of them shared.
    """
    for prefix_caching in (True, False):
        _run(running, min(steps, 20_000), prefix_caching)
        _run(running, steps // 10, prefix_caching)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state, seconds = _timed(running, steps, prefix_caching=False)
    cached, cached_seconds = _timed(running, steps, prefix_caching=True)
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "engine_steps": int(state["num_steps"]),
        "seconds": round(seconds, 3),
        "steps_per_second": round(int(state["num_steps"]) / seconds),
        "mean_running": round(float(state["running_integral"] / state["busy_s"]), 1),
        "prefix_caching_steps_per_second": round(int(cached["num_steps"]) / cached_seconds),
        "prefix_cache_hit_rate": round(float(cached["prefix_cache_hits"] / cached["prefix_cache_queries"]), 3),
        "peak_rss_growth_mib": round(growth_kib / 1024, 1),
    }


def _timed(running: int, steps: int, prefix_caching: bool) -> tuple[Any, float]:
    started = time.process_time()
    state = _run(running, steps, prefix_caching)
    return state, time.process_time() - started


def _run(running: int, steps: int, prefix_caching: bool) -> Any:
    prompt = CACHED_PROMPT if prefix_caching else PROMPT
    scenario = Scenario.model_validate(
        {
            "model": "Qwen3.5-35B-A3B",
            "gpu": "b200",
            "speculation": {"state_method": "treewy", "tree": "1,1,1"},
            "engine": {
                "max_num_seqs": running,
                "max_model_len": prompt + OUTPUT + 1792,
                "enable_prefix_caching": prefix_caching,
            },
            "workload": {
                "lengths": f"fixed:{prompt}/{OUTPUT}",
                "max_concurrency": running,
                "num_requests": running,
            },
        }
    )
    cell = check(scenario)
    rounds = (OUTPUT - 1) / cell.acceptance_length
    requests = max(running, round(steps / rounds * running))
    return run_engine(cell, step_cost(cell), _blocks(requests, prompt), lambda kind, records: None).state


def _blocks(requests: int, prompt: int) -> Iterator[RequestBlock]:
    for start in range(0, requests, 4096):
        count = min(4096, requests - start)
        prefix = PrefixIds.streams(np.full(count, -1, np.int64), SHARED)
        prompts, outputs = (np.full(count, tokens, np.int32) for tokens in (prompt, OUTPUT))
        yield RequestBlock(np.zeros(count), prompts, outputs, prefix=prefix)
