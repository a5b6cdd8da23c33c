"""The scheduler of vLLM's v1 engine: which requests run how many rows in one engine step.

Running requests come first, in order, and drafts count against the token budget. When blocks run out the last running
request is preempted: it loses its blocks and goes back to the front of the waiting queue, to be recomputed. Waiting
requests are admitted only in a step without preemption, first come first served, and only when the whole prompt fits;
their prompts are cut into chunks by what is left of the budget.

The client's side is here too: a backlog of requests that wait for their arrival time and, when the client caps its
concurrency, for a permit.

All state is in plain arrays so that Numba compiles the loop; `simulator.engine` owns the arrays and the clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simulator.jit import njit

#: Room of a request that holds blocks for `max_model_len` tokens and never needs more; permits without a cap.
UNBOUNDED = np.iinfo(np.int32).max

#: One request. `computed` counts tokens whose KV and state exist, `scheduled` the rows of this step, `token_room` the
#: tokens that its blocks hold; `decoding` is 1 when the next step verifies drafts. `arrival_s` is the time of the send.
SLOT = np.dtype(
    [
        ("request_id", "i8"),
        ("arrival_s", "f8"),
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("last_token_s", "f8"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("emitted", "i4"),
        ("computed", "i4"),
        ("scheduled", "i4"),
        ("decoding", "i4"),
        ("blocks", "i4"),
        ("token_room", "i4"),
        ("num_preemptions", "i4"),
        ("rounds", "i4"),
        ("accepted", "i4"),
    ],
    align=True,
)

#: Engine settings that the scheduler reads.
SETTINGS = np.dtype(
    [
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
    ],
    align=True,
)

#: Queues, counters and the clock. `permits` are requests that the client may still send; those that a step frees count
#: from its end. The engine asks for more backlog when it holds less than `backlog_low` or when requests that were not
#: yet handed over, the first of them after `last_offered_s`, may have arrived. `*_limited_steps` count steps that left
#: requests waiting, by what kept the first of them out.
STATE = np.dtype(
    [
        ("now_s", "f8"),
        ("free_blocks", "i8"),
        ("num_running", "i8"),
        ("waiting_head", "i8"),
        ("num_waiting", "i8"),
        ("backlog_head", "i8"),
        ("num_backlog", "i8"),
        ("backlog_low", "i8"),
        ("last_offered_s", "f8"),
        ("permits", "i8"),
        ("freed_permits", "i8"),
        ("num_arrived", "i8"),
        ("num_free_slots", "i8"),
        ("num_steps", "i8"),
        ("num_finished", "i8"),
        ("num_preemptions", "i8"),
        ("preempted_in_step", "i8"),
        ("emitted_tokens", "i8"),
        ("verify_rounds", "i8"),
        ("extrapolated_steps", "i8"),
        ("memory_limited_steps", "i8"),
        ("seqs_limited_steps", "i8"),
        ("budget_limited_steps", "i8"),
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
    """Requests and queues of one engine: `backlog`, `waiting` are rings of slot numbers, `running` an ordered list."""

    settings: Any  # [1] SETTINGS
    state: Any  # [1] STATE
    slots: Any  # [capacity] SLOT
    running: Any  # [max_num_seqs] int32
    backlog: Any  # [capacity] int32
    waiting: Any  # [capacity] int32
    free_slots: Any  # [capacity] int32
    sglang: Any  # [1] simulator.sglang.pool.SGLANG: what SGLang's scheduler knows beside `settings` and `state`


@njit(inline="always")
def num_tokens(slot: Any) -> Any:
    """Tokens of the request so far: prompt and what it has emitted."""
    return slot.prompt_tokens + slot.emitted


@njit(inline="always")
def blocks_for(settings: Any, tokens: Any) -> Any:
    """Blocks that a running request of that many tokens holds, states included."""
    capped = min(tokens, settings.max_model_len)
    return settings.attention_groups * -(-capped // settings.block_size_tokens) + settings.state_blocks


@njit()
def schedule(queues: Queues) -> None:
    """Set `scheduled` of every running request for the next step, after admissions and preemptions."""
    settings, state = queues.settings[0], queues.state[0]
    send(queues)
    budget = settings.max_num_batched_tokens
    lookahead = settings.rows - 1
    state.preempted_in_step = 0

    turn = 0
    while turn < state.num_running:
        slot = queues.slots[queues.running[turn]]
        wanted = settings.rows if slot.decoding else _chunk(settings, slot)
        rows = min(wanted, budget, settings.max_model_len - slot.computed)
        slot.scheduled = rows
        if rows > 0 and slot.computed + rows + lookahead > slot.token_room:
            needed = blocks_for(settings, slot.computed + rows + lookahead) - slot.blocks
            while needed > state.free_blocks and turn < state.num_running:
                _preempt_last(queues)
            if turn == state.num_running:
                break  # the request itself was the last one left to preempt
            _hold_blocks(queues, slot, needed)
        budget -= rows
        turn += 1
    if state.preempted_in_step == 0:
        _admit(queues, budget)
    else:
        state.memory_limited_steps += 1


@njit()
def _admit(queues: Queues, budget: int) -> None:
    """Move waiting requests to the running ones, first come first served, while they fit."""
    settings, state = queues.settings[0], queues.state[0]
    lookahead = settings.rows - 1
    while state.num_waiting > 0 and budget > 0 and state.num_running < settings.max_num_seqs:
        index = queues.waiting[state.waiting_head]
        slot = queues.slots[index]
        chunk = min(_chunk(settings, slot), budget)
        if settings.chunked_prefill == 0 and chunk < num_tokens(slot):
            break  # the whole prompt waits for a step with room for it
        whole = blocks_for(settings, num_tokens(slot))
        needed = blocks_for(settings, chunk + lookahead)
        if max(whole, needed) > state.free_blocks:
            state.memory_limited_steps += 1
            return
        state.waiting_head = (state.waiting_head + 1) % len(queues.waiting)
        state.num_waiting -= 1
        queues.running[state.num_running] = index
        state.num_running += 1
        if np.isnan(slot.scheduled_s):
            slot.scheduled_s = state.now_s
        slot.scheduled = chunk
        _hold_blocks(queues, slot, needed)
        budget -= chunk
    if state.num_waiting > 0 and state.num_running == settings.max_num_seqs:
        state.seqs_limited_steps += 1
    elif state.num_waiting > 0:
        state.budget_limited_steps += 1


@njit(inline="always")
def _chunk(settings: Any, slot: Any) -> Any:
    """Prompt tokens that a request would like to compute in one step."""
    rest = num_tokens(slot) - slot.computed
    threshold = settings.long_prefill_token_threshold if settings.chunked_prefill else 0
    return min(rest, threshold) if threshold > 0 else rest


@njit()
def send(queues: Queues) -> None:
    """Move requests that have arrived from the client's backlog to the waiting queue, as far as its permits go.

    A request that used a permit freed by the last step was sent when that step ended; the others when they arrived.
    """
    state = queues.state[0]
    while state.num_backlog > 0 and state.permits + state.freed_permits > 0:
        index = queues.backlog[state.backlog_head]
        slot = queues.slots[index]
        if slot.arrival_s > state.now_s:
            break
        state.backlog_head = (state.backlog_head + 1) % len(queues.backlog)
        state.num_backlog -= 1
        if state.permits > 0:
            state.permits -= 1
        else:
            state.freed_permits -= 1
            slot.arrival_s = max(slot.arrival_s, state.now_s)
        queues.waiting[(state.waiting_head + state.num_waiting) % len(queues.waiting)] = index
        state.num_waiting += 1
        state.num_arrived += 1
    state.permits += state.freed_permits
    state.freed_permits = 0


@njit()
def _hold_blocks(queues: Queues, slot: Any, count: Any) -> None:
    """Give a request `count` more blocks of the pool."""
    settings = queues.settings[0]
    slot.blocks += count
    queues.state[0].free_blocks -= count
    attention_blocks = (slot.blocks - settings.state_blocks) // settings.attention_groups
    room = attention_blocks * settings.block_size_tokens
    slot.token_room = room if room < settings.max_model_len else UNBOUNDED


@njit()
def _preempt_last(queues: Queues) -> None:
    """Take the last running request's blocks away and put it at the front of the waiting queue."""
    state = queues.state[0]
    state.num_running -= 1
    index = queues.running[state.num_running]
    slot = queues.slots[index]
    release_blocks(queues, slot)
    slot.computed = 0
    slot.scheduled = 0
    slot.decoding = 0
    slot.num_preemptions += 1
    state.num_preemptions += 1
    state.preempted_in_step += 1
    capacity = len(queues.waiting)
    state.waiting_head = (state.waiting_head - 1 + capacity) % capacity
    queues.waiting[state.waiting_head] = index
    state.num_waiting += 1


@njit(inline="always")
def release_blocks(queues: Queues, slot: Any) -> None:
    """Return all blocks of a request to the pool."""
    queues.state[0].free_blocks += slot.blocks
    slot.blocks = 0
    slot.token_room = 0
