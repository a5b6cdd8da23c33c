"""The scheduler of SGLang: prompts first, then one decode step of all that run; two pools.

A batch of new prompts goes before decoding (with `enable_mixed_chunk` the decoding requests ride along). A prompt is
admitted when the KV cache holds its tokens and those it may still emit beside what the running requests are expected to
emit: their rest times `new_token_ratio`. The ratio falls with every decode step; it is too bold when decoding runs out
of tokens, and then requests are retracted: they lose their tokens, go to the end of the queue and are recomputed, and
the ratio is raised. A running request also holds slots of the state pool. `srt/managers/schedule_policy.py`,
`schedule_batch.py` of SGLang 0.5.23.

Requests, queues and records are those of `simulator.enginestate`; a page of the KV pool is a block there. Prompts are
computed whole: what the radix cache would hit is not modelled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.enginestate import Queues, num_tokens
from simulator.jit import njit
from simulator.sglang.decode import decode, decode_all
from simulator.sglang.pool import allowed_tokens, decode_pages, hold_pages, is_prompt, pages
from simulator.waitqueue import dequeue, first_waiting, send

#: In place of a limit that is off.
_NO_LIMIT = np.int64(1) << 40


@njit()
def schedule_sglang(queues: Queues) -> None:
    """Set `scheduled` of the requests of the next step: a batch of prompts, or all that decode."""
    state, own = queues.state[0], queues.sglang[0]
    if state.num_running + state.num_waiting == 0:
        own.new_token_ratio = own.init_new_token_ratio
    send(queues)
    state.preempted_in_step = 0
    if state.num_running == 0 or own.finished_seen != state.num_finished:
        own.batch_is_full = 0
    own.finished_seen = state.num_finished
    tokens = _prompts(queues)
    _count_waiting(queues)
    if tokens == 0:
        decode(queues)


@njit(inline="always")
def _may_emit(queues: Queues, slot: Any) -> Any:
    """Tokens that admission expects of a request at most."""
    return min(allowed_tokens(queues, slot) - slot.emitted, queues.sglang[0].clip_new_tokens)


@njit()
def _prompts(queues: Queues) -> int:
    """Schedule a batch of prompts, the one that was cut before new ones; returns their tokens."""
    settings, state, own = queues.settings[0], queues.state[0], queues.sglang[0]
    before = state.num_running
    cut = before > 0 and is_prompt(queues.slots[queues.running[before - 1]])
    if not cut and (state.num_waiting == 0 or own.batch_is_full or _is_full(queues)):
        return 0
    decoding = before - 1 if cut else before
    mixed_rows = decoding * settings.rows if own.mixed_chunk else 0
    mixed_pages = decode_pages(queues) if own.mixed_chunk else 0
    chunk_room = own.chunked_prefill_size - mixed_rows if own.chunked_prefill_size > 0 else _NO_LIMIT
    input_room = own.max_prefill_tokens - mixed_rows
    if mixed_pages > state.free_blocks or chunk_room <= 0:
        return 0
    state.free_blocks -= mixed_pages  # set aside; given back, and then held, when the batch is complete
    tokens = 0
    if cut:
        slot = queues.slots[queues.running[before - 1]]
        tokens = _chunk(queues, slot, min(chunk_room, _room(queues, slot)))
        hold_pages(queues, slot, slot.computed + tokens)
        slot.scheduled = tokens
        cut = slot.computed + tokens < num_tokens(slot)
    if not cut:
        tokens += _admit(queues, decoding, chunk_room - tokens, input_room - tokens, tokens)
    state.free_blocks += mixed_pages
    if mixed_rows and tokens:
        decode_all(queues, decoding)
    return tokens


@njit()
def _admit(queues: Queues, decoding: int, chunk_room: int, input_room: int, tokens: int) -> int:
    """Admit waiting requests, first come first served, while both pools and the step have room for them.

    `tokens` are those of the prompt that the batch continues. Returns the tokens of new prompts.
    """
    settings, state, own = queues.settings[0], queues.state[0], queues.sglang[0]
    page = settings.block_size_tokens
    total_room = state.free_blocks * page - _expected(queues, decoding)
    if tokens:
        total_room -= _may_emit(queues, queues.slots[queues.running[state.num_running - 1]])
    admitted = 0
    while state.num_waiting > 0 and chunk_room > 0 and input_room > 0 and not _is_full(queues):
        index = first_waiting(queues)
        slot = queues.slots[index]
        prompt, more = num_tokens(slot), _may_emit(queues, slot)
        if prompt + more + page >= total_room:
            own.batch_is_full = 1
            break
        chunk = _chunk(queues, slot, chunk_room)
        if chunk == 0 or (prompt >= input_room and tokens + admitted > 0):
            break
        dequeue(queues)
        queues.running[state.num_running] = index
        state.num_running += 1
        if np.isnan(slot.scheduled_s):
            slot.scheduled_s = state.now_s
        slot.scheduled = chunk
        hold_pages(queues, slot, chunk)
        charged = pages(queues, chunk) * page
        total_room -= charged + more + page
        chunk_room -= charged
        input_room -= charged
        admitted += chunk
        if chunk < prompt:
            break
    return admitted


@njit(inline="always")
def _is_full(queues: Queues) -> Any:
    """Whether `max_running_requests`, which the slots of the state pool may have lowered, are running."""
    return queues.state[0].num_running >= queues.settings[0].max_num_seqs


@njit()
def _count_waiting(queues: Queues) -> None:
    """Count a step that leaves requests waiting, by what keeps the first of them out."""
    state, own = queues.state[0], queues.sglang[0]
    if state.num_waiting == 0:
        return
    if own.batch_is_full:
        state.memory_limited_steps += 1
    elif _is_full(queues):
        if own.state_capped:
            state.memory_limited_steps += 1
        else:
            state.seqs_limited_steps += 1
    else:
        state.budget_limited_steps += 1


@njit()
def _chunk(queues: Queues, slot: Any, room: Any) -> Any:
    """Prompt tokens that a request computes where `room` is left; a cut falls on a page's end."""
    rest = num_tokens(slot) - slot.computed
    if rest <= room:
        return rest
    return room - room % queues.settings[0].block_size_tokens


@njit(inline="always")
def _room(queues: Queues, slot: Any) -> Any:
    """Tokens for which a request has pages or could get them."""
    settings, state = queues.settings[0], queues.state[0]
    return (slot.blocks + state.free_blocks) * settings.block_size_tokens - slot.computed


@njit()
def _expected(queues: Queues, decoding: int) -> Any:
    """Tokens that the decoding requests are expected to emit yet."""
    total = 0
    for place in range(decoding):
        total += _may_emit(queues, queues.slots[queues.running[place]])
    return total * queues.sglang[0].new_token_ratio
