"""Conversations from a trace: first turns arrive by a clock, each further one when the one before is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulator.requests import RequestBlock, Turns, requests_of
from simulator.traces import Trace

if TYPE_CHECKING:
    from simulator.settings import WorkloadSettings

Clock = Callable[[int], Iterator[NDArray[np.float64]]]


def is_conversational(workload: WorkloadSettings, trace: Trace) -> bool:
    """Whether turns follow replies; at the trace's own times they do not."""
    return trace.conversation is not None and workload.arrivals != "trace"


def conversation_blocks(trace: Trace, workload: WorkloadSettings, clock: Clock) -> Iterator[RequestBlock]:
    """All `num_requests` turns, whole conversations to a block; `clock(n)` gives the times of n first turns.

    Conversations come in the order of the trace, from its start again, as others, after its end. The last one is cut.
    """
    lengths = np.bincount(_numbers(trace))
    starts = np.cumsum(lengths) - lengths
    total = workload.num_requests
    rounds, rest = divmod(total, int(lengths.sum()))
    count = rounds * len(lengths) + int(np.searchsorted(np.cumsum(lengths), rest)) + (rest > 0)
    return _blocks(trace, workload, clock(count), lengths, starts)


def _numbers(trace: Trace) -> NDArray[np.int64]:
    """Conversations numbered from 0 without gaps, in the order of their rows."""
    assert trace.conversation is not None
    changes = np.diff(trace.conversation, prepend=trace.conversation[0]) != 0
    return np.cumsum(changes)


def _blocks(
    trace: Trace,
    workload: WorkloadSettings,
    clock: Iterator[NDArray[np.float64]],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> Iterator[RequestBlock]:
    begun = sent = 0
    for arrival_s in clock:
        round_, chosen = np.divmod(np.arange(begun, begun + len(arrival_s)), len(lengths))
        turns = lengths[chosen]
        before = np.cumsum(turns) - turns
        turns = np.minimum(turns, workload.num_requests - sent - before)
        turn = np.arange(turns.sum()) - np.repeat(before, turns)
        rows = np.repeat(starts[chosen], turns) + turn
        block = requests_of(trace, workload, np.repeat(arrival_s, turns), rows, np.repeat(round_, turns))
        after = np.where(turn > 0, np.arange(len(turn)) - 1, -1).astype(np.int32)
        yield block._replace(turns=Turns(after, workload.think_time_s))
        begun += len(arrival_s)
        sent += len(turn)
