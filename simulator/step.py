"""One engine step after another, compiled: schedule, price, sample acceptances, emit tokens, finish requests.

`advance` runs steps until the work is done, the client's backlog runs low, or a record buffer is full. The caller owns
the clock of the rest of the world.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simulator.costtables import CostTables, attention_us, batching_shares, boundary_us, launch_wait_us, prefill_us
from simulator.enginestate import FORESEEN, UNFORESEEN, Queues, num_tokens
from simulator.jit import njit
from simulator.prefixcache import publish_decoded
from simulator.sampling import AcceptanceTables, sample_accepted
from simulator.scheduler import retire, retire_done, schedule
from simulator.sglang.scheduler import schedule_sglang
from simulator.waitqueue import next_send_s, set_timer

#: One engine step. Times of the terms are µs, `rows_us` with the wait for launches outside CUDA graphs; `regular_gaps`
#: counts requests that emitted in the previous step too.
STEP = np.dtype(
    [
        ("start_s", "f8"),
        ("duration_us", "f8"),
        ("rows_us", "f4"),
        ("head_us", "f4"),
        ("state_us", "f4"),
        ("attention_us", "f4"),
        ("prefill_us", "f4"),
        ("draft_us", "f4"),
        ("host_us", "f4"),
        ("running", "i4"),
        ("waiting", "i4"),
        ("decoding", "i4"),
        ("prefill_tokens", "i4"),
        ("emitted_tokens", "i4"),
        ("regular_gaps", "i4"),
        ("used_blocks", "i4"),
        ("preempted", "i4"),
        ("extrapolated", "i4"),
    ],
    align=True,
)

#: One finished request; `accepted_tokens` are the drafts that it emitted (its last round is cut at its output length),
#: `cached_tokens` the prompt tokens that it found cached when it was first admitted.
REQUEST = np.dtype(
    [
        ("request_id", "i8"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("arrival_s", "f8"),
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("last_token_s", "f8"),
        ("num_preemptions", "i4"),
        ("verify_rounds", "i4"),
        ("accepted_tokens", "i4"),
        ("cached_tokens", "i4"),
        ("priority", "i4"),
    ],
    align=True,
)


class Records(NamedTuple):
    """Buffers that `advance` fills; the state's counters say how far."""

    steps: Any  # [n] STEP
    requests: Any  # [n] REQUEST
    gaps_s: Any  # [n] float64: inter-token gaps that are not the length of one step
    accepted_at: Any  # [rows] int64: rounds that accepted at least 1, 2, … drafts, of the whole run


@njit()
def advance(queues: Queues, cost: CostTables, acceptance: AcceptanceTables, records: Records) -> None:
    """Run engine steps while there is work, the buffers have room and the backlog lasts."""
    state = queues.state[0]
    room = queues.settings[0].max_num_seqs
    overlapped = queues.settings[0].async_scheduling
    while has_work(state) and not needs_backlog(state):
        if (
            state.step_records == len(records.steps)
            or state.request_records + room > len(records.requests)
            or state.gap_records + room > len(records.gaps_s)
        ):
            return
        if state.num_running + state.num_waiting == 0:  # idle until the next request is sent
            state.now_s = max(state.now_s, next_send_s(queues))
            state.seen_s = state.now_s
        if queues.sglang[0].enabled:
            schedule_sglang(queues)
        else:
            schedule(queues)
        step = records.steps[state.step_records]
        if _price(queues, cost, step) == 0 and state.preempted_in_step == 0:
            if retire_done(queues) > 0:
                continue  # nothing is launched; the next step is scheduled without the finished requests
            state.stalled = 1
            return
        if overlapped or queues.sglang[0].overlap_schedule:
            _hide_host_time(step)
        state.now_s = step.start_s + step.duration_us * 1e-6
        state.seen_s = step.start_s if overlapped else state.now_s
        _emit(queues, acceptance, records, step)
        _count(state, step)


@njit(inline="always")
def has_work(state: Any) -> Any:
    """Whether any request is unfinished."""
    return state.num_running + state.num_waiting + state.num_backlog + state.num_timers > 0


@njit(inline="always")
def needs_backlog(state: Any) -> Any:
    """Whether the client must hand over more requests before the next step."""
    if state.backlog_low == 0:
        return False
    arrived_unseen = state.last_offered_s <= state.now_s and state.permits + state.freed_permits > state.num_backlog
    return arrived_unseen or state.num_backlog < state.backlog_low


