"""SGLang's prompts go first: what that costs the requests that decode, in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from constant_service import SERVICE_S, serve

from simulator.requests import RequestBlock


def test_prompts_that_go_first_slow_the_decoding_requests_down() -> None:
    """Ten clients out of phase: in every round of a request, each of the other nine stops it for one prompt."""
    outputs = 100
    arrival_s = 0.1 * np.arange(1000)
    block = RequestBlock(arrival_s, np.full(1000, 5, np.int32), np.full(1000, outputs, np.int32))
    _, records = serve("sglang", iter([block]), running=10, max_concurrency=10)
    middle = records[200:800]
    gaps = (middle["last_token_s"] - middle["first_token_s"]).mean() / SERVICE_S
    assert gaps == pytest.approx(outputs - 1 + 10, abs=1.5)
