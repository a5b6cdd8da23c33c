"""Pages of SGLang's KV pool, and what its scheduler knows beside vLLM's settings and state."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.enginestate import Queues
from simulator.jit import njit

#: Settings and state of this scheduler beside vLLM's. `enabled` is 0 when vLLM's scheduler runs. `state_capped`: the
#: state pool sets `max_num_seqs`. `batch_is_full`: no prompt is tried again before a request leaves the batch.
SGLANG = np.dtype(
    [
        ("enabled", "i8"),
        ("overlap_schedule", "i8"),
        ("mixed_chunk", "i8"),
        ("chunked_prefill_size", "i8"),
        ("max_prefill_tokens", "i8"),
        ("max_new_tokens", "i8"),
        ("clip_new_tokens", "i8"),
        ("state_capped", "i8"),
        ("init_new_token_ratio", "f8"),
        ("min_new_token_ratio", "f8"),
        ("new_token_ratio", "f8"),
        ("batch_is_full", "i8"),
        ("finished_seen", "i8"),
    ],
    align=True,
)


@njit(inline="always")
def is_prompt(slot: Any) -> Any:
    """Whether a running request is still computing its prompt: at most one, the last, whose prompt was cut."""
    return slot.decoding == 0


@njit(inline="always")
def pages(queues: Queues, tokens: Any) -> Any:
    """Pages of so many tokens."""
    return -(-tokens // queues.settings[0].block_size_tokens)


@njit(inline="always")
def allowed_tokens(queues: Queues, slot: Any) -> Any:
    """Tokens that a request may emit in all: what its client asked for, as far as the context goes."""
    asked = min(queues.sglang[0].max_new_tokens, queues.settings[0].max_model_len - slot.prompt_tokens)
    return max(asked, slot.output_tokens)


@njit(inline="always")
def hold_pages(queues: Queues, slot: Any, tokens: Any) -> None:
    """Give a request the pages that it lacks for so many tokens."""
    more = max(pages(queues, tokens) - slot.blocks, 0)
    slot.blocks += more
    queues.state[0].free_blocks -= more


@njit()
def decode_pages(queues: Queues) -> int:
    """Pages that the decoding requests lack for the rows of one step."""
    settings, state = queues.settings[0], queues.state[0]
    missing = 0
    for place in range(state.num_running):
        slot = queues.slots[queues.running[place]]
        if not is_prompt(slot):
            missing += lacks(queues, slot, settings.rows)
    return missing


@njit(inline="always")
def lacks(queues: Queues, slot: Any, rows: Any) -> Any:
    """Pages that a request lacks for so many rows."""
    return max(pages(queues, slot.computed + rows) - slot.blocks, 0)
