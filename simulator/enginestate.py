"""What one engine holds, in plain arrays that Numba can compile over: requests, settings, counters, queues."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simulator.blockpool import BlockPool
from simulator.jit import njit

#: Room of a request that holds blocks for `max_model_len` tokens and never needs more; permits without a cap.
UNBOUNDED = np.iinfo(np.int32).max

#: A request that has finished keeps its place in the step that was scheduled before that was known (`done`): it
#: computes nothing when its last token was foreseen, a full verification when accepted drafts ended it early.
FORESEEN, UNFORESEEN = 1, 2

#: One request. `computed` counts tokens whose KV and state exist, `scheduled` the rows of this step, `token_room` the
#: tokens that its blocks hold; `decoding` is 1 when the next step verifies drafts, `done` FORESEEN or UNFORESEEN when
#: it has finished and only keeps its place. `arrival_s` is the time of the send; `next_turn` the slot of the request
#: that is sent `think_s` after this one is answered, or -1. For prefix caching: `row` of the block tables, blocks
#: `published`, tokens at which the next one is due, index of the block that holds the `running_state` and of the one
#: before it that is still held (-1: none), the step in which the state last moved on to another block, and the tokens
#: found cached at admission. What every step reads stands first, in one cache line.
SLOT = np.dtype(
    [
        ("request_id", "i8"),
        ("last_token_s", "f8"),
        ("computed", "i4"),
        ("scheduled", "i4"),
        ("emitted", "i4"),
        ("decoding", "i4"),
        ("done", "i4"),
        ("token_room", "i4"),
        ("publish_at", "i4"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("rounds", "i4"),
        ("accepted", "i4"),
        ("first_token_s", "f8"),
        ("arrival_s", "f8"),
        ("scheduled_s", "f8"),
        ("think_s", "f8"),
        ("priority", "i4"),
        ("next_turn", "i4"),
        ("blocks", "i4"),
        ("num_preemptions", "i4"),
        ("row", "i4"),
        ("published", "i4"),
        ("running_state", "i4"),
        ("last_state", "i4"),
        ("moved_at_step", "i8"),
        ("cached_tokens", "i4"),
    ],
    align=True,
)

#: Engine settings that the scheduler reads, by the names of `simulator.engine.EngineConfig`. `retention_blocks`: a
#: state is kept at every so many blocks (1: all, 0: only the one at the end of the prompt).
SETTINGS = np.dtype(
    [
        ("num_blocks", "i8"),
        ("max_num_seqs", "i8"),
        ("max_num_batched_tokens", "i8"),
        ("long_prefill_token_threshold", "i8"),
        ("chunked_prefill", "i8"),
        ("max_model_len", "i8"),
        ("block_size_tokens", "i8"),
        ("attention_groups", "i8"),
        ("state_blocks", "i8"),
        ("rows", "i8"),
        ("seed", "u8"),
        ("host_us_per_step", "f8"),
        ("host_us_per_prompt_step", "f8"),
        ("prefix_caching", "i8"),
        ("state_groups", "i8"),
        ("speculative_blocks", "i8"),
        ("retention_blocks", "i8"),
        ("watermark_blocks", "i8"),
        ("reserve_full_isl", "i8"),
        ("priority_policy", "i8"),
        ("async_scheduling", "i8"),
    ],
    align=True,
)

#: Queues, counters and the clock. `permits` are requests that the client may still send; those that a step frees count
#: from its end (`freed_s`), or, where the next step was scheduled already (`late_permits`), one step later, but the
#: request that takes one was sent when it became free (`late_s`). The engine asks for more backlog when it holds less
#: than `backlog_low` or when requests that were not yet handed over, the first of them after `last_offered_s`, may have
#: arrived. The scheduler sees requests sent up to `seen_s`. `*_limited_steps` count steps that left requests waiting,
#: by what kept the first of them out; `deferred_steps` those in which it waited for a state that was just being
#: written.
STATE = np.dtype(
    [
        ("now_s", "f8"),
        ("seen_s", "f8"),
        ("free_blocks", "i8"),
        ("num_running", "i8"),
        ("waiting_head", "i8"),
        ("num_waiting", "i8"),
        ("backlog_head", "i8"),
        ("num_backlog", "i8"),
        ("num_timers", "i8"),
        ("backlog_low", "i8"),
        ("last_offered_s", "f8"),
        ("permits", "i8"),
        ("freed_permits", "i8"),
        ("late_permits", "i8"),
        ("freed_s", "f8"),
        ("late_s", "f8"),
        ("num_arrived", "i8"),
        ("num_free_slots", "i8"),
        ("num_free_rows", "i8"),
        ("num_steps", "i8"),
        ("num_finished", "i8"),
        ("num_preemptions", "i8"),
        ("preempted_in_step", "i8"),
        ("states_copied_in_step", "i8"),
        ("states_published_in_step", "i8"),
        ("emitted_tokens", "i8"),
        ("verify_rounds", "i8"),
        ("extrapolated_steps", "i8"),
        ("memory_limited_steps", "i8"),
        ("seqs_limited_steps", "i8"),
        ("budget_limited_steps", "i8"),
        ("prefix_cache_queries", "i8"),
        ("prefix_cache_hits", "i8"),
        ("deferred_steps", "i8"),
        ("stalled", "i8"),
        ("peak_running", "i8"),
        ("peak_waiting", "i8"),
        ("peak_blocks", "i8"),
        ("step_records", "i8"),
        ("gap_records", "i8"),
        ("request_records", "i8"),
        ("busy_s", "f8"),
        ("running_integral", "f8"),
        ("blocks_integral", "f8"),
    ],
    align=True,
)


class Queues(NamedTuple):
    """Requests and queues of one engine.

    `running` is an ordered list of slot numbers, `backlog` and `waiting` are rings of them (`waiting` a heap under the
    policy `priority`), `timers` a heap by the time at which a further turn is sent. The block tables have a row per
    running request, and are empty unless prefixes are cached.
    """

    settings: Any  # [1] SETTINGS
    state: Any  # [1] STATE
    slots: Any  # [capacity] SLOT
    running: Any  # [max_num_seqs] int32
    backlog: Any  # [capacity] int32
    waiting: Any  # [capacity] int32
    timers: Any  # [capacity] int32
    free_slots: Any  # [capacity] int32
    keys: Any  # [capacity, blocks of max_model_len] int64: identity of the tokens up to the end of each block
    pool: BlockPool
    tables: Any  # [max_num_seqs, blocks of max_model_len, attention_groups] int32
    states: Any  # [max_num_seqs, state_groups, 2 + k] int32: running state, k speculative ones, the one before
    free_rows: Any  # [max_num_seqs] int32
    sglang: Any  # [1] simulator.sglang.pool.SGLANG: what SGLang's scheduler knows beside `settings` and `state`


@njit(inline="always")
def num_tokens(slot: Any) -> Any:
    """Tokens of the request so far: prompt and what it has emitted."""
    return slot.prompt_tokens + slot.emitted


@njit(inline="always")
def attention_blocks(settings: Any, tokens: Any) -> Any:
    """Blocks that hold the KV of that many tokens, over all attention groups."""
    capped = min(tokens, settings.max_model_len)
    return settings.attention_groups * -(-capped // settings.block_size_tokens)
