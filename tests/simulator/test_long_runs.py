"""Long runs in flat memory."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from simulator.check import check
from simulator.run import run_engine, step_cost
from simulator.scenario import Scenario
from simulator.workload import request_blocks

#: Requests of the trace's hour, and of a day like it.
HOUR, DAY = 19_366, 24 * 19_366


def serve(requests: int) -> Any:
    """Azure conversation traffic at ten times its rate, with prefix caching; the engine's counters."""
    scenario = Scenario.model_validate(
        {
            "model": "Qwen3.5-35B-A3B",
            "gpu": "b200",
            "engine": {"max_model_len": 16384, "enable_prefix_caching": True},
            "speculation": {"state_method": "treelog", "tree": "1,1,1"},
            "workload": {
                "trace": "azure-conv",
                "arrivals": "trace",
                "request_rate": 10 * HOUR / 3600,
                "num_requests": requests,
            },
        }
    )
    cell = check(scenario)
    blocks = request_blocks(scenario.workload, scenario.seed)
    return run_engine(cell, step_cost(cell), blocks, lambda kind, records: None).state


@pytest.mark.slow
def test_a_day_of_chat_traffic_at_ten_times_its_rate_needs_no_more_memory_than_an_hour() -> None:
    serve(HOUR)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = serve(DAY)
    assert state["num_finished"] == DAY
    assert state["peak_waiting"] < 2000  # the service keeps up
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 30 << 10
