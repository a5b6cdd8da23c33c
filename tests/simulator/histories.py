"""Random engine histories: any workload on any engine, down to the smallest pool, and what must hold after every step.

An engine model takes part through a `Harness`: a strategy of histories and a `Watcher` with its own checks. Those that
hold for every engine are in `harness.py`; `HARNESSES` is what `test_histories.py` runs.
"""

from __future__ import annotations

from harness import Harness
from sglang_harness import SglangHarness
from vllm_harness import VllmHarness

HARNESSES: dict[str, Harness] = {"vllm": VllmHarness(), "sglang": SglangHarness()}
