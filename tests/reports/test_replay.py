"""Replays of engine logs: the second half of the requests is met by constants from the first."""

from __future__ import annotations

import numpy as np
import pytest

from reports.replay import LOGS, Replay, replay


@pytest.fixture(scope="module")
def dense() -> Replay:
    return Replay(LOGS[0])


def test_the_log_is_replayed_request_by_request(dense: Replay) -> None:
    simulated = dense.simulate({})
    for name in ("prompts", "outputs"):
        np.testing.assert_array_equal(simulated[name], dense.logged[name])
    np.testing.assert_allclose(simulated["arrival_s"], dense.logged["arrival_s"])


def test_slower_memory_lengthens_every_token(dense: Replay) -> None:
    fast, slow = (dense.simulate({"gpu_time.decode_factor": factor}) for factor in (1.0, 1.5))
    assert (slow["last_s"] - slow["first_s"]).mean() > 1.2 * (fast["last_s"] - fast["first_s"]).mean()


@pytest.mark.slow
def test_the_second_half_is_predicted_from_the_first() -> None:
    found = {error.metric: error for error in replay(LOGS[0]).errors}
    assert found["ttft_ms"].median_error < 0.05
    assert found["tpot_ms"].median_error < 0.05
    assert found["e2el_ms"].median_error < 0.05
    assert found["tpot_ms"].explained > 0.9
