"""INV-3 to INV-6 on random histories of every engine model."""

from __future__ import annotations

import os

import pytest
from harness import check_end
from histories import HARNESSES
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

#: Histories of one engine in the slow run; TREEWY_HISTORIES=10000 runs the full count.
MANY = int(os.environ.get("TREEWY_HISTORIES", "2000"))
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_history(engine: str, data: st.DataObject) -> None:
    harness = HARNESSES[engine]
    history = data.draw(harness.histories())
    served, kept = harness.serve(history, harness.watcher(history))
    check_end(history, served, kept)


@pytest.mark.parametrize("engine", HARNESSES)
@settings(RELAXED, max_examples=200)
@given(data=st.data())
def test_inv_3_4_5_hold_on_random_histories(engine: str, data: st.DataObject) -> None:
    check_history(engine, data)


@pytest.mark.slow
@pytest.mark.parametrize("engine", HARNESSES)
@settings(RELAXED, max_examples=MANY)
@given(data=st.data())
def test_inv_3_4_5_hold_on_many_random_histories(engine: str, data: st.DataObject) -> None:
    check_history(engine, data)


@pytest.mark.parametrize("engine", HARNESSES)
@pytest.mark.parametrize("event", ["num_preemptions", "memory_limited_steps", "seqs_limited_steps"])
def test_the_histories_reach_full_pools(engine: str, event: str) -> None:
    harness = HARNESSES[engine]
    reached = settings(RELAXED, max_examples=500, phases=[Phase.generate], derandomize=True, database=None)
    find(harness.histories(), lambda history: harness.serve(history, None)[0].state[event] > 1, settings=reached)


@pytest.mark.parametrize("engine", HARNESSES)
@settings(RELAXED, max_examples=100)
@given(data=st.data())
def test_inv_6_one_seed_gives_one_result(engine: str, data: st.DataObject) -> None:
    harness = HARNESSES[engine]
    history = data.draw(harness.histories())
    first, second = (harness.serve(history, None)[1] for _ in range(2))
    assert first.keys() == second.keys()
    for kind, records in first.items():
        for name in records.dtype.names or [...]:
            assert records[name].tobytes() == second[kind][name].tobytes()