@njit()
def _price(queues: Queues, cost: CostTables, step: Any) -> int:
    """Fill in what the step does and how long each term takes; returns the rows it computes."""
    settings, state = queues.settings[0], queues.state[0]
    rows = logit_rows = decoding = context = prompts = prefill_tokens = prefill_ends = finishing = 0
    prefill_attention = prefill_state = 0.0
    extrapolated = False
    for place in range(state.num_running):
        slot = queues.slots[queues.running[place]]
        if slot.scheduled == 0:
            continue
        rows += slot.scheduled
        if slot.decoding:
            decoding += 1
            context += slot.computed
            logit_rows += slot.scheduled
        else:
            attention, recurrence, outside = prefill_us(cost, slot.computed, slot.scheduled)
            prefill_attention += attention
            prefill_state += recurrence
            extrapolated |= outside
            prompts += 1
            prefill_tokens += slot.scheduled
            prefill_ends += slot.computed + slot.scheduled
            if slot.computed + slot.scheduled == num_tokens(slot):
                finishing += 1
    logit_rows += finishing
    drafting = decoding + finishing
    if prompts > 1:
        shares = batching_shares(cost, prompts, prefill_ends / prompts, prefill_tokens / prompts)
        prefill_attention *= shares[0]
        prefill_state *= shares[1]
    step.start_s = state.now_s
    step.rows_us = cost.rows_us[rows]
    step.head_us = cost.head_us[logit_rows]
    at_boundaries = boundary_us(cost, state.states_copied_in_step, state.states_published_in_step)
    step.state_us = cost.state_us[decoding] + prefill_state + at_boundaries
    step.prefill_us = prefill_attention
    step.draft_us = cost.draft_us[drafting]
    step.attention_us = 0.0
    if decoding > 0:
        attention, outside = attention_us(cost, decoding, context / decoding)
        step.attention_us = attention
        extrapolated |= outside
    extrapolated |= rows > cost.limits[0] or decoding > cost.limits[2]
    extrapolated |= logit_rows > cost.limits[4] or drafting > cost.limits[5]
    step.host_us = settings.host_us_per_step + (settings.host_us_per_prompt_step if prefill_tokens > 0 else 0.0)
    step.duration_us = (
        cost.rows_us[rows]
        + cost.head_us[logit_rows]
        + cost.state_us[decoding]
        + prefill_state
        + at_boundaries
        + prefill_attention
        + cost.draft_us[drafting]
        + step.attention_us
    )
    wait = launch_wait_us(cost, rows, prefill_tokens, step.duration_us)
    step.rows_us += wait
    step.duration_us += wait + step.host_us
    step.used_blocks = settings.num_blocks - state.free_blocks
    step.running = state.num_running
    step.waiting = state.num_waiting
    step.decoding = decoding
    step.prefill_tokens = prefill_tokens
    step.preempted = state.preempted_in_step
    step.extrapolated = extrapolated
    return rows


@njit(inline="always")
def _hide_host_time(step: Any) -> None:
    """Host and GPU work at once: of the host's time only what is longer than the GPU's remains."""
    gpu_us = step.duration_us - step.host_us
    step.host_us = max(step.host_us - gpu_us, 0.0)
    step.duration_us = gpu_us + step.host_us


@njit()
def _emit(queues: Queues, acceptance: AcceptanceTables, records: Records, step: Any) -> None:
    """Give every scheduled request its tokens and drop the finished ones."""
    settings, state = queues.settings[0], queues.state[0]
    kept = regular = emitted_in_step = 0
    for place in range(state.num_running):
        index = queues.running[place]
        slot = queues.slots[index]
        if slot.done:
            retire(queues, index)
            continue
        emitted = 0
        if slot.scheduled > 0:
            if slot.decoding:
                accepted = sample_accepted(acceptance, settings.seed, slot.request_id, slot.rounds)
                accepted = min(accepted, slot.scheduled - 1)
                emitted = min(accepted + 1, slot.output_tokens - slot.emitted)
                slot.rounds += 1
                slot.accepted += emitted - 1
                slot.computed += emitted
                if settings.prefix_caching and slot.computed >= slot.publish_at:
                    publish_decoded(queues, index)
                state.verify_rounds += 1
                for depth in range(accepted):
                    records.accepted_at[depth] += 1
            else:
                slot.computed += slot.scheduled
                emitted = 1 if slot.computed == num_tokens(slot) else 0
            slot.scheduled = 0
        if emitted > 0:
            if slot.emitted == 0:
                slot.first_token_s = state.now_s
            elif slot.last_token_s == step.start_s:
                regular += 1
            else:
                records.gaps_s[state.gap_records] = state.now_s - slot.last_token_s
                state.gap_records += 1
            slot.last_token_s = state.now_s
            slot.decoding = 1
            slot.emitted += emitted
            emitted_in_step += emitted
            if slot.emitted == slot.output_tokens:
                _finish(queues, records, index)
                if not settings.async_scheduling:
                    retire(queues, index)
                    continue
                slot.done = FORESEEN if slot.emitted - emitted + 1 == slot.output_tokens else UNFORESEEN
        queues.running[kept] = index
        kept += 1
    state.num_running = kept
    step.regular_gaps = regular
    step.emitted_tokens = emitted_in_step


@njit()
def _finish(queues: Queues, records: Records, index: int) -> None:
    """Record a finished request and let the client go on: a permit is free, a further turn may be due."""
    settings, state = queues.settings[0], queues.state[0]
    slot = queues.slots[index]
    record = records.requests[state.request_records]
    record.request_id = slot.request_id
    record.prompt_tokens = slot.prompt_tokens
    record.output_tokens = slot.output_tokens
    record.arrival_s = slot.arrival_s
    record.scheduled_s = slot.scheduled_s
    record.first_token_s = slot.first_token_s
    record.last_token_s = slot.last_token_s
    record.num_preemptions = slot.num_preemptions
    record.verify_rounds = slot.rounds
    record.accepted_tokens = slot.accepted
    record.cached_tokens = slot.cached_tokens
    record.priority = slot.priority
    state.request_records += 1
    state.num_finished += 1
    if settings.async_scheduling:
        state.late_permits += 1  # the step after this one has been scheduled already
        state.late_s = state.now_s
    else:
        state.freed_permits += 1
        state.freed_s = state.now_s
    if slot.next_turn >= 0:
        set_timer(queues, slot.next_turn, state.now_s + slot.think_s)


@njit()
def _count(state: Any, step: Any) -> None:
    """Add the step to the run's counters, peaks and time integrals."""
    seconds = step.duration_us * 1e-6
    state.num_steps += 1
    state.step_records += 1
    state.busy_s += seconds
    state.emitted_tokens += step.emitted_tokens
    state.extrapolated_steps += step.extrapolated
    state.running_integral += step.running * seconds
    state.blocks_integral += step.used_blocks * seconds
    state.peak_running = max(state.peak_running, step.running)
    state.peak_waiting = max(state.peak_waiting, step.waiting)
    state.peak_blocks = max(state.peak_blocks, step.used_blocks)
