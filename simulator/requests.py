"""Requests as a client hands them to an engine: lengths, times, priorities, turns and what their prompts share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.errors import UsageError
from simulator.traces import Trace

if TYPE_CHECKING:
    from simulator.settings import WorkloadSettings

#: Offset of the numbers of prompt units when a trace starts again.
_AGAIN = 1 << 40


class PrefixIds(NamedTuple):
    """What the requests of a block have in common with others.

    `shared_tokens`: every request starts with the same so many tokens. `stream`: number of a request's conversation, or
    -1 for one of its own. `units` of request i are `unit_ids[unit_start[i]:unit_start[i + 1]]`, each for
    `unit_tokens` prompt tokens (the last may be shorter).
    """

    shared_tokens: int
    stream: NDArray[np.int64]  # [n]
    unit_tokens: int
    unit_start: NDArray[np.int64]  # [n + 1]
    unit_ids: NDArray[np.int64]

    @classmethod
    def streams(cls, stream: NDArray[np.int64], shared_tokens: int = 0) -> PrefixIds:
        """Requests without units."""
        return cls(shared_tokens, stream, 1, np.zeros(len(stream) + 1, np.int64), np.zeros(0, np.int64))


class Turns(NamedTuple):
    """Requests that follow others: `after[i]` is the one in the same block before request i, or -1."""

    after: NDArray[np.int32]  # [n]
    think_s: float  # from the reply to the next send


class RequestBlock(NamedTuple):
    """Consecutive requests. What is None: no priorities, every request alone, no prefix shared."""

    arrival_s: NDArray[np.float64]  # [n] non-decreasing over all blocks; 0 in a closed loop
    prompt_tokens: NDArray[np.int32]  # [n]
    output_tokens: NDArray[np.int32]  # [n]
    priority: NDArray[np.int32] | None = None  # [n] lower goes first
    turns: Turns | None = None
    prefix: PrefixIds | None = None


def requests_of(
    trace: Trace,
    workload: WorkloadSettings,
    arrival_s: NDArray[np.float64],
    rows: NDArray[np.int64],
    round_: NDArray[np.int64],
) -> RequestBlock:
    """Rows of a trace as requests; `round_` counts how often the trace was used before, whose prompts are others."""
    count = len(rows)
    stream = np.full(count, -1, np.int64)
    if trace.conversation is not None:
        stream = trace.conversation[rows] + round_ * (int(trace.conversation.max()) + 1)
    prefix = PrefixIds.streams(stream, workload.shared_prefix_tokens)
    if trace.hash_ids is not None:
        units = trace.hash_ids.of(rows, round_ * _AGAIN)
        prefix = prefix._replace(unit_tokens=workload.hash_block_tokens, unit_start=units.start, unit_ids=units.ids)
    return RequestBlock(
        arrival_s,
        trace.prompt_tokens[rows],
        trace.output_tokens[rows],
        None if trace.priority is None else trace.priority[rows],
        None,
        prefix,
    )


def check_units(trace: Trace, unit_tokens: int) -> None:
    """Raise `UsageError` unless every prompt has as many units as its tokens need."""
    assert trace.hash_ids is not None
    given = np.diff(trace.hash_ids.start)
    needed = -(-trace.prompt_tokens.astype(np.int64) // unit_tokens)
    wrong = np.flatnonzero(given != needed)
    if len(wrong):
        row = int(wrong[0])
        raise UsageError(
            f"trace '{trace.source}', row {row + 1}: {given[row]} hash_ids for {trace.prompt_tokens[row]} tokens; "
            f"units of workload.hash_block_tokens = {unit_tokens} tokens need {needed[row]}"
        )
