"""A decode step of SGLang: all running requests at once, after retractions when their rows do not fit."""

from __future__ import annotations

from typing import Any

from simulator.enginestate import Queues
from simulator.jit import njit
from simulator.scheduler import forget_computed, leave_running
from simulator.sglang.pool import allowed_tokens, decode_pages, hold_pages, is_prompt, lacks
from simulator.waitqueue import enqueue

#: Steps that a retraction gives the remaining requests when it sets the ratio (`SGLANG_RETRACT_DECODE_STEPS`).
RETRACT_STEPS = 20
#: The ratio at the start for a conservativeness of 1, what it falls to as a share of that, and in how many steps.
INIT_RATIO, MIN_RATIO_SHARE, RATIO_DECAY_STEPS = 0.7, 0.14, 600


@njit()
def decode_all(queues: Queues, decoding: int) -> None:
    """Schedule the first `decoding` running requests for a decode step; their pages must be free."""
    settings = queues.settings[0]
    for place in range(decoding):
        slot = queues.slots[queues.running[place]]
        hold_pages(queues, slot, slot.computed + settings.rows)
        slot.scheduled = settings.rows


@njit()
def decode(queues: Queues) -> None:
    """Schedule all decoding requests, after retractions when their rows do not fit."""
    settings, state, own = queues.settings[0], queues.state[0], queues.sglang[0]
    missing = decode_pages(queues)
    if missing <= state.free_blocks:
        decay = (own.init_new_token_ratio - own.min_new_token_ratio) / RATIO_DECAY_STEPS
        own.new_token_ratio = max(own.new_token_ratio - decay, own.min_new_token_ratio)
    else:
        while missing > state.free_blocks and state.num_running > 1:
            place = _victim(queues)
            slot = queues.slots[queues.running[place]]
            missing -= 0 if is_prompt(slot) else lacks(queues, slot, settings.rows)
            _retract(queues, place)
        own.new_token_ratio = _ratio_after_retraction(queues)
        own.batch_is_full = 0
    decoding = state.num_running
    if decoding > 0 and is_prompt(queues.slots[queues.running[decoding - 1]]):
        decoding -= 1
    if missing <= state.free_blocks:  # not so only for a request that outgrows the whole pool
        decode_all(queues, decoding)


@njit()
def _victim(queues: Queues) -> Any:
    """Whom to retract: with drafts the last, otherwise who has emitted least (of those, the longest prompt).

    The last decoding request stays; a prompt that was cut goes before it.
    """
    state = queues.state[0]
    last = state.num_running - 1
    decoding = last if is_prompt(queues.slots[queues.running[last]]) else last + 1
    if decoding == 1 or queues.settings[0].rows > 1:
        return last if decoding == 1 else decoding - 1
    chosen = 0
    best = queues.slots[queues.running[0]]
    for place in range(1, decoding):
        slot = queues.slots[queues.running[place]]
        fewer = slot.emitted < best.emitted
        if fewer or (slot.emitted == best.emitted and slot.prompt_tokens >= best.prompt_tokens):
            chosen, best = place, slot
    return chosen


@njit()
def _retract(queues: Queues, place: int) -> None:
    """Take a running request's pages away and put it at the end of the waiting queue, to be recomputed."""
    index = leave_running(queues, place)
    forget_computed(queues, index)
    enqueue(queues, index)


@njit()
def _ratio_after_retraction(queues: Queues) -> float:
    """What the remaining requests have emitted, and 20 tokens more each, as a share of what they may emit in all."""
    state = queues.state[0]
    emitted = allowed = 0
    for place in range(state.num_running):
        slot = queues.slots[queues.running[place]]
        emitted += slot.emitted + RETRACT_STEPS
        allowed += allowed_tokens(queues, slot)
    return min(emitted / (allowed + 1), 1.0)
