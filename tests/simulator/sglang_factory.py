"""Small SGLang engines for tests."""

from __future__ import annotations

from typing import Any

from factory import small

from simulator.engine import EngineConfig
from simulator.sglang.config import SglangConfig


def small_sglang(
    tokens: int = 640, page_size: int = 1, sglang: dict[str, Any] | None = None, **changes: Any
) -> EngineConfig:
    """An engine with a KV pool of `tokens`, prompts cut at 64 tokens; 1 ms of host time per step, not hidden."""
    values: dict[str, Any] = {
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 128,
        "overlap_schedule": False,
    }
    return small(
        num_blocks=tokens // page_size,
        block_size_tokens=page_size,
        state_blocks=0,
        sglang=SglangConfig(**(values | (sglang or {}))),
        **changes,
    )
