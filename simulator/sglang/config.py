"""What SGLang's scheduler needs to know, and the record that carries it into the compiled loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulator.sglang.decode import INIT_RATIO, MIN_RATIO_SHARE
from simulator.sglang.pool import SGLANG
from simulator.sglang.settings import CLIP_NEW_TOKENS


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """Limits in tokens; `chunked_prefill_size` 0 computes prompts whole.

    The KV pool, the most running requests and the rows of a decoding request are in `simulator.engine.EngineConfig`:
    a block there is a page. State slots are no limit of their own: `max_num_seqs` is at most what they let run, which
    `state_capped` says.
    """

    state_capped: bool = False
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    max_new_tokens: int = 0
    mixed_chunk: bool = False
    overlap_schedule: bool = True
    schedule_conservativeness: float = 1.0


def sglang_record(config: SglangConfig | None) -> Any:
    """`[1]` array of `simulator.sglang.pool.SGLANG`; all zeros, so disabled, without a config."""
    record = np.zeros(1, SGLANG)
    if config is None:
        return record
    for name, value in asdict(config).items():
        if name in (SGLANG.names or ()):
            record[name] = value
    initial = min(INIT_RATIO * config.schedule_conservativeness, 1.0)
    record["enabled"] = 1
    record["clip_new_tokens"] = CLIP_NEW_TOKENS
    record["init_new_token_ratio"] = record["new_token_ratio"] = initial
    record["min_new_token_ratio"] = initial * MIN_RATIO_SHARE
    return record
