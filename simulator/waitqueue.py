"""The queues before an engine: the client's backlog, its timers for further turns, and the engine's waiting queue.

The waiting queue is a ring in order of arrival, or, under the policy `priority`, a binary heap by priority, then
arrival. A client may cap its requests in flight by permits.
"""

from __future__ import annotations

from typing import Any

from simulator.enginestate import Queues
from simulator.jit import njit


@njit()
def _goes_before(slots: Any, a: int, b: int, by_priority: bool) -> bool:
    """Whether the request in slot a goes before that in slot b: by priority where asked for, then time, then number."""
    if by_priority and slots[a].priority != slots[b].priority:
        return bool(slots[a].priority < slots[b].priority)
    if slots[a].arrival_s != slots[b].arrival_s:
        return bool(slots[a].arrival_s < slots[b].arrival_s)
    return bool(slots[a].request_id < slots[b].request_id)


@njit()
def _push(heap: Any, count: int, slots: Any, index: int, by_priority: bool) -> None:
    place = count
    while place > 0:
        parent = (place - 1) // 2
        if not _goes_before(slots, index, heap[parent], by_priority):
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = index


@njit()
def _pop(heap: Any, count: int, slots: Any, by_priority: bool) -> None:
    """Remove the first of `count` entries."""
    count -= 1
    index = heap[count]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and _goes_before(slots, heap[child + 1], heap[child], by_priority):
            child += 1
        if not _goes_before(slots, heap[child], index, by_priority):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = index


@njit()
def enqueue(queues: Queues, index: int) -> None:
    """Put a request at the end of the waiting queue, or where its priority puts it."""
    state = queues.state[0]
    if queues.settings[0].priority_policy:
        _push(queues.waiting, state.num_waiting, queues.slots, index, True)
    else:
        queues.waiting[(state.waiting_head + state.num_waiting) % len(queues.waiting)] = index
    state.num_waiting += 1


@njit()
def put_back(queues: Queues, index: int) -> None:
    """Put a preempted request at the front of the waiting queue, or where its priority puts it."""
    if queues.settings[0].priority_policy:
        enqueue(queues, index)
        return
    state, capacity = queues.state[0], len(queues.waiting)
    state.waiting_head = (state.waiting_head - 1 + capacity) % capacity
    queues.waiting[state.waiting_head] = index
    state.num_waiting += 1


@njit(inline="always")
def first_waiting(queues: Queues) -> Any:
    """Slot of the request that is admitted next."""
    return queues.waiting[queues.state[0].waiting_head]


@njit()
def dequeue(queues: Queues) -> None:
    """Remove the first waiting request."""
    state = queues.state[0]
    if queues.settings[0].priority_policy:
        _pop(queues.waiting, state.num_waiting, queues.slots, True)
    else:
        state.waiting_head = (state.waiting_head + 1) % len(queues.waiting)
    state.num_waiting -= 1


@njit()
def worst_running(queues: Queues) -> int:
    """Place among the running requests of the one to preempt: the last, or the one of least precedence."""
    state = queues.state[0]
    worst = state.num_running - 1
    if queues.settings[0].priority_policy:
        for place in range(state.num_running - 1):
            if _goes_before(queues.slots, queues.running[worst], queues.running[place], True):
                worst = place
    return int(worst)


@njit()
def set_timer(queues: Queues, index: int, due_s: float) -> None:
    """Let the client send a further turn at a later time."""
    state = queues.state[0]
    queues.slots[index].arrival_s = due_s
    _push(queues.timers, state.num_timers, queues.slots, index, False)
    state.num_timers += 1


@njit()
def next_send_s(queues: Queues) -> float:
    """When the next request of the backlog or of a timer may be sent; infinity when there is none."""
    state, due_s = queues.state[0], float("inf")
    if state.num_backlog > 0:
        due_s = queues.slots[queues.backlog[state.backlog_head]].arrival_s
    if state.num_timers > 0:
        due_s = min(due_s, queues.slots[queues.timers[0]].arrival_s)
    return due_s


@njit()
def send(queues: Queues) -> None:
    """Move requests that are due from timers and backlog to the waiting queue, as far as the client's permits go.

    A request that uses a permit which a step freed was sent when that step ended; the others when they were due.
    Further turns go before new requests.
    """
    state = queues.state[0]
    while state.permits + state.freed_permits > 0:
        if state.num_timers > 0 and queues.slots[queues.timers[0]].arrival_s <= state.seen_s:
            index = queues.timers[0]
            _pop(queues.timers, state.num_timers, queues.slots, False)
            state.num_timers -= 1
        elif state.num_backlog > 0 and queues.slots[queues.backlog[state.backlog_head]].arrival_s <= state.seen_s:
            index = queues.backlog[state.backlog_head]
            state.backlog_head = (state.backlog_head + 1) % len(queues.backlog)
            state.num_backlog -= 1
        else:
            break
        slot = queues.slots[index]
        if state.permits > 0:
            state.permits -= 1
        else:
            state.freed_permits -= 1
            slot.arrival_s = max(slot.arrival_s, state.freed_s)
        enqueue(queues, index)
        state.num_arrived += 1
    state.permits += state.freed_permits
    state.freed_permits = state.late_permits
    state.freed_s = state.late_s
    state.late_permits = 0
