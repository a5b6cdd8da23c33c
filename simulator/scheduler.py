"""The scheduler of vLLM's v1 engine: which requests run how many rows in one engine step.

Running requests come first, in order, and drafts count against the token budget. When blocks run out the last running
request, or the one of least precedence under the policy `priority`, is preempted: it loses its blocks and goes back to
the waiting queue, to be recomputed. Waiting requests are admitted only in a step without preemption, in order, and only
when the whole prompt fits; their prompts are cut into chunks by what is left of the budget. With prefix caching a
waiting request starts after the longest prefix that is cached (`simulator.prefixcache`).

All state is in plain arrays (`simulator.enginestate`) so that Numba compiles the loop; `simulator.engine` owns the
arrays and the clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator import prefixcache
from simulator.enginestate import UNBOUNDED, UNFORESEEN, Queues, attention_blocks, num_tokens
from simulator.jit import njit
from simulator.waitqueue import dequeue, first_waiting, put_back, send, worst_running


@njit()
def schedule(queues: Queues) -> None:
    """Set `scheduled` of every running request for the next step, after admissions and preemptions."""
    settings, state = queues.settings[0], queues.state[0]
    send(queues)
    budget = settings.max_num_batched_tokens
    lookahead = settings.rows - 1
    state.preempted_in_step = 0
    state.states_copied_in_step = 0
    state.states_published_in_step = 0

    place = 0
    while place < state.num_running:
        slot = queues.slots[queues.running[place]]
        if slot.done:
            rows = min(settings.rows, budget) if slot.done == UNFORESEEN else 0
        else:
            wanted = settings.rows if slot.decoding else _chunk(settings, slot)
            rows = min(wanted, budget, settings.max_model_len - slot.computed)
            if settings.prefix_caching and not slot.decoding:
                rows = prefixcache.aligned_chunk(settings, slot, slot.computed, rows)
        slot.scheduled = rows
        if rows > 0 and not slot.done and slot.computed + rows + lookahead > slot.token_room:
            place, freed_rows, kept = _make_room(queues, place)
            budget += freed_rows
            if not kept:
                break  # the request itself was preempted
        if settings.prefix_caching and rows > 0 and not slot.decoding:
            prefixcache.publish_prompt(queues, queues.running[place])
        budget -= rows
        place += 1
    if state.preempted_in_step == 0:
        _admit(queues, budget)
    else:
        state.memory_limited_steps += 1


@njit()
def _make_room(queues: Queues, place: int) -> tuple[int, int, bool]:
    """Give the request at `place` the blocks for its rows, at the expense of others.

    Returns its place afterwards, the rows that others had in this step and lost, and whether it is still running.
    """
    settings, state = queues.settings[0], queues.state[0]
    lookahead = settings.rows - 1
    slot = queues.slots[queues.running[place]]
    tokens = slot.computed + slot.scheduled
    if settings.prefix_caching:
        prefixcache.release_last_state(queues, slot)
        needed = prefixcache.missing_blocks(queues, slot, tokens, lookahead)
    else:
        needed = attention_blocks(settings, tokens + lookahead) + settings.state_blocks - slot.blocks
    freed_rows = 0
    while needed > state.free_blocks:
        victim = worst_running(queues)
        if victim < place:
            freed_rows += queues.slots[queues.running[victim]].scheduled
        _preempt(queues, victim)
        if victim == place:
            return place, freed_rows, False
        place -= victim < place
    if settings.prefix_caching:
        prefixcache.grow(queues, slot, tokens, lookahead)
    else:
        _hold_blocks(queues, slot, needed)
    return place, freed_rows, True


@njit()
def _admit(queues: Queues, budget: int) -> None:
    """Move waiting requests to the running ones, in order, while they fit."""
    settings, state = queues.settings[0], queues.state[0]
    lookahead = settings.rows - 1
    while state.num_waiting > 0 and budget > 0 and state.num_running < settings.max_num_seqs:
        index = first_waiting(queues)
        slot = queues.slots[index]
        hit, revived, writing = 0, 0, False
        if settings.prefix_caching:
            hit, revived, writing = prefixcache.find_hit(queues, index)
        if writing:
            state.deferred_steps += 1
            return
        slot.computed = hit * settings.block_size_tokens
        chunk = min(_chunk(settings, slot), budget)
        if settings.prefix_caching:
            chunk = prefixcache.aligned_chunk(settings, slot, slot.computed, chunk)
        tokens = slot.computed + chunk
        slot.computed = 0
        if chunk == 0 or (settings.chunked_prefill == 0 and chunk < num_tokens(slot)):
            break  # the prompt waits for a step with room for a block, or for all of it
        needed = attention_blocks(settings, tokens + lookahead)
        if settings.reserve_full_isl:
            needed = max(needed, attention_blocks(settings, num_tokens(slot)))
        if settings.prefix_caching:
            needed += revived - hit * settings.attention_groups + prefixcache.first_states(settings)
        else:
            needed += settings.state_blocks
        kept_free = settings.watermark_blocks if state.num_running > 0 else 0
        if needed + kept_free > state.free_blocks:
            state.memory_limited_steps += 1
            return
        dequeue(queues)
        queues.running[state.num_running] = index
        state.num_running += 1
        if np.isnan(slot.scheduled_s):
            slot.scheduled_s = state.now_s
        if settings.prefix_caching:
            if slot.num_preemptions == 0:
                slot.cached_tokens = hit * settings.block_size_tokens
                state.prefix_cache_queries += num_tokens(slot)
                state.prefix_cache_hits += slot.cached_tokens
            prefixcache.admit(queues, index, hit, tokens, lookahead)
            slot.scheduled = chunk
            prefixcache.publish_prompt(queues, index)
        else:
            slot.scheduled = chunk
            _hold_blocks(queues, slot, attention_blocks(settings, tokens + lookahead) + settings.state_blocks)
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
def _hold_blocks(queues: Queues, slot: Any, count: Any) -> None:
    """Give a request `count` more blocks of a pool that caches no prefixes."""
    settings = queues.settings[0]
    slot.blocks += count
    queues.state[0].free_blocks -= count
    blocks = (slot.blocks - settings.state_blocks) // settings.attention_groups
    room = blocks * settings.block_size_tokens
    slot.token_room = room if room < settings.max_model_len else UNBOUNDED


@njit()
def _preempt(queues: Queues, place: int) -> None:
    """Take the blocks of the running request at `place` away and let it wait again."""
    index = leave_running(queues, place)
    slot = queues.slots[index]
    if slot.done:
        retire(queues, index)
        return
    if queues.settings[0].prefix_caching and slot.scheduled > 0:
        prefixcache.uncharge(queues, slot)
        prefixcache.unpublish_prompt(queues, index)
    forget_computed(queues, index)
    put_back(queues, index)


@njit()
def leave_running(queues: Queues, place: int) -> int:
    """Remove the request at `place` from the running ones; returns its slot."""
    state = queues.state[0]
    index = queues.running[place]
    state.num_running -= 1
    for later in range(place, state.num_running):
        queues.running[later] = queues.running[later + 1]
    return int(index)


@njit()
def forget_computed(queues: Queues, index: int) -> None:
    """Take the blocks of a request that lost its place away: it is recomputed, with what it has emitted."""
    state, slot = queues.state[0], queues.slots[index]
    _release_blocks(queues, slot)
    slot.computed = 0
    slot.scheduled = 0
    slot.decoding = 0
    slot.num_preemptions += 1
    state.num_preemptions += 1
    state.preempted_in_step += 1


@njit()
def _release_blocks(queues: Queues, slot: Any) -> None:
    """Return all blocks of a request to the pool."""
    if queues.settings[0].prefix_caching:
        prefixcache.release(queues, slot)
        return
    queues.state[0].free_blocks += slot.blocks
    slot.blocks = 0
    slot.token_room = 0


@njit()
def retire(queues: Queues, index: int) -> None:
    """Return the blocks of a finished request and free its slot."""
    state = queues.state[0]
    _release_blocks(queues, queues.slots[index])
    queues.free_slots[state.num_free_slots] = index
    state.num_free_slots += 1


@njit()
def retire_done(queues: Queues) -> int:
    """Drop the finished requests that still keep a place; returns how many."""
    state = queues.state[0]
    kept = 0
    for place in range(state.num_running):
        index = queues.running[place]
        if queues.slots[index].done:
            retire(queues, index)
        else:
            queues.running[kept] = index
            kept += 1
    dropped = state.num_running - kept
    state.num_running = kept
    return int(dropped)
